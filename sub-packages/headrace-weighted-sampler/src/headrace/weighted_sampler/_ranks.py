"""The data-parallel ranks: how many there are, which one this is, and which positions each takes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch.distributed as dist

from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._validation import as_int

FIRST_BLOCK = 256  # positions in the first block, so that the first sample does not wait for many others


@runtime_checkable
class Mesh(Protocol):
    """The data-parallel ranks: a 1-D ``DeviceMesh``, or anything with these two methods."""

    def size(self) -> int:
        """Return the number of ranks."""

    def get_local_rank(self) -> int:
        """Return this process's rank among them."""


def process_group() -> tuple[int, int] | None:
    """Return the default process group's (world size, rank), or None when there is no group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return None


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks: given as numbers, by a mesh, or by the process group; looked up when asked."""

    num_replicas: int | None = None
    rank: int | None = None
    mesh: Mesh | None = None

    @classmethod
    def parse(cls, num_replicas: object, rank: object, mesh: object) -> "Ranks":
        """Check the three arguments of a constructor, as far as they can be checked before an epoch begins."""
        if mesh is not None and (num_replicas is not None or rank is not None):
            raise ValueError(
                f"mesh and num_replicas/rank were both given (num_replicas={num_replicas}, rank={rank}): "
                "the mesh already says both; drop num_replicas and rank, or drop mesh"
            )
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh must be a 1-D DeviceMesh or have size() and get_local_rank(), got {type(mesh).__name__}"
            )
        if (dimensions := getattr(mesh, "ndim", 1)) != 1:
            raise ValueError(
                f"mesh must have 1 dimension, the data-parallel ranks, got {dimensions}: "
                'pass that dimension alone, such as mesh["dp"]'
            )
        ranks = cls(
            None if num_replicas is None else as_int("num_replicas", num_replicas, 1),
            None if rank is None else as_int("rank", rank, 0),
            mesh,
        )
        if ranks.num_replicas is not None and ranks.rank is not None:
            ranks.resolve()
        return ranks

    def resolve(self) -> tuple[int, int]:
        """Return (num_replicas, rank) as of now; one single rank when nothing is known.

        >>> Ranks(4, 2).resolve(), Ranks().resolve()
        ((4, 2), (1, 0))
        """
        if self.mesh is not None:
            size = as_int("mesh.size()", self.mesh.size(), 1)
            return size, as_int("mesh.get_local_rank()", self.mesh.get_local_rank(), 0, size - 1)
        group = process_group()
        if self.rank is None and group is None and self.num_replicas not in (None, 1):
            raise ValueError(
                f"num_replicas={self.num_replicas} was given without rank, and torch.distributed is not initialised: "
                "every process would take rank 0 and read the same samples. Give rank as well, or call "
                "torch.distributed.init_process_group first"
            )
        if self.num_replicas is None and group is None and self.rank not in (None, 0):
            raise ValueError(
                f"rank={self.rank} was given without num_replicas, and torch.distributed is not initialised; give "
                "num_replicas as well, or call torch.distributed.init_process_group first"
            )
        group_size, group_rank = group or (1, 0)
        size = group_size if self.num_replicas is None else self.num_replicas
        rank = group_rank if self.rank is None else self.rank
        if rank >= size:
            raise ValueError(f"rank must be from 0 to num_replicas - 1, got rank={rank} with num_replicas={size}")
        return size, rank


def refuse_sharding_again() -> None:
    """Raise if one rank's samples are about to be distributed once more, by accelerate.

    Only the calls that are going on show it: accelerate tells a sampler nothing.
    """
    frame = sys._getframe(2) if "accelerate" in sys.modules else None
    for _ in range(4):  # torch's batch sampler, and what accelerate puts around that
        shard: Any = None if frame is None else frame.f_locals.get("self")
        if type(shard).__name__ == "BatchSamplerShard" and shard.num_processes > 1:
            raise RuntimeError(
                f"accelerate's prepare() would give each process one of {shard.num_processes} of this rank's batches "
                "and lose the others: construct the sampler with num_replicas=1 and rank=0, or leave its loader out of "
                "prepare()"
            )
        frame = None if frame is None else frame.f_back


def sharded_end(length: int, start: int, num_replicas: int, drop_last: bool) -> int:
    """Return where ranks that take positions ``start, start + 1, ...`` in turn stop, all after the same number.

    Stops short of ``length`` with ``drop_last``; otherwise positions from ``length`` on stand for those from 0 on.

    >>> sharded_end(10, 0, 4, drop_last=False), sharded_end(10, 0, 4, drop_last=True)
    (12, 8)
    """
    rest = max(0, length - start)
    return start + (rest // num_replicas if drop_last else -(-rest // num_replicas)) * num_replicas


def rank_positions(start: int, end: int, num_replicas: int, rank: int, block: int) -> Iterator[Indices]:
    """Yield one rank's positions: ``start + rank``, then every ``num_replicas``-th, in growing blocks.

    >>> [part.tolist() for part in rank_positions(0, 12, num_replicas=4, rank=1, block=2)]
    [[1, 5], [9]]
    """
    low, size = start + rank, min(block, FIRST_BLOCK)
    while low < end:
        high = low + num_replicas * size
        yield np.arange(low, min(high, end), num_replicas, dtype=np.int64)
        low, size = high, min(block, 4 * size)
