"""All ranks hold the same plan, or all of them say that they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


class DifferentPlanError(RuntimeError):
    """The ranks are about to read different epochs, data or numbers of batches."""


def agree(plan: Mapping[str, Any], name: str) -> None:
    """Compare a plan over all ranks of `torch.distributed`; to be called on all of them.

    It is one exchange of a number. Without it ranks that differ would wait for one another without an end, or
    would pair steps of different epochs in silence.

    Args:
        plan: What has to be the same, as {what it is: value}.
        name: Of the loader, for the error.

    Raises:
        DifferentPlanError: On every rank, naming what differs and each rank's value.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return
    texts = {what: str(value) for what, value in plan.items()}
    mine = torch.tensor(_number(sorted(texts.items())), dtype=torch.int64, device=_device())
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    if len({int(number) for number in numbers}) == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, texts)
    told = "; ".join(
        f"{what}: " + ", ".join(f"rank {rank} has {its.get(what, 'none')}" for rank, its in enumerate(everyone))
        for what in dict.fromkeys(what for its in everyone for what in its)
        if len({its.get(what) for its in everyone}) > 1
    )
    cure = "give every rank the same shards, sizes, options and seed, and resume all of them from one checkpoint"
    raise DifferentPlanError(f"the ranks differ in what the {name} loader is to deliver ({told}): {cure}")


def _number(plan: list[tuple[str, str]]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(plan).encode(), digest_size=8).digest(), "little") >> 1


def _device() -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
