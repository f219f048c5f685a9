"""What reading indexed shards costs against ``webdataset``, on the same tar files.

    python benchmarks/shards.py               # two corpora of 200 MB each in a temporary folder, some minutes
    python benchmarks/shards.py --runs 3 --scale 0.1
    python benchmarks/shards.py --start 10000  # only the start of a worker, with so many shards
    python benchmarks/shards.py --disk  # only the bytes that short texts take on disk

Every time is a median of alternating runs in this process, after one to warm the page cache, undecoded where it is not
said, and printed as a ratio to webdataset's, the median of the runs' ratios; what is decoded is compared with
`webdataset, decoded`. webdataset has no random access: random batches are compared with its sequential reading. LMDB,
litdata (which reads in a row) and Hugging Face's datasets are measured where they are installed. "packed" are the same
samples written with `bytes_per_pack=65536`, of which medium ones have few in a pack. `--processor` counts the
processor's time of what runs in this process, on a machine that is busy with other work.
"""

import argparse
import json
import pickle
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

from headrace.webdatamodule import IndexedShards, index_shards, write_shards, write_tars

BATCH = 64
SHARDS = 4
PACK = 1 << 16
Works = dict[str, Callable[[], int]]
Clock = Callable[[], float]


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
        elif self.kind == "texts":
            members = {"txt": self.noise[start : start + 100 + index * 97 % 301]}
        else:
            label = json.dumps({"id": index, "label": index % 7}).encode()
            members = {"seq": self.noise[start : start + 360], "json": label}
        return f"sample{index:08d}", members


def drain(samples: Iterable[Any]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def timed(work: Callable[[], int], count: int, clock: Clock) -> float:
    """Microseconds a sample."""
    begin = clock()
    found = work()
    passed = clock() - begin
    if found != count:
        raise SystemExit(f"read {found} samples of {count}")
    return 1e6 * passed / count


def alternating(works: Works, count: int, runs: int, clock: Clock = time.perf_counter) -> dict[str, list[float]]:
    """Return the times of each, all of them run in turn; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            passed = timed(work, count, clock)
            if run:
                times[name].append(passed)
    return times


def batches(count: int) -> list[list[int]]:
    order: list[int] = np.random.default_rng(0).permutation(count).tolist()
    return [order[first : first + BATCH] for first in range(0, count, BATCH)]


def random_batches(dataset: Any, order: list[list[int]]) -> int:
    return sum(len(dataset.__getitems__(batch)) for batch in order)


def one_by_one(dataset: Any, order: list[list[int]]) -> int:
    return sum(1 for batch in order for index in batch if dataset[index])


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


def reading(folder: Path, packed: Path, others: Mapping[str, Any], count: int, runs: int, clock: Clock) -> None:
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
        "one by one": lambda: one_by_one(checked, order),
        "webdataset, decoded": lambda: drain(wds.WebDataset(urls, shardshuffle=False).decode()),
        "random batches, decoded": lambda: random_batches(decoded, order),
        "one by one, decoded": lambda: one_by_one(decoded, order),
    }
    together, whole_packed = IndexedShards(packed, decode=None), IndexedShards(packed)
    works |= {
        "packed, sequential": lambda: drain(together.iterate()),
        "packed, random batches": lambda: random_batches(together, order),
        "packed, one by one": lambda: one_by_one(together, order),
        "packed, random batches, decoded": lambda: random_batches(whole_packed, order),
        "packed, one by one, decoded": lambda: one_by_one(whole_packed, order),
    }
    for name, other in others.items():
        works[f"{name}, sequential"] = partial(drain, other)
    others = {name: other for name, other in others.items() if hasattr(other, "__getitems__")}
    for name, other in others.items():
        works[f"{name}, random batches"] = partial(random_batches, other, order)
    if "LMDB" in others:
        whole = others["LMDB"].decoded()
        works["LMDB, one by one"] = partial(one_by_one, others["LMDB"], order)
        works["LMDB, random batches, decoded"] = partial(random_batches, whole, order)
        works["LMDB, one by one, decoded"] = partial(one_by_one, whole, order)
    report(folder.name, alternating(works, count, runs, clock))
    datasets = {"random batches, no checksums": plain, "random batches": checked, "packed, random batches": together}
    passes = workers(urls, order, {**datasets, **others})
    report(f"{folder.name}, two workers", alternating(passes, count, runs))


def report(title: str, found: dict[str, list[float]]) -> None:
    for name, times in found.items():
        peer = "webdataset, decoded" if name.endswith("decoded") else "webdataset"
        ratios = [other / passed for other, passed in zip(found[peer], times, strict=True)]
        spread = f"({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"{title:20} {name:32} {median(times):7.2f} us a sample  {median(ratios):6.1f} x {peer} {spread}")


def starting(folder: Path, shards: int, runs: int) -> None:
    """What a worker does with a dataset that comes to it, up to its first sample and its first batch."""
    write_tars(Corpus("tiny", 2 * shards), folder, n_shards=shards)
    index_shards(folder)
    sent = pickle.dumps(IndexedShards(folder))
    times: list[tuple[float, float]] = []
    for _ in range(runs):
        begin = time.perf_counter()
        dataset = pickle.loads(sent)
        dataset[7]
        first = time.perf_counter()
        dataset.__getitems__(batches(len(dataset))[0])
        times.append((1e3 * (first - begin), 1e3 * (time.perf_counter() - first)))
    one, batch = (median(column) for column in zip(*times, strict=True))
    print(f"{shards} shards: {len(sent)} bytes; first sample {one:.1f} ms, first batch {batch:.1f} ms more")


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


def disk(root: Path) -> None:
    """The bytes that 10,000 texts of 100 to 400 bytes take, index and manifest included, for each byte of text."""
    corpus = Corpus("texts", 10_000)
    payload = sum(len(corpus[index][1]["txt"]) for index in range(len(corpus)))
    for name, packs in (("shards", None), ("packed shards", PACK)):
        write_shards(corpus, root / name, n_shards=2, bytes_per_pack=packs)
    peers(corpus, root)
    for folder in sorted(root.iterdir()):
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder.name:14} {nbytes / payload:5.2f} bytes on disk for each byte of text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of samples, 100,000 and 10,000")
    parser.add_argument("--processor", action="store_true", help="count the processor's time, not the wall's")
    parser.add_argument("--disk", action="store_true", help="measure the bytes that short texts take on disk")
    parser.add_argument("--start", type=int, default=0, help="measure the start of a worker, with so many shards")
    options = parser.parse_args()
    clock = time.thread_time if options.processor else time.perf_counter
    warnings.simplefilter("ignore")  # webdataset warns of fewer shards than it likes
    with tempfile.TemporaryDirectory() as root:
        if options.disk:
            disk(Path(root))
            return
        if options.start:
            starting(Path(root, "many"), options.start, options.runs)
            return
        for kind, full in (("tiny", 100_000), ("medium", 10_000)):
            count, folder = int(full * options.scale), Path(root, kind)
            corpus = Corpus(kind, count)
            write_tars(corpus, folder, n_shards=SHARDS)
            index_shards(folder)
            packed = Path(root, f"packed {kind}")
            write_shards(corpus, packed, n_shards=SHARDS, bytes_per_pack=PACK)
            reading(folder, packed, peers(corpus, Path(root, f"peers of {kind}")), count, options.runs, clock)
            opening(folder, options.runs)
            opening(packed, options.runs)


if __name__ == "__main__":
    main()
