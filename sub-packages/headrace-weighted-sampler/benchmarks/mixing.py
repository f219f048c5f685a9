"""What the mixture costs against drawing it with numpy, and how exact it is.

    python benchmarks/mixing.py               # 10,000,000 draws and 1,000,000,000 positions, about a minute
    python benchmarks/mixing.py --draws 1e6
    python benchmarks/mixing.py --weights 2e7 # one weight for each of 20,000,000 samples, where torch's sampler fails

Times are medians of alternating runs in this process, printed as ratios to the method of the known original (a choice
per source, one permutation of all of them, a slice for each rank), as that does it, with lists, and in arrays.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.weighted_sampler import WeightedDistributedSampler

SOURCES, WORLD = 8, 8
Weights = dict[tuple[int, int], float]


def skewed(samples: int) -> Weights:
    """Eight ranges, each about half as long as the one before, with ratios from a half to five."""
    cuts = [0, *(int(samples * (1 - 0.5**place)) for place in range(1, SOURCES)), samples]
    ratios = np.geomspace(0.5, 5, SOURCES)
    return {(low, high): float(f"{ratio:.3f}") for low, high, ratio in zip(cuts[:-1], cuts[1:], ratios, strict=True)}


def sampler(draws: int, seed: int = 0) -> WeightedDistributedSampler:
    """About so many draws an epoch."""
    weights = skewed(draws)
    scale = draws / sum((high - low) * ratio for (low, high), ratio in weights.items())
    weights = {bounds: float(f"{ratio * scale:.4f}") for bounds, ratio in weights.items()}
    return WeightedDistributedSampler(range(draws), weights, WORLD, 3, seed=seed)


def ours(draws: int) -> None:
    for _ in sampler(draws):
        pass


def drawn(draws: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """A choice per source: without replacement up to ratio 1, with replacement above."""
    lines, generator, begin, parts = sampler(draws).report().sources, np.random.default_rng(seed), 0, []
    for line in lines:
        parts.append(generator.choice(line.size, line.draws, replace=line.draws > line.size) + begin)
        begin += line.size
    return parts


def plain(draws: int) -> None:
    """The documented original's method: a list of all draws, all of it permuted, then one rank's slice of it."""
    indices: list[Any] = []
    for part in drawn(draws):
        indices.extend(list(part))
    order = torch.randperm(len(indices)).tolist()
    for _ in np.array(indices)[np.array(order)].tolist()[3::WORLD]:
        pass


def lean(draws: int) -> None:
    """The same with arrays throughout, and a list of one rank's part only."""
    indices = np.concatenate(drawn(draws))
    for _ in indices[np.random.default_rng(1).permutation(len(indices))[3::WORLD]].tolist():
        pass


def alternating(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return times


def speed(draws: int, runs: int) -> None:
    works = {"plain": lambda: plain(draws), "lean": lambda: lean(draws), "ours": lambda: ours(draws)}
    times = alternating(works, runs)
    for base, what in (("plain", "the original's method"), ("lean", "the same in arrays")):
        ratios = [own / other for own, other in zip(times["ours"], times[base], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"one of {WORLD} ranks, {draws:.0e} draws: {median(ratios):.3f} x {what} ({spread})")


def first(made: WeightedDistributedSampler) -> int:
    return next(iter(made))


def latency(draws: int) -> None:
    made = [sampler(draws, seed) for seed in range(20)]
    times = alternating({"first": lambda: first(made.pop())}, 20)["first"]
    print(f"first index, {draws:.0e} draws: {median(times) * 1e3:.1f} ms (worst of 20: {max(times) * 1e3:.1f})")
    one = sampler(draws)
    places: Iterator[int] = iter(np.random.default_rng(0).integers(0, draws - 1, 200).tolist())
    times = alternating({"seek": lambda: one.take(place := next(places), place + 1)}, 200)["seek"]
    print(f"any position, {draws:.0e} draws: {median(times) * 1e3:.2f} ms (worst of 200: {max(times) * 1e3:.2f})")


def memory(work: Callable[[], object], what: str) -> None:
    """Growth of the traced peak: Python's and numpy's allocations."""
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"memory, {what}: {peak / 2**20:.1f} MiB at the peak")


def part(draws: int, taken: int) -> None:
    for _ in islice(sampler(draws), taken):
        pass


def weight_for_each_sample(count: int, runs: int) -> None:
    """A weight for each sample, the inverse of its class's frequency: 1,000 classes, the most frequent 1,000 times."""
    draw, draws = np.random.default_rng(0), count // 10
    frequency = 1 / np.arange(1, 1001)
    labels = draw.choice(1000, count, p=frequency / frequency.sum())
    weights = 1 / np.bincount(labels, minlength=1000)[labels]

    def made() -> WeightedDistributedSampler:
        return WeightedDistributedSampler(range(count), weights, WORLD, 3, epoch_length=draws)

    epoch, drawn = made(), weights / weights.sum()
    works: dict[str, Callable[[], Any]] = {
        "permutation": lambda: draw.permutation(count),
        "numpy's choice": lambda: draw.choice(count, draws, p=drawn),
        "construction": made,
        "epoch of a rank": lambda: list(epoch),
    }
    times = alternating(works, runs)
    for name in list(works)[1:]:
        ratios = [own / other for own, other in zip(times[name], times["permutation"], strict=True)]
        print(f"{count:.0e} weights, {draws:.0e} draws: {name} {median(ratios):.2f} x a permutation of {count:.0e}")
    memory(made, f"construction with {count:.0e} weights")
    kept = np.bincount(labels[epoch.take(0, draws)], minlength=1000)
    print(f"draws of a class in an epoch: {kept.min()} to {kept.max()}, {draws / 1000:g} asked")
    try:
        torch.utils.data.WeightedRandomSampler(weights.tolist(), draws).__iter__().__next__()
    except RuntimeError as error:
        print(f"torch's WeightedRandomSampler: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=lambda text: int(float(text)), default=10**7)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--weights", type=lambda text: int(float(text)))
    options = parser.parse_args()
    if options.weights is not None:
        weight_for_each_sample(options.weights, options.runs)
        return
    speed(options.draws, options.runs)
    for draws in (options.draws, 100 * options.draws):
        latency(draws)
    memory(lambda: ours(options.draws), f"{options.draws:.0e} draws, one of {WORLD} ranks, ours")
    more = 100 * options.draws
    memory(lambda: part(more, options.draws // WORLD), f"{more:.0e} draws, the first {options.draws // WORLD}, ours")
    memory(lambda: lean(options.draws), f"{options.draws:.0e} draws, the original's method in arrays")


if __name__ == "__main__":
    main()
