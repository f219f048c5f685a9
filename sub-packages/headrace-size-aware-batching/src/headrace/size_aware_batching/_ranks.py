"""Which rank of how many this process is, asked when an epoch begins, and what all ranks must agree on."""

import json
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from headrace.size_aware_batching._validation import shown


@dataclass(frozen=True)
class Ranks:
    """World size and rank: given, of a mesh, or of the process group at the time of asking.

    >>> Ranks(4, 1).current(), Ranks().current()
    ((4, 1), (1, 0))
    """

    num_replicas: int | None = None
    rank: int | Literal["all"] | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        if self.mesh is None:
            for name, least, allowed in (("num_replicas", 1, "an int >= 1"), ("rank", 0, 'an int >= 0 or "all"')):
                value = None if name == "rank" and self.of_all else getattr(self, name)
                if value is not None and (not hasattr(value, "__index__") or int(value) < least):
                    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")
            if self.num_replicas is not None and self.rank is not None and not self.of_all:
                _refuse_rank(self.num_replicas, int(self.rank))
            return
        for name in ("num_replicas", "rank"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"give either mesh or {name}, got mesh and {name}={shown(value)}: the mesh says the number of "
                    f"ranks and the rank, so leave out {name}"
                )
        missing = [name for name in ("size", "get_local_rank") if not callable(getattr(self.mesh, name, None))]
        if missing:
            raise TypeError(
                f"mesh must have size() and get_local_rank(), got {type(self.mesh).__name__} without "
                f"{' and '.join(missing)}: give a 1-D DeviceMesh, or num_replicas and rank"
            )
        if (dimensions := getattr(self.mesh, "ndim", 1)) != 1:
            raise ValueError(
                f"mesh must have one dimension, that of the data-parallel ranks, got {dimensions}: give a part of it, "
                'such as mesh["dp"]'
            )

    @property
    def of_all(self) -> bool:
        """Whether the batches of all ranks are wanted."""
        return self.rank == "all"

    def world_size(self) -> int:
        """Return the number of ranks, as it is now."""
        if self.mesh is not None:
            return int(self.mesh.size())
        if self.num_replicas is not None:
            return int(self.num_replicas)
        return dist.get_world_size() if _has_group() else 1

    def current(self) -> tuple[int, int]:
        """Return the number of ranks and the rank, as they are now."""
        world_size, rank = self.world_size(), self.rank
        if self.of_all:
            return world_size, dist.get_rank() if _has_group() else 0
        if self.mesh is not None:
            rank = self.mesh.get_local_rank()
        elif rank is None:
            if not _has_group() and world_size > 1:
                raise ValueError(
                    f"rank must be given with num_replicas={world_size} where no process group is initialized: "
                    "give it, or call torch.distributed.init_process_group first"
                )
            rank = dist.get_rank() if _has_group() else 0
        rank = int(rank)
        _refuse_rank(world_size, rank)
        return world_size, rank

    def gather(self, value: str) -> list[str] | None:
        """Return the values of all ranks, or None where there is no process group to ask.

        It is a collective: every rank of the mesh's group, or of the default group, has to call it.
        """
        if not _has_group():
            return None
        group = None
        if self.mesh is not None:
            if not callable(getattr(self.mesh, "get_group", None)):
                return None
            group = self.mesh.get_group()
        values = [""] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def gather_json(self, value: Any) -> list[Any]:
        """Return a JSON value of every rank; this one's alone where there is no process group. A collective, too."""
        return [json.loads(each) for each in self.gather(json.dumps(value)) or [json.dumps(value)]]


def refuse_sharding_again(depth: int = 2) -> None:
    """Raise if one rank's batches are about to be distributed once more, by accelerate.

    Only the calls that are going on show it: accelerate tells a batch sampler nothing.
    """
    frame = sys._getframe(depth) if "accelerate" in sys.modules else None
    while frame is not None and frame.f_globals.get("__name__") == "accelerate.data_loader":
        shard: Any = frame.f_locals.get("self")
        if type(shard).__name__ == "BatchSamplerShard" and shard.num_processes > 1:
            raise RuntimeError(
                f"accelerate's prepare() would give each process one of {shard.num_processes} of this rank's batches "
                'and lose the others: construct the batch sampler with rank="all", or leave its loader out of '
                "prepare()"
            )
        frame = frame.f_back


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _refuse_rank(num_replicas: int, rank: int) -> None:
    if rank >= num_replicas:
        raise ValueError(f"rank must be from 0 to {num_replicas - 1} with num_replicas={num_replicas}, got {rank}")
