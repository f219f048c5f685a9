"""What reading indexed shards costs against ``webdataset``, on the same tar files.

    python benchmarks/shards.py               # two corpora of 200 MB each in a temporary folder, some minutes
    python benchmarks/shards.py --runs 3 --scale 0.1

Every time is a median of alternating runs in this process, after one to warm the page cache, undecoded where it is not
said, and printed as a ratio to webdataset's. webdataset has no random access: random batches are compared with its
sequential reading. litdata (which reads in a row) and Hugging Face's datasets are measured where they are installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import webdataset as wds
from peers import peers
from torch.utils.data import DataLoader

from headrace.webdatamodule import IndexedShards, index_shards, write_tars

BATCH = 64
SHARDS = 4
Works = dict[str, Callable[[], int]]


class Corpus(Sequence[tuple[str, Mapping[str, bytes]]]):
    """Samples that are made when they are written."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.total = kind, count
        self.noise = np.random.default_rng(0).bytes(1 << 20)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        start = index * 131 % 900_000
        if self.kind == "medium":
            members = {"bin": self.noise[start : start + 20_480]}
        else:
            label = json.dumps({"id": index, "label": index % 7}).encode()
            members = {"seq": self.noise[start : start + 360], "json": label}
        return f"sample{index:08d}", members


def drain(samples: Iterable[Any]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def timed(work: Callable[[], int], count: int) -> float:
    """Microseconds a sample."""
    begin = time.perf_counter()
    found = work()
    passed = time.perf_counter() - begin
    if found != count:
        raise SystemExit(f"read {found} samples of {count}")
    return 1e6 * passed / count


def alternating(works: Works, count: int, runs: int) -> dict[str, float]:
    """Return the median time of each, all of them run in turn; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            passed = timed(work, count)
            if run:
                times[name].append(passed)
    return {name: median(found) for name, found in times.items()}


def batches(count: int) -> list[list[int]]:
    order: list[int] = np.random.default_rng(0).permutation(count).tolist()
    return [order[first : first + BATCH] for first in range(0, count, BATCH)]


def random_batches(dataset: Any, order: list[list[int]]) -> int:
    return sum(len(dataset.__getitems__(batch)) for batch in order)


def as_bytes(samples: list[Any]) -> list[Any]:
    return samples


def delivered(loader: DataLoader[Any]) -> int:
    return sum(len(batch) for batch in loader)


def workers(urls: list[str], order: list[list[int]], datasets: Mapping[str, Any]) -> Works:
    """Two workers that stay, so that their start is not measured."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "collate_fn": as_bytes}
    loaders = {name: DataLoader[Any](one, batch_sampler=order, **options) for name, one in datasets.items()}
    stream = DataLoader[Any](wds.WebDataset(urls, shardshuffle=False), batch_size=BATCH, **options)
    return {name: partial(delivered, loader) for name, loader in {"webdataset": stream, **loaders}.items()}


def reading(folder: Path, others: Mapping[str, Any], count: int, runs: int) -> None:
    urls = sorted(map(str, folder.glob("*.tar")))
    order = batches(count)
    plain = IndexedShards(folder, decode=None, verify="none")
    checked, decoded = IndexedShards(folder, decode=None), IndexedShards(folder)
    works: Works = {
        "webdataset": lambda: drain(wds.WebDataset(urls, shardshuffle=False)),
        "sequential, no checksums": lambda: drain(plain.iterate()),
        "sequential": lambda: drain(checked.iterate()),
        "random batches, no checksums": lambda: random_batches(plain, order),
        "random batches": lambda: random_batches(checked, order),
        "random batches, decoded": lambda: random_batches(decoded, order),
    }
    for name, other in others.items():
        works[f"{name}, sequential"] = partial(drain, other)
    others = {name: other for name, other in others.items() if hasattr(other, "__getitems__")}
    for name, other in others.items():
        works[f"{name}, random batches"] = partial(random_batches, other, order)
    report(folder.name, alternating(works, count, runs))
    passes = workers(urls, order, {"random batches, no checksums": plain, "random batches": checked, **others})
    report(f"{folder.name}, two workers", alternating(passes, count, runs))


def report(title: str, found: dict[str, float]) -> None:
    for name, passed in found.items():
        print(f"{title:20} {name:30} {passed:7.2f} us a sample  {found['webdataset'] / passed:6.1f} x webdataset")


def opening(folder: Path, runs: int) -> None:
    times = []
    for _ in range(20 * runs):
        begin = time.perf_counter()
        dataset = IndexedShards(folder)
        opened = time.perf_counter()
        dataset[0]
        times.append((1e3 * (opened - begin), 1e3 * (time.perf_counter() - opened)))
    made, first = (median(column) for column in zip(*times, strict=True))
    command = [sys.executable, "-c", "import headrace.webdatamodule.shards.indexed_shards"]
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    imported = 1e3 * (time.perf_counter() - begin)
    print(f"{folder.name:20} opening {len(dataset)} samples: {made:.2f} ms, then the first one {first:.2f} ms", end="")
    print(f" (a process that only imports: {imported:.0f} ms)")
    nbytes = sum(path.stat().st_size for path in folder.glob("*.hri"))
    print(f"{folder.name:20} the index takes {nbytes / len(dataset):.1f} bytes a sample")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of samples, 100,000 and 10,000")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # webdataset warns of fewer shards than it likes
    with tempfile.TemporaryDirectory() as root:
        for kind, full in (("tiny", 100_000), ("medium", 10_000)):
            count, folder = int(full * options.scale), Path(root, kind)
            corpus = Corpus(kind, count)
            write_tars(corpus, folder, n_shards=SHARDS)
            index_shards(folder)
            reading(folder, peers(corpus, Path(root, f"peers of {kind}")), count, options.runs)
            opening(folder, options.runs)


if __name__ == "__main__":
    main()
