"""Which rank of how many this process is, asked when an epoch begins, and what all ranks must agree on."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """World size and rank: given, of a mesh, or of the process group at the time of asking.

    Args:
        num_replicas: Number of data-parallel ranks.
        rank: Rank of this process among them.
        mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, or anything with ``size()`` and ``get_local_rank()``.

    Raises:
        TypeError: If ``mesh`` has not these methods.
        ValueError: If the mesh comes with one of the others or has several dimensions, or a number is not allowed.

    >>> Ranks(4, 1).current(), Ranks().current()
    ((4, 1), (1, 0))
    """

    num_replicas: int | None = None
    rank: int | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        if self.mesh is None:
            for name, least in (("num_replicas", 1), ("rank", 0)):
                value = getattr(self, name)
                if value is not None and (not hasattr(value, "__index__") or int(value) < least):
                    raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
            if self.num_replicas is not None and self.rank is not None:
                _refuse_rank(self.num_replicas, self.rank)
            return
        for name in ("num_replicas", "rank"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"give either mesh or {name}, got mesh and {name}={value!r}: the mesh says the number of ranks and "
                    f"the rank, so leave out {name}"
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


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _refuse_rank(num_replicas: int, rank: int) -> None:
    if rank >= num_replicas:
        raise ValueError(f"rank must be from 0 to {num_replicas - 1} with num_replicas={num_replicas}, got {rank}")
