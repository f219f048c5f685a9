"""What writing shards costs against ``webdataset``, with the bytes on the disk at the end.

    python benchmarks/writing.py              # 200 MB in a temporary folder, over and over; some minutes
    python benchmarks/writing.py --runs 3 --scale 0.1 --folder /data

Every time is a median of alternating runs, after one that is not counted. webdataset's ``TarWriter`` and
``ShardWriter`` run with their defaults, ``write_shards`` in one process and in several; what is left in memory is
brought to the disk with ``fsync`` by all of them. ``write_shards`` writes indexes and a manifest too. The time of
several processes is mostly that of starting them, which by default only happens for sets that take longer than
seconds. The last line is a plain copy of the finished tar files from memory, to tell how much of it is the disk.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import webdataset as wds

from headrace.webdatamodule import write_shards

SHARDS = 4


class Corpus(Sequence[tuple[str, Mapping[str, bytes]]]):
    """Samples that are there already, so that making them is not measured."""

    def __init__(self, kind: str, count: int) -> None:
        noise = np.random.default_rng(0).bytes(1 << 20)
        self.samples = [_sample(kind, index, noise) for index in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def part(self, start: int, stop: int) -> list[tuple[str, dict[str, bytes]]]:
        """What one shard needs."""
        return self.samples[start:stop]


def _sample(kind: str, index: int, noise: bytes) -> tuple[str, dict[str, bytes]]:
    start = index * 131 % 900_000
    if kind == "medium":
        return f"sample{index:08d}", {"bin": noise[start : start + 20_480]}
    label = json.dumps({"id": index, "label": index % 7}).encode()
    return f"sample{index:08d}", {"seq": noise[start : start + 360], "json": label}


def sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def tar_writer(corpus: Corpus, folder: Path) -> None:
    with wds.TarWriter(str(folder / "a.tar")) as sink:
        for key, members in corpus.samples:
            sink.write({"__key__": key, **members})
    sync(folder)


def shard_writer(corpus: Corpus, folder: Path) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        wds.ShardWriter(str(folder / "a-%06d.tar"), maxcount=-(-len(corpus) // SHARDS)) as sink,
    ):
        for key, members in corpus.samples:
            sink.write({"__key__": key, **members})
    sync(folder)


def ours(workers: int, corpus: Corpus, folder: Path) -> None:
    write_shards(corpus, folder, n_shards=SHARDS, workers=workers)


def plainly(pieces: Sequence[bytes], _: Corpus, folder: Path) -> None:
    for number, data in enumerate(pieces):
        with Path(folder, f"a-{number:06d}.tar").open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    sync(folder)


def timed(work: Callable[[Corpus, Path], None], corpus: Corpus, folder: Path) -> float:
    """Microseconds a sample."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()  # nobody pays for what another one has written
    begin = time.perf_counter()
    work(corpus, folder)
    return 1e6 * (time.perf_counter() - begin) / len(corpus)


def compare(kind: str, count: int, runs: int, folder: Path) -> None:
    corpus = Corpus(kind, count)
    works: dict[str, Callable[[Corpus, Path], None]] = {
        "webdataset TarWriter": tar_writer,
        "webdataset ShardWriter": shard_writer,
        "write_shards, 1 process": partial(ours, 1),
        "write_shards, 2 processes": partial(ours, 2),
    }
    timed(works["write_shards, 1 process"], corpus, folder)
    pieces = [path.read_bytes() for path in sorted(folder.glob("*.tar"))]
    works["these bytes, copied plainly"] = partial(plainly, pieces)
    times: dict[str, list[float]] = {name: [] for name in works}
    nbytes = {}
    for run in range(runs + 1):
        order = list(works.items())
        first = run % len(order)  # so that nobody always comes after the same one
        for name, work in order[first:] + order[:first]:
            passed = timed(work, corpus, folder)
            nbytes[name] = sum(path.stat().st_size for path in folder.iterdir())
            if run:
                times[name].append(passed)
    middle = {name: median(found) for name, found in times.items()}
    for name, passed in middle.items():
        ratios = [f"{middle[other] / passed:5.1f} x {other}" for other in list(works)[:2]]
        spread = f"({min(times[name]):.1f} to {max(times[name]):.1f})"
        print(f"{kind:8} {name:28} {passed:8.2f} us a sample {spread:20} {nbytes[name] / 1e6:6.0f} MB ", *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of samples, 100,000 and 10,000")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for kind, full in (("tiny", 100_000), ("medium", 10_000)):
            compare(kind, int(full * options.scale), options.runs, Path(root, kind))


if __name__ == "__main__":
    main()
