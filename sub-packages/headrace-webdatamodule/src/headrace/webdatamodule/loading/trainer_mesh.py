"""The data-parallel ranks of a Lightning trainer."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrainerMesh:
    """The data-parallel ranks of a Lightning trainer, under model-parallel strategies too; asked late."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __reduce__(self) -> tuple[Any, ...]:
        return _FixedRanks, (self.size(), self.get_local_rank())  # a copy is of no trainer

    def size(self) -> int:
        """Number of ranks that read different data."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

    def get_local_rank(self) -> int:
        """This process among them."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("rank", 0))


class _FixedRanks(NamedTuple):
    """Data-parallel ranks that stay as they are."""

    world: int
    rank: int

    def size(self) -> int:
        return self.world

    def get_local_rank(self) -> int:
        return self.rank
