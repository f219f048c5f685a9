"""What data-parallel ranks do together: compare what they are about to read, and make things once for all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_Result = TypeVar("_Result")


class RankMismatchError(RuntimeError):
    """The ranks are about to read different epochs, data or numbers of batches."""


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


def is_distributed() -> bool:
    """Whether there is a process group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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
