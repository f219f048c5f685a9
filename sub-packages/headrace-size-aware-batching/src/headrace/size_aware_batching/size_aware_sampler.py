"""What batch samplers by size have in common: all ranks in one process, and `set_epoch` as trainers call it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.display import counted, inner, never_raises
from headrace.size_aware_batching._shared.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.size_aware_batching._shared.run import Planner, Run
from headrace.size_aware_batching._shared.run_sampler import RunSampler


class SizeAwareSampler(RunSampler):
    """Base class of batch samplers by size whose batches come from the plans of a `Run`.

    Args:
        planner: Makes the plans.
        num_replicas: Number of data-parallel ranks; by default that of ``torch.distributed``.
        rank: Rank of this process, or ``"all"`` for the batches of all ranks.
        mesh: In place of both.
    """

    def __init__(
        self, planner: Planner, num_replicas: int | None, rank: int | Literal["all"] | None, mesh: Mesh | None
    ) -> None:
        all_ranks = isinstance(rank, str)
        if isinstance(rank, str):
            if rank != "all":
                raise ValueError(f'rank must be an int >= 0 or "all", got {shown(rank)}')
            if mesh is not None:
                raise ValueError("mesh and rank='all' were both given: give num_replicas=mesh.size() in place of mesh")
            rank = None
        super().__init__(Run(planner, Ranks(num_replicas, rank, mesh), all_ranks))

    @property
    def sampler(self) -> EpochSetter:
        """Sets the epoch; not the ``sampler`` argument. Lightning calls ``batch_sampler.sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def batch_sampler(self) -> EpochSetter:
        """Sets the epoch: Hugging Face's ``Trainer`` calls ``loader.batch_sampler.batch_sampler.set_epoch``."""
        return EpochSetter(self)

    @property
    def rank(self) -> int | Literal["all"]:
        """Current rank of this process, or ``"all"``."""
        return "all" if self._run.all_ranks else self._run.ranks.current()[1]

    def _refuse_sharding_again(self) -> None:
        refuse_sharding_again(None if self._run.all_ranks else 'rank="all"', uneven=True)

    def _in_words(self, figures: Sequence[str], more: Sequence[str] = ()) -> str:
        """Return a representation with some figures, and those that all such samplers have."""
        shown_figures = [*figures, f"epoch {self.epoch}", f"seed {self._run.planner.seed}", *more]
        return f"{type(self).__name__}({', '.join(shown_figures)})"

    def _ranks_in_words(self) -> str:
        ranks = "ranks unknown"
        with suppress(ValueError):  # of an environment that contradicts what was given
            ranks = counted(self.num_replicas, "rank")
        return f"all {ranks}" if self._run.all_ranks else ranks


class EpochSetter:
    """Passes ``set_epoch`` on to the batch sampler that it belongs to."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__} of {inner(self._owner)}"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate over next."""
        self._owner.set_epoch(epoch)


def budget_in_words(budget: Any) -> str:
    """Return the budget, or those of all columns, for a representation."""
    return f"budget {' and '.join(f'{limit:,}' for limit in (budget if isinstance(budget, list) else [budget]))}"
