"""What `write_shards` costs where each shard holds one small sample, so that all of it is files and no data.

    python benchmarks/small_shards.py
    python benchmarks/small_shards.py --shards 10000 --folder /data

The shards are written by `write_shards`, from a list and from a generator; then their bytes, from memory, file by file:
without `fsync`; and with a temporary file, `fsync`, its name and an `fsync` of the directory for each shard, the plain
way to the same promise. All take turns, each in a new folder; the folders are removed at the end, since a file system
looks longer for a free inode where many were freed a moment ago. Printed are medians of the wall's and the processor's
time, as ratios to the plain way.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from headrace.webdatamodule import write_shards

Work = Callable[[Path], object]


def plainly(files: list[tuple[str, bytes]], folder: Path, *, sync: bool) -> None:
    folder.mkdir()
    for name, data in files:
        temporary = folder / f".{name}.part"
        with temporary.open("wb") as stream:
            stream.write(data)
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        temporary.replace(folder / name)
        if sync and name.endswith(".hri"):  # once a shard
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def timed(work: Work, folder: Path) -> tuple[float, float]:
    """Seconds of the wall and of the processor."""
    os.sync()  # or one pays for what another one left
    begin, worked = time.perf_counter(), time.process_time()
    work(folder)
    return time.perf_counter() - begin, time.process_time() - worked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    options = parser.parse_args()
    samples = [(f"s{number:06d}", {"txt": b"%d" % number}) for number in range(options.shards)]
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        made = Path(root, "made")
        write_shards(samples, made, samples_per_shard=1, workers=1)
        files = [(path.name, path.read_bytes()) for path in sorted(made.glob("*.tar*"))]
        works: dict[str, Work] = {
            "the plain way": lambda folder: plainly(files, folder, sync=True),
            "the same without fsync": lambda folder: plainly(files, folder, sync=False),
            "write_shards, a list": lambda folder: write_shards(samples, folder, samples_per_shard=1, workers=1),
            "write_shards, a generator": lambda folder: write_shards(iter(samples), folder, samples_per_shard=1),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for run in range(options.runs):
            order = list(works.items())
            first = run % len(order)  # so that nobody always comes after the same one
            for name, work in order[first:] + order[:first]:
                times[name].append(timed(work, Path(root, f"{run} {name}")))
    plain = [median(column) for column in zip(*times["the plain way"], strict=True)]
    print(f"{options.shards} shards of one sample, medians of {options.runs}: {plain[0]:.2f} s the plain way")
    for name, found in times.items():
        wall, worked = (median(column) for column in zip(*found, strict=True))
        print(f"{name:28} {wall / plain[0]:6.2f} x the wall's time {worked / plain[1]:6.2f} x the processor's")


if __name__ == "__main__":
    main()
