"""What writing shards costs against ``webdataset``, with the bytes on the disk at the end.

    python benchmarks/writing.py              # 200 MB in a temporary folder, over and over; some minutes
    python benchmarks/writing.py --runs 3 --scale 0.1 --folder /data
    python benchmarks/writing.py --runs 9 --small   # 100,000 texts of 200 bytes, against a bare loop

Every time is a median of alternating runs, after one that is not counted. webdataset's ``TarWriter`` and
``ShardWriter`` run with their defaults, ``write_shards`` in one process and in several; what is left in memory is
brought to the disk with ``fsync`` by all of them. ``write_shards`` writes indexes and a manifest too. The time of
several processes is mostly that of starting them, which by default only happens for sets that take longer than
seconds. The last line is a plain copy of the finished tar files from memory, to tell how much of it is the disk.

``--small`` measures processor time, that of processes that were started included. The bare loop makes the header,
payload, padding and checksum of each sample, in one file without an index.
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
import xxhash

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
    if kind == "small":
        return f"sample{index:08d}", {"txt": noise[start : start + 200]}
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


def bare(corpus: Corpus, folder: Path) -> None:
    before, after = b"0000644\0" + b"0000000\0" * 2, b"\0" + b"0" * 11 + b"\0"
    rest = b"\0 0" + bytes(100) + b"ustar\00000" + bytes(247)
    same, padding = sum(before + after + rest) + 7 * 32, [bytes(-size % 512) for size in range(512)]
    pieces, checksums = list[bytes](), list[int]()
    with (folder / "a.tar").open("wb") as stream:
        for key, members in corpus.samples:
            for member, data in members.items():
                name, size = f"{key}.{member}".encode(), b"%011o" % len(data)
                checksum = same + sum(name) + sum(size)
                header = b"%b%b%b%b%06o%b" % (name.ljust(100, b"\0"), before, size, after, checksum, rest)
                pieces += header, data, padding[len(data) % 512]
                checksums.append(xxhash.xxh3_64_intdigest(data))
            if len(pieces) >= 3000:
                stream.write(b"".join(pieces))
                pieces.clear()
        stream.write(b"".join([*pieces, bytes(1024)]))
    sync(folder)


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


def processor(work: Callable[[Corpus, Path], None], corpus: Corpus, folder: Path) -> float:
    """Microseconds a sample of the processor, for this process and those that it started."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begin = os.times()
    work(corpus, folder)
    end = os.times()
    return 1e6 * sum(after - before for before, after in zip(begin[:4], end[:4], strict=True)) / len(corpus)


def compare_small(count: int, runs: int, folder: Path) -> None:
    corpus = Corpus("small", count)
    works: dict[str, Callable[[Corpus, Path], None]] = {
        "a bare loop": bare,
        "write_shards, 1 process": partial(ours, 1),
        "write_shards, 2 processes": partial(ours, 2),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 1):
        for name, work in works.items():
            passed = processor(work, corpus, folder)
            if run:
                times[name].append(passed)
    for name, found in times.items():
        ratio = median(mine / base for mine, base in zip(found, times["a bare loop"], strict=True))
        print(f"small    {name:28} {median(found):8.2f} us a sample of the processor {ratio:5.2f} x the bare loop")


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
    parser.add_argument("--small", action="store_true", help="100,000 short texts, against a bare loop")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        if options.small:
            compare_small(int(100_000 * options.scale), options.runs, Path(root, "small"))
            return
        for kind, full in (("tiny", 100_000), ("medium", 10_000)):
            compare(kind, int(full * options.scale), options.runs, Path(root, kind))


if __name__ == "__main__":
    main()
