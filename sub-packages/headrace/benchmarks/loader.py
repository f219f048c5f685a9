"""What the resumable loader costs over a bare ``DataLoader`` with the same batch sampler, dataset and collate_fn.

    python benchmarks/loader.py               # some minutes; a corpus of 40 MB in a temporary folder
    python benchmarks/loader.py --runs 5 --samples 20000

Without workers the two take turns, batch by batch; with workers, which read ahead, whole epochs alternate, which only
a quiet machine measures well. Printed are medians. A first epoch warms the page cache and starts the workers. Both
are asked for their length before each epoch, as a trainer does, which plans the epochs of a mixture.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, write_shards
from headrace.weighted_sampler import WeightedDistributedSampler

BATCH, BUDGET = 64, 16_384
Making = Callable[[], Any]
Pairs = list[tuple[float, float]]  # seconds of a bare loader, and of ours


class Corpus:
    """Samples of 20 to some hundred bytes, made when they are written."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.gamma(2.0, 100.0, count), 20, 1000).astype(np.int64)
        self.noise = rng.bytes(1 << 20)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[str, dict[str, bytes]]:
        start = index * 131 % 900_000
        label = json.dumps({"id": index, "label": index % 7}).encode()
        return f"sample{index:08d}", {"seq": self.noise[start : start + int(self.lengths[index])], "json": label}


def padded(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Shape [samples, longest], uint8; labels are decoded in the worker, and left there."""
    texts = [sample["seq"] for sample in samples]
    longest = max(map(len, texts))
    joined = b"".join(text.ljust(longest, b"\0") for text in texts)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(texts), longest)


def batchings(sizes: Any, sources: IndexedShards) -> dict[str, Making]:
    """Batch samplers to compare with, each made anew for either loader."""
    sized = partial(DistributedSizeAwareBatchSampler, sizes, BUDGET, cost="padded", num_replicas=1, rank=0)

    def mixed() -> Any:
        order = WeightedDistributedSampler(sources, {"one": 1.0, "other": 0.5}, num_replicas=1, rank=0)
        return sized(sampler=order)

    return {
        f"{BATCH} small samples": partial(DistributedBatchSampler, len(sizes), BATCH),
        f"{BUDGET:,} tokens, padded": sized,
        f"{BUDGET:,} tokens, mixture": mixed,
    }


def timed(batches: Iterator[Any]) -> float:
    """Seconds of the next batch."""
    begin = time.perf_counter()
    next(batches)
    return time.perf_counter() - begin


def batch_by_batch(bare: Any, ours: Any, count: int) -> Pairs:
    """Seconds of the same batch from either, in turns, so that what else the machine does falls on both alike."""
    ways, pairs = (iter(bare), iter(ours)), []
    for number in range(count):
        first = number % 2
        one, other = timed(ways[first]), timed(ways[1 - first])
        pairs.append((other, one) if first else (one, other))
    return pairs[1:]  # the first one plans the epoch


def drain(loader: Any) -> float:
    """Seconds of an epoch."""
    begin = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begin


def epoch_by_epoch(bare: Any, ours: Any, run: int) -> Pairs:
    """Seconds of a whole epoch of either."""
    if run % 2:
        return [(drain(bare), drain(ours))]
    after = drain(ours)
    return [(drain(bare), after)]


def compare(bare: Any, ours: Any, runs: int, workers: int) -> Pairs:
    """Seconds of the two, in pairs; a first epoch warms caches and starts workers."""
    pairs: Pairs = []
    for run in range(runs + 1):
        ours.set_epoch(run)
        bare.batch_sampler.set_epoch(run)
        count = len(bare), len(ours)  # as a trainer and a progress bar ask, beforehand
        found = epoch_by_epoch(bare, ours, run) if workers else batch_by_batch(bare, ours, min(count))
        pairs += found if run else []
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {options.samples:,} samples, medians over {options.runs} epochs")
    with tempfile.TemporaryDirectory() as folder:
        half = Corpus(options.samples // 2)
        for name in ("one", "other"):
            write_shards(half, f"{folder}/{name}", n_shards=4, workers=1)
        sources, raw = (
            IndexedShards({name: f"{folder}/{name}" for name in ("one", "other")}, decode=decode)
            for decode in ({"seq": None}, None)
        )
        sizes = sources.sizes("seq")
        print(f"{'batches':28} workers   bare us/batch   ours us/batch   overhead")
        for what, make in batchings(sizes, sources).items():
            for workers in options.workers:
                report(what, make, sources, sizes, workers, options.runs)
        for workers in options.workers:
            report(
                f"{BATCH}, undecoded",
                partial(DistributedBatchSampler, len(sizes), BATCH),
                raw,
                sizes,
                workers,
                options.runs,
            )
        sources.close()
        raw.close()


def report(what: str, make: Making, sources: IndexedShards, sizes: Any, workers: int, runs: int) -> None:
    bare: DataLoader[Any] = DataLoader(
        sources,  # type: ignore[arg-type]  # a dataset without torch
        batch_sampler=make(),
        collate_fn=padded,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    ours = ResumableLoader(sources, make(), collate_fn=padded, num_workers=workers, sizes=sizes)
    pairs = compare(bare, ours, runs, workers)
    ours.close()
    before, after = (1e6 * median(times) / (len(make()) if workers else 1) for times in zip(*pairs, strict=True))
    print(f"{what:28} {workers:7} {before:15.1f} {after:15.1f} {after / before - 1:10.1%}", flush=True)


if __name__ == "__main__":
    main()
