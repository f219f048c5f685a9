"""One rank of ``test_interleaved_loaders.py``: which source comes when, in the process and in two workers."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from headrace.weighted_sampler import InterleavedDataset


class Same(IterableDataset[str]):
    """The same item again and again."""

    def __init__(self, item: str) -> None:
        self.item = item

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self.item


def main(folder: Path, rank: int, world: int, methods: list[str]) -> None:
    """Write down the first items of the main process and of each worker, started by each method."""
    dataset = InterleavedDataset([Same("a"), Same("b")], [1, 1], seed=5, stopping="endless")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    runs = {"main": "".join(islice(dataset, 1024)), "stream": dataset.state_dict()["stream"]}
    for method in methods:
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
        items = list(islice(loader, 2048))
        runs[method] = ["".join(items[worker::2]) for worker in range(2)]
        del loader
    (folder / f"{rank}.json").write_text(json.dumps(runs))
    dist.barrier()
    os._exit(0)  # gloo's threads race with the end of the interpreter, which may abort
