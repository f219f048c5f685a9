"""Reading: the same texts in every library's format, in a row, at random, and through two workers.

Times alternate in this process; opening and memory are those of a process of its own for each format.
"""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from formats import BATCH, Format, Texts, formats, text_of
from measure import (
    alternating,
    anonymous_memory,
    bytes_below,
    first_only,
    per_core,
    proportional_memory,
    quiet,
    timed,
    without_vision,
)


def in_a_row(one: Format, dataset: Any) -> int:
    """Touch every sample, and return how many bytes there were."""
    return sum(len(text_of(sample)) for sample in one.stream(dataset))


def at_random(one: Format, dataset: Any, order: list[list[int]]) -> int:
    return sum(len(text_of(sample)) for batch in order for sample in one.read(dataset, batch))


def first_batches(count: int, seed: int = 0) -> list[list[int]]:
    """Return random batches that hold every sample once."""
    order: list[int] = np.random.default_rng(seed).permutation(count).tolist()
    return [order[first : first + BATCH] for first in range(0, count, BATCH)]


def behind_the_first(loader: Any) -> float:
    """Seconds a batch, from the first one on: starting processes takes what it takes, once."""
    batches = iter(loader)
    next(batches)
    begin = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - begin) / count


def through_workers(found: dict[str, Format], folder: Path, runs: int) -> dict[str, float]:
    """Median seconds a batch of each, in turns; workers stay where the library lets them."""
    loaders = {name: one.workers(folder / name, 2) for name, one in found.items()}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for run in range(runs + 1):
        for name, loader in loaders.items():
            passed = behind_the_first(loader)
            if run:
                times[name].append(passed)
    return {name: median(each) for name, each in times.items()}


def alone(name: str, folder: Path, count: int) -> dict[str, Any]:
    """Seconds to the first sample and bytes of memory, of a process that reads this format only."""
    command = [sys.executable, __file__, name, str(folder), str(count)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def opened(one: Format, folder: Path, count: int) -> dict[str, Any]:
    """What ``alone`` asks the other process for."""
    one.open(folder)  # what the library imports when it is first used is not its opening
    before, anonymous = proportional_memory(), anonymous_memory()
    times = [timed(lambda: first_only(one.stream(one.open(folder)))) for _ in range(5)]
    dataset = one.open(folder)
    in_a_row(one, dataset)
    if one.random:
        at_random(one, dataset, first_batches(count))
    return {
        "open": median(times),
        "pss": proportional_memory() - before,
        "anonymous": anonymous_memory() - anonymous,
    }


def measure(texts: Texts, folder: Path, runs: int) -> list[dict[str, Any]]:
    """Return a row for each format: times over headrace's, bytes over those of the texts."""
    found = {one.name: one for one in formats()}
    total = sum(map(len, texts))
    for name, one in found.items():
        print(f"  reading: writing {name}", flush=True)
        (folder / name).mkdir(parents=True)
        one.write(texts, folder / name)
    datasets = {name: one.open(folder / name) for name, one in found.items()}
    order = first_batches(len(texts))
    for name, one in found.items():
        if in_a_row(one, datasets[name]) != total:
            raise SystemExit(f"{name} has lost something")
    row = alternating({name: partial(in_a_row, one, datasets[name]) for name, one in found.items()}, runs)
    numbered = {name: one for name, one in found.items() if one.random}
    datasets = {name: one.open_random(folder / name) for name, one in numbered.items()}
    random = alternating({name: partial(at_random, one, datasets[name], order) for name, one in numbered.items()}, runs)
    cores = {
        name: [
            per_core(partial(in_a_row, one, one.open(folder / name)), total, runs),
            per_core(partial(at_random, one, datasets[name], order), total, runs) if one.random else None,
        ]
        for name, one in found.items()
    }
    print("  reading: through two workers", flush=True)
    workers = through_workers(found, folder, runs)
    rows = []
    ours = next(iter(found))
    by_itself = {name: alone(name, folder / name, len(texts)) for name in found}
    for name, one in found.items():
        rows.append(
            {
                "name": name,
                "package": one.package,
                "sequential": row[name] / row[ours],
                "random": random[name] / random[ours] if name in random else None,
                "two_workers": workers[name] / workers[ours],
                "mb_per_core_second": cores[name],
                "open": by_itself[name]["open"] / by_itself[ours]["open"],
                "pss_mib": by_itself[name]["pss"] / 2**20,
                "anonymous_mib": by_itself[name]["anonymous"] / 2**20,
                "disk": bytes_below(folder / name) / total,
            }
        )
    return rows


def main() -> None:
    quiet()
    without_vision()
    name, folder, count = sys.argv[1:]
    [one] = [one for one in formats() if one.name == name]
    print(json.dumps(opened(one, Path(folder), int(count))))


if __name__ == "__main__":
    main()
