"""What one plan a node saves: the first batch with and without ``plan_cache``, in time and private memory.

    python benchmarks/plan_cache.py                  # 1e7 and 1e8 samples, some minutes
    python benchmarks/plan_cache.py --samples 1e9    # 8 GB on the disk, 7 GB of memory

Every process begins anew and maps a file of uint16 sizes. Processes without a cache alternate with those that use it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PIECE = 10_000_000
BUDGET = 16384
STRATEGIES = ("stratified", "packed", "bucketed")


def write_sizes(path: Path, count: int) -> None:
    """Write lognormal sizes, a piece at a time."""
    sizes = np.lib.format.open_memmap(path, "w+", np.uint16, (count,))
    draw = np.random.default_rng(0)
    for start in range(0, count, PIECE):
        stop = min(start + PIECE, count)
        sizes[start:stop] = np.clip(draw.lognormal(np.log(360), 0.8, stop - start), 8, 2048)
    sizes.flush()


def private() -> int:
    """Return the bytes of memory that this process has to itself; pages of files are shared and not counted."""
    words = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").split()
    return 1024 * int(words[words.index("Private_Dirty:") + 1])


def child(path: str, strategy: str, cache: str) -> None:
    """Plan to the first batch, and to the first state, and say what that took."""
    from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

    sizes, before, begin, busy = np.load(path, mmap_mode="r"), private(), time.perf_counter(), time.process_time()
    sampler = DistributedSizeAwareBatchSampler(
        sizes,
        BUDGET,
        strategy=strategy,  # type: ignore[arg-type]  # of STRATEGIES
        num_replicas=8,
        rank=0,
        plan_cache=cache or None,
    )
    batches = iter(sampler)
    first = next(batches)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    after = private()
    for _ in range(2000):
        next(batches)
    several = time.perf_counter() - begin - seconds
    begin = time.perf_counter()
    sampler.state_dict()
    found = {
        "seconds": seconds,
        "busy": busy,
        "per_batch": several / 2000,
        "state": time.perf_counter() - begin,
        "private": after - before,
        "private_later": private() - before,
        "first": first,
    }
    print(json.dumps(found))


def start(path: Path, strategy: str, cache: Path | None) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--child", str(path), strategy, "" if cache is None else str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finished(process: "subprocess.Popen[str]") -> dict[str, Any]:
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(process.returncode)
    found: dict[str, Any] = json.loads(text)
    return found


def measure(count: int, strategy: str, folder: Path, runs: int, ranks: int) -> None:
    path, cache = folder / f"{count}.npy", folder / f"plans-{count}-{strategy}"
    if not path.exists():
        write_sizes(path, count)
    found: dict[str, list[dict[str, Any]]] = {"without": [], "first": [], "second": []}
    for run in range(runs):
        found["without"].append(finished(start(path, strategy, None)))
        if run == 0:
            found["first"].append(finished(start(path, strategy, cache)))
        found["second"].append(finished(start(path, strategy, cache)))
    assert len({tuple(one["first"]) for some in found.values() for one in some}) == 1
    together = [finished(process) for process in [start(path, strategy, cache) for _ in range(ranks)]]
    seconds = {name: median(one["seconds"] for one in some) for name, some in found.items()}
    for name, some in found.items():
        own, later = (max(one[key] for one in some) / 1e6 for key in ("private", "private_later"))
        busy, state, batch = (median(one[key] for one in some) for key in ("busy", "state", "per_batch"))
        print(
            f"{count:.0e} {strategy:10} {name:8} first batch {seconds[name]:7.3f} s "
            f"({seconds[name] / seconds['without']:6.4f} of without), processor {busy:7.3f} s, "
            f"first state {state:7.3f} s, private memory {own:7.1f} MB, later {later:7.1f} MB, "
            f"a batch {1e6 * batch:5.0f} us",
            flush=True,
        )
    slowest = max(one["seconds"] for one in together)
    print(f"{count:.0e} {strategy:10} {ranks} at once: slowest first batch {slowest:.3f} s", flush=True)
    stored = sum(one.stat().st_size for one in cache.iterdir())
    print(f"{count:.0e} {strategy:10} {stored / count:.2f} bytes a sample on the disk", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=lambda word: int(float(word)), nargs="+", default=[10**7, 10**8])
    parser.add_argument("--strategies", nargs="+", default=["stratified"], choices=STRATEGIES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8, help="processes at once, from the second on")
    parser.add_argument("--folder", type=Path, help="for sizes and plans; a temporary one by default")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for count in options.samples:
            for strategy in options.strategies:
                measure(count, strategy, Path(folder), options.runs, options.ranks)


if __name__ == "__main__":
    main()
