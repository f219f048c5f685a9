"""The data-parallel ranks: how many there are, and which one this process is."""

import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from .checks import checked_int


@runtime_checkable
class Mesh(Protocol):
    """The data-parallel ranks: a 1-D ``DeviceMesh``, or anything with these two methods."""

    def size(self) -> int:
        """Return the number of ranks."""

    def get_local_rank(self) -> int:
        """Return the rank of this process among them."""


@dataclass(frozen=True)
class Ranks:
    """The arguments ``num_replicas``, ``rank`` and ``mesh``, and what they stand for at the time of asking.

    What is given counts; else the process group of ``torch.distributed``; else WORLD_SIZE and RANK of the environment,
    which ``torchrun`` sets; else there is one rank.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is not allowed, or ``mesh`` is given beside ``num_replicas`` or ``rank``.

    >>> Ranks(4, 1).current(), Ranks(1).current()
    ((4, 1), (1, 0))
    """

    num_replicas: int | None = None
    rank: int | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_replicas", 1), ("rank", 0)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_int(name, value, least))
        if self.num_replicas is not None and self.rank is not None:
            _refuse_rank(self.num_replicas, self.rank)
        if self.mesh is not None:
            self._check_mesh()

    def _check_mesh(self) -> None:
        for name in ("num_replicas", "rank"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"mesh and {name}={value} were both given: the mesh says the number of ranks and the rank, so "
                    f"leave out {name}"
                )
        if not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"mesh must be a 1-D DeviceMesh or have size() and get_local_rank(), got {type(self.mesh).__name__}: "
                "give one, or num_replicas and rank"
            )
        if (dimensions := getattr(self.mesh, "ndim", 1)) != 1:
            raise ValueError(
                f"mesh must have 1 dimension, the data-parallel ranks, got {dimensions}: give that dimension alone, "
                'such as mesh["dp"]'
            )

    @property
    def given(self) -> bool:
        """Whether any of the arguments is there."""
        return not (self.num_replicas is None and self.rank is None and self.mesh is None)

    def world_size(self) -> int:
        """Return the number of ranks, as of now; unlike ``current()`` it needs no rank."""
        return self.num_replicas if self.num_replicas is not None else self.current()[0]

    def current(self) -> tuple[int, int]:
        """Return the number of ranks and the rank, as of now.

        Raises:
            ValueError: If only one of both was given, and what tells the other is missing or contradicts it.
        """
        if self.mesh is not None:
            size = checked_int("mesh.size()", self.mesh.size(), 1)
            rank = checked_int("mesh.get_local_rank()", self.mesh.get_local_rank(), 0)
            if rank >= size:
                raise ValueError(f"mesh.get_local_rank() must be an int from 0 to {size - 1}, got {rank}")
            return size, rank
        if self.num_replicas is not None and self.rank is not None:
            return self.num_replicas, self.rank
        if self.num_replicas == 1:
            return 1, 0
        detected = _process_group_or_environment()
        if not self.given or (detected is None and self.rank == 0):
            return detected or (1, 0)
        argument, missing = ("rank", "num_replicas") if self.num_replicas is None else ("num_replicas", "rank")
        half = f"{argument}={getattr(self, argument)} was given without {missing}"
        if detected is None:
            raise ValueError(
                f"{half}, and neither a process group nor RANK and WORLD_SIZE of the environment tell it: give "
                f"{missing} as well, or call torch.distributed.init_process_group first"
            )
        world, rank = detected
        if self.num_replicas not in (None, world):
            raise ValueError(f"{half}, but there are {world} ranks: give {missing} as well, or mesh in their place")
        if self.rank not in (None, rank):
            raise ValueError(f"{half}, but this is rank {rank} of {world}: give {missing} as well, or neither")
        return detected


def process_group() -> tuple[int, int] | None:
    """Return the size of the default process group and this process's rank in it, or None without a group."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else None


def warning_of_whole_stream(source: object, ranks: Ranks) -> str:
    """Return a warning of a Hugging Face stream that each of several ranks reads whole; empty for other sources."""
    if type(source).__module__ != "datasets.iterable_dataset" or getattr(source, "_distributed", source) is not None:
        return ""
    world, rank = ranks.current()
    if world == 1:
        return ""
    return (
        f"each of {world} ranks reads all of a Hugging Face stream: split it with split_dataset_by_node(stream, "
        f"rank={rank}, world_size={world}) of datasets.distributed"
    )


_DEPTH = 16  # frames from a sampler to what accelerate puts around a loader, and some to spare


def refuse_sharding_again(cure: str | None, *, uneven: bool = False) -> None:
    """Raise if accelerate is about to distribute one rank's part once more, or to cut batches of different sizes.

    Call it in the generator that ``__iter__`` returns. Accelerate tells a sampler nothing, so only the frames below
    show it: its ``BatchSamplerShard``, for streams its ``IterableDatasetShard``, and with ``dispatch_batches`` its
    ``DataLoaderDispatcher``, which joins batches and cuts them anew.

    Args:
        cure: Arguments with which the sampler leaves the distribution to accelerate; None where it does.
        uneven: Whether its batches have different sizes.
    """
    frame = sys._getframe(2) if "accelerate" in sys.modules else None
    for _ in range(_DEPTH):
        if frame is None:
            return
        by: Any = frame.f_locals.get("self")
        kind, processes = type(by).__name__, 0
        if kind in ("BatchSamplerShard", "IterableDatasetShard"):
            processes = by.num_processes
        elif kind == "DataLoaderDispatcher":
            processes = by.state.num_processes
            if uneven and processes > 1:
                raise RuntimeError(
                    "dispatch_batches must be False for batches of different sizes, got True: accelerate's prepare() "
                    f"would join the batches of {processes} processes, cut them into equal parts and lose the rest"
                )
        if processes > 1 and cure is not None:
            raise RuntimeError(
                f"accelerate's prepare() would give each process one of {processes} of this rank's batches and lose "
                f"the others: construct the sampler with {cure}, or leave its loader out of prepare()"
            )
        frame = frame.f_back


def _process_group_or_environment() -> tuple[int, int] | None:
    world, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    if (group := process_group()) is not None or world is None or rank is None:
        return group
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise ValueError(
            f"RANK and WORLD_SIZE of the environment must be ints with 0 <= RANK < WORLD_SIZE, got RANK={rank!r} and "
            f"WORLD_SIZE={world!r}: unset them, or give num_replicas and rank"
        )
    return int(world), int(rank)


def _refuse_rank(num_replicas: int, rank: int) -> None:
    if rank >= num_replicas:
        raise ValueError(f"rank must be from 0 to {num_replicas - 1} with num_replicas={num_replicas}, got {rank}")
