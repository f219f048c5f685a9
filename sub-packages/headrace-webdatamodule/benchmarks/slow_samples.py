"""What slow samples cost: batches in order, with more of them prefetched, beside batches as they are ready.

    python benchmarks/slow_samples.py
    python benchmarks/slow_samples.py --slower 100 --share 0.01

Reading sleeps, and so does the GPU, for as long as its workers take to make a batch on average: a loop that never waits
uses it at 100 %. Some samples take several times as long as the others. Printed is the use of the GPU in percent, the
median of runs that take turns.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

FAST = 0.003  # seconds a sample


class Sleeping(Dataset[int]):
    """Samples that take their time to read."""

    def __init__(self, count: int, share: float, slower: float) -> None:
        slow = torch.rand(count, generator=torch.Generator().manual_seed(0)) < share
        self.seconds = [FAST * (slower if one else 1) for one in slow.tolist()]

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


def of_torch(data: Sleeping, batch: int, workers: int, *, in_order: bool, prefetch: int) -> Iterable[Any]:
    order = RandomSampler(data, generator=torch.Generator().manual_seed(1))
    batches = BatchSampler(order, batch, drop_last=True)
    return DataLoader(data, batch_sampler=batches, num_workers=workers, in_order=in_order, prefetch_factor=prefetch)


def of_headrace(data: Sleeping, batch: int, workers: int, *, prefetch: int) -> Iterable[Any]:
    batches = DistributedBatchSampler(len(data), batch, seed=1)
    return ResumableLoader(data, batches, num_workers=workers, prefetch_factor=prefetch)


def use(loader: Iterable[Any], step: float) -> float:
    """The share of the time that the GPU computes, from the second batch on."""
    batches, steps = iter(loader), 0
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        time.sleep(step)
        steps += 1
    return 100 * steps * step / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.05, help="of the samples that are slow (default 0.05)")
    parser.add_argument("--slower", type=float, default=10, help="times as long as the others (default 10)")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    data = Sleeping(options.batch * options.batches, options.share, options.slower)
    step = sum(data.seconds) / options.batches / options.workers
    ways: dict[str, Callable[..., Iterable[Any]]] = {
        "torch, in order": partial(of_torch, in_order=True, prefetch=2),
        "torch, as they are ready": partial(of_torch, in_order=False, prefetch=2),
        **{f"headrace, prefetch_factor={n}": partial(of_headrace, prefetch=n) for n in (2, 4, 8, 16)},
        "torch, as they are ready, 16": partial(of_torch, in_order=False, prefetch=16),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.runs):
        for name, way in ways.items():
            found[name].append(use(way(data, options.batch, options.workers), step))
    print(f"{options.share:.0%} of the samples take {options.slower:g} times as long; {options.workers} workers")
    for name, values in found.items():
        print(f"{name:32} {median(values):5.1f} %")


if __name__ == "__main__":
    main()
