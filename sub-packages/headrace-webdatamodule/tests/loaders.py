"""Loaders of a few numbered samples, and batch samplers without a state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, index_shards, write_tars

COUNT = 23


def numbered_shards(folder: Path) -> Path:
    write_tars([(f"s{i:02d}", {"json": b"%d" % i}) for i in range(COUNT)], folder, n_shards=3)
    index_shards(folder)
    return folder


WORKERS = [0, 1, 3]


class Bare:
    """A batch sampler without a state, whose number of batches differs from epoch to epoch."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.size)

    @property
    def size(self) -> int:
        return 2 + self.epoch % 3

    def __iter__(self) -> Iterator[list[int]]:
        order = [(i * 5 + self.epoch) % self.count for i in range(self.count)]
        return (order[start : start + self.size] for start in range(0, self.count, self.size))


class Wrapped:
    """A batch sampler whose sampler is told the epoch."""

    def __init__(self) -> None:
        self.sampler = Bare()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


def numbers(samples: list[Any]) -> list[int]:
    return [sample["json"] for sample in samples]


def make(folder: Path, batches: Any, **options: Any) -> ResumableLoader:
    return ResumableLoader(IndexedShards(folder), batches, **{"collate_fn": numbers, **options})


def plain(folder: Path, *, size: int = 4, world: tuple[int, int] = (1, 0), **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(COUNT, size, num_replicas=world[0], rank=world[1], seed=options.get("seed", 0))
    return make(folder, batches, num_replicas=world[0], rank=world[1], **options)


def epoch_of(loader: ResumableLoader, epoch: int) -> list[Any]:
    loader.set_epoch(epoch)
    return list(loader)


class Squares(torch.utils.data.Dataset[int]):
    """A torch dataset that reads one sample at a time."""

    fingerprint = "squares"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index**2
