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

    It is one exchange of a few numbers. Without it ranks that differ would wait for one another without an end, or
    would pair steps of different epochs in silence.

    Args:
        plan: What has to be the same, as {what it is: value}.
        name: Of the loader, for the error.

    Raises:
        DifferentPlanError: On every rank, naming what differs and each rank's value.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return
    mine = torch.tensor([_number(value) for value in plan.values()], dtype=torch.int64, device=_device())
    all_plans = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_plans, mine)
    table = torch.stack(all_plans).cpu()
    different = [what for what, same in zip(plan, (table == table[0]).all(0).tolist(), strict=True) if not same]
    if not different:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {what: str(plan[what]) for what in different})
    told = "; ".join(
        f"{what}: " + ", ".join(f"rank {rank} has {its[what]}" for rank, its in enumerate(everyone))
        for what in different
    )
    cure = "give every rank the same shards, sizes, options and seed, and resume all of them from one checkpoint"
    raise DifferentPlanError(f"the ranks differ in what the {name} loader is to deliver ({told}): {cure}")


def _number(value: Any) -> int:
    if isinstance(value, int):
        return value & (2**63 - 1)
    return int.from_bytes(hashlib.blake2b(str(value).encode(), digest_size=8).digest(), "little") >> 1


def _device() -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
