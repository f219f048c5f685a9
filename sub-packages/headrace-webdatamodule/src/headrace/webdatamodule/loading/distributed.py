"""Data-parallel ranks: how many there are, and whether all of them are about to read the same plan."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

from headrace.webdatamodule.loading.options import as_int

_Result = TypeVar("_Result")


class RankMismatchError(RuntimeError):
    """The ranks are about to read different epochs, data or numbers of batches."""


@runtime_checkable
class Mesh(Protocol):
    """The data-parallel ranks: a 1-D `DeviceMesh`, or anything with these two methods."""

    def size(self) -> int:
        """Number of ranks."""

    def get_local_rank(self) -> int:
        """This process among them."""


class TrainerMesh:
    """The data-parallel ranks of a Lightning trainer, under model-parallel strategies too; asked late."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def size(self) -> int:
        """Number of ranks that read different data."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

    def get_local_rank(self) -> int:
        """This process among them."""
        return int((self._trainer.distributed_sampler_kwargs or {}).get("rank", 0))


def data_parallel_ranks(
    num_replicas: int | None = None, rank: int | None = None, mesh: Mesh | None = None
) -> tuple[int, int]:
    """The number of data-parallel ranks and this rank, as of now.

    They come from the arguments, else from the process group of torch.distributed, else from the environment that
    `torchrun` sets (WORLD_SIZE and RANK), else there is one rank. Ask when an epoch begins: a process group may be made
    after a loader.
    """
    check_given_ranks(num_replicas, rank, mesh)
    if mesh is not None:
        return int(mesh.size()), int(mesh.get_local_rank())
    found = _running()
    if found is None and None in (num_replicas, rank) and (num_replicas or 1, rank or 0) != (1, 0):
        missing, given = ("rank", "num_replicas") if rank is None else ("num_replicas", "rank")
        value = num_replicas if rank is None else rank
        raise ValueError(f"{given}={value} was given without {missing}, and there is no process group: give both")
    world, own = found or (1, 0)
    world = world if num_replicas is None else operator.index(num_replicas)
    own = own if rank is None else operator.index(rank)
    if own >= world:
        raise ValueError(f"rank must be an int from 0 to num_replicas - 1, got rank={own} with num_replicas={world}")
    return world, own


def check_given_ranks(num_replicas: Any, rank: Any, mesh: Any) -> None:
    """Refuse ranks that cannot be meant; see `data_parallel_ranks`."""
    if mesh is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                f"mesh and num_replicas/rank were both given (num_replicas={num_replicas}, rank={rank}): the mesh "
                "already says both; drop num_replicas and rank, or drop mesh"
            )
        if not isinstance(mesh, Mesh):
            kind = type(mesh).__name__
            raise TypeError(f"mesh must be a 1-D DeviceMesh or have size() and get_local_rank(), got {kind}")
        if (dimensions := getattr(mesh, "ndim", 1)) != 1:
            raise ValueError(
                f"mesh must have 1 dimension, the data-parallel ranks, got {dimensions}: pass that dimension alone, "
                'such as mesh["dp"]'
            )
    for name, value, low in (("num_replicas", num_replicas, 1), ("rank", rank, 0)):
        if value is not None:
            as_int(name, value, low)
    if num_replicas is not None and rank is not None and rank >= num_replicas:
        raise ValueError(f"rank must be an int from 0 to num_replicas - 1 = {num_replicas - 1}, got {rank}")


def is_distributed() -> bool:
    """Whether there is a process group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _running() -> tuple[int, int] | None:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return None


def compare_plans(plan: Mapping[str, Any], name: str) -> None:
    """Compare a plan, {what it is: value}, over all ranks of `torch.distributed`; all of them have to call this.

    It is one exchange of a number. Without it, ranks that differ would wait for one another for ever, or would pair
    steps of different epochs silently. Every rank raises, naming what differs.
    """
    if not is_distributed():
        return
    texts = {what: str(value) for what, value in plan.items()}
    digest = hashlib.blake2b(repr(sorted(texts.items())).encode(), digest_size=8).digest()
    own = torch.tensor(int.from_bytes(digest, "little") >> 1, dtype=torch.int64, device=_device())
    numbers = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, own)
    if len({int(number) for number in numbers}) == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, texts)
    message = "; ".join(
        f"{what}: " + ", ".join(f"rank {rank} has {its.get(what, 'none')}" for rank, its in enumerate(everyone))
        for what in dict.fromkeys(what for its in everyone for what in its)
        if len({its.get(what) for its in everyone}) > 1
    )
    cure = "give every rank the same shards, sizes, options and seed, and resume all of them from one checkpoint"
    raise RankMismatchError(f"the ranks differ in what the {name} loader is to deliver ({message}): {cure}")


def on_one_rank(function: Callable[[], _Result]) -> _Result:
    """Call a function on rank 0 and broadcast its result, or its error, as pickles; all ranks have to call this."""
    if not is_distributed():
        return function()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = function()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0, device=_device())
    if found[1] is not None:
        raise found[1]
    result: _Result = found[0]
    return result


def _device() -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
