"""What `ResumableLoader` costs over a bare `DataLoader` on datasets that are not shards, and how fast it resumes.

    python benchmarks/map_style.py
    python benchmarks/map_style.py --batches 500 --resumes 5

Both read the same batches without workers and take turns. Each dataset is read twice: as it is, and with a collation
that makes a batch cost about a millisecond more. Printed is the processor's time, of batches the first quartile, since
what lies above is the work of other processes. A resume is from `load_state_dict` to the first batch, at 90 % of a
million samples.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

SAMPLES, BATCH, MILLION = 20_000, 64, 1_000_000


class Squares(Dataset[torch.Tensor]):
    """Reads one sample at a time."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Columns(Squares):
    """Reads a batch at a time, as Hugging Face's datasets do."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self.data[torch.tensor(indices)])


class Lmdb(Squares):
    """Samples of 1 KiB in a database."""

    def __init__(self, data: torch.Tensor, folder: str) -> None:
        import lmdb

        super().__init__(data)
        self.database = lmdb.open(folder, map_size=2**30)
        with self.database.begin(write=True) as writing:
            for index, row in enumerate(data):
                writing.put(b"%d" % index, row.numpy().tobytes())
        self.reading = self.database.begin(buffers=True)

    def __getitem__(self, index: int) -> torch.Tensor:
        data: Any = self.reading.get(b"%d" % index)
        return torch.frombuffer(bytearray(data), dtype=torch.float32)


class Collate:
    """Stacks samples, then adds a tensor as often as makes a batch cost some time."""

    def __init__(self, additions: int) -> None:
        self.additions, self.row = additions, torch.zeros(4096)

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """Make a batch."""
        for _ in range(self.additions):
            self.row += 1.0
        return torch.stack(samples)


def processor_time(batches: Iterator[Any]) -> float:
    """Seconds of the next batch."""
    begin = time.thread_time()
    next(batches)
    return time.thread_time() - begin


def turns(dataset: Any, collate: Collate, count: int) -> list[tuple[float, float]]:
    """Seconds of the same batch of a bare loader and of ours, in turns."""
    orders = [DistributedBatchSampler(len(dataset), BATCH, seed=run) for run in range(2)]
    ours = iter(ResumableLoader(dataset, orders[0], collate_fn=collate))
    bare = iter(DataLoader(dataset, batch_sampler=orders[1], collate_fn=collate))
    pairs = []
    for number in range(count):
        first, second = (bare, ours) if number % 2 else (ours, bare)
        times = processor_time(first), processor_time(second)
        pairs.append(times if number % 2 else times[::-1])
    return pairs[1:]  # the first one plans the epoch


def resume(make: Callable[[], Any]) -> float:
    """Seconds to the first batch at 90 % of a million samples."""
    data = range(MILLION)
    before = ResumableLoader(data, make(), collate_fn=list)
    for _ in islice(before, MILLION * 9 // 10 // BATCH):
        pass
    state, after = before.state_dict(), ResumableLoader(data, make(), collate_fn=list)
    begin = time.thread_time()
    after.load_state_dict(state)
    next(iter(after))
    return time.thread_time() - begin


def seeded() -> BatchSampler:
    """Torch's own, which has no state: its batches are counted."""
    order = RandomSampler(range(MILLION), generator=torch.Generator().manual_seed(0))
    return BatchSampler(order, BATCH, drop_last=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--resumes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.zeros(SAMPLES, 256)
    with tempfile.TemporaryDirectory() as folder:
        datasets = {
            "a list of tensors": list(data),
            "a dataset, sample by sample": Squares(data),
            "a dataset with __getitems__": Columns(data),
            "LMDB": Lmdb(data, folder),
        }
        print(f"{'batches of ' + str(BATCH):30} bare us/batch   ours us/batch   overhead")
        for name, dataset in datasets.items():
            for additions in (0, 300):
                pairs = turns(dataset, Collate(additions), min(options.batches, SAMPLES // BATCH))
                bare, ours = (1e6 * quantiles(times, n=4)[0] for times in zip(*pairs, strict=True))
                print(f"{name:30} {bare:13.1f} {ours:15.1f} {ours / bare - 1:10.1%}", flush=True)
    for name, make in (
        ("DistributedBatchSampler", lambda: DistributedBatchSampler(MILLION, BATCH)),
        ("torch's BatchSampler, seeded", seeded),
    ):
        print(
            f"first batch at 90 % of {MILLION:,}, {name}: {median(resume(make) for _ in range(options.resumes)):.3f} s"
        )


if __name__ == "__main__":
    main()
