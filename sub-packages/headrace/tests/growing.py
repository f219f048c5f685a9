"""Loaders over a mixture, before and after its data have grown."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

SIZES = np.random.default_rng(0).integers(1, 50, 600)
OLD, NEW = {"web": 300, "books": 90}, {"web": 300, "books": 110, "code": 40}
FIRST, THEN = {"web": 3, "books": 1}, {"web": 2, "books": 1, "code": 1}
LENGTH = {len(OLD): 2100, len(NEW): 2500}
KINDS: dict[str, dict[str, Any]] = {
    "equal": {"batch_size": 20},
    "stratified": {"max_total_size": 600, "window": 256},
    "sequential": {"max_total_size": 600, "strategy": "sequential"},
    "one window": {"max_total_size": 600},
    "pieces": {"max_total_size": 600, "max_length": 20, "oversize": "split", "window": 256},
    "optimizer steps": {"max_total_size": 600, "tokens_per_step": 3000},
}
MIXED: dict[str, dict[str, Any]] = {"samples": {}, "tokens": {"per": "token"}}


def mixture(sizes: dict[str, int], weights: Mapping[str, float], mixed: str) -> WeightedDistributedSampler:
    data = NamedConcatDataset({name: range(size) for name, size in sizes.items()})
    by_token: dict[str, Any] = {"sizes": SIZES[: len(data)]} if mixed == "tokens" else {}
    return WeightedDistributedSampler(
        data, weights, epoch_length=LENGTH[len(sizes)], num_replicas=1, rank=0, **MIXED[mixed], **by_token
    )


def loaders(
    kind: str, sizes: dict[str, int], weights: Mapping[str, float], world: int, mixed: str = "samples"
) -> list[ResumableLoader]:
    count, made = sum(sizes.values()), []
    for rank in range(world):
        options = {**KINDS[kind], "sampler": mixture(sizes, weights, mixed), "num_replicas": world, "rank": rank}
        batches: Any
        if kind == "equal":
            batches = DistributedBatchSampler(count, **options)
        elif kind == "optimizer steps":
            batches = OptimizerStepBatchSampler(SIZES[:count], **options)
        else:
            batches = DistributedSizeAwareBatchSampler(SIZES[:count], **options)
        data: Any = Keys(count) if kind == "pieces" else list(range(count))
        made.append(ResumableLoader(data, batches, collate_fn=list, check_ranks=False))
    return made


class Keys:
    """Samples that are their own keys, and pieces."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Any) -> Any:
        return key


def epoch_of(ranks: list[ResumableLoader], epoch: int | None = None, steps: int | None = None) -> list[list[list[Any]]]:
    """The steps of an epoch, or the first of them, rank by rank."""
    log = []
    if epoch is not None:
        for rank in ranks:
            rank.set_epoch(epoch)
    for step, batches in enumerate(zip(*ranks, strict=True), 1):
        log.append(list(batches))
        if step == steps:
            break
    return log


def drawn(log: list[list[list[Any]]]) -> Counter[Any]:
    keys = [key for step in log for batch in step for key in batch]
    return Counter(key if isinstance(key, int) else (key.index, key.start) for key in keys)
