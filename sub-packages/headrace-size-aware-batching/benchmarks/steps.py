"""What the plan of one step is worth, and what it costs, against the balancers that trainers carry.

    python benchmarks/steps.py               # 512 samples on 8 ranks and 4,096 on 64; some minutes
    python benchmarks/steps.py --draws 3 --lengths "short, full"

A row for each distribution of lengths and each way, means over the draws:

- ``over``: micro-batches over the cap;
- ``more``: micro-batches of a rank beyond the lower bound;
- ``lockstep``: sum over the micro-steps of the largest rank's work, over the mean rank's, and over its lower bound;
- ``totals``: largest rank's work of the whole step, likewise;
- ``/KK``: time over that of Karmarkar-Karp of all samples into all micro-batches, in the same run;
- ``/ranks``: over that of Karmarkar-Karp of all samples into one part for each rank;
- ``/verl``: over that of "verl". Medians.

The others, written anew from what they do:

- verl: Karmarkar-Karp by work over the ranks, as many samples on each, then over the micro-batches of each rank, of
  which there are as many as the tokens of the fullest rank need at least.
- slime: the same, but first fit tells how many micro-batches a rank needs.
- first fit: first-fit-descending within the cap over all ranks, the micro-batches then sorted by work.
"""

import argparse
import heapq
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching import StepPlan, plan_step

Ints = NDArray[np.int64]
Batches = list[list[list[int]]]  # of each rank


class Step(NamedTuple):
    """The samples of a step."""

    sizes: Ints
    cap: int
    work: Ints


def lognormal(generator: np.random.Generator, count: int, middle: int, spread: float, longest: int) -> Ints:
    return np.clip(generator.lognormal(np.log(middle), spread, count), 16, longest).astype(np.int64)


def steps(count: int, seed: int) -> dict[str, Step]:
    """Return a step of each distribution; the work of a sample of ``turning`` tokens is half attention."""

    def step(sizes: Ints, cap: int, turning: int) -> Step:
        return Step(sizes, cap, sizes * turning + sizes**2)

    generator = np.random.default_rng(seed)
    usual = lognormal(generator, count, 3000, 0.8, 32768)
    long = generator.random(count) < 0.3
    rollouts = np.where(long, generator.integers(20_000, 32_000, count), lognormal(generator, count, 2000, 1, 20_000))
    return {
        "lognormal": step(usual, 32768, 8192),
        "rollouts": step(rollouts, 32768, 8192),
        "short": step(short := lognormal(generator, count, 360, 0.8, 2048), 16384, 2048),
        "short, full": step(short, int(short.sum() * 64.128) // (14 * count), 24576),  # 14 micro-batches a rank
        "cap = longest": step(usual, int(usual.max()), 8192),
        "quadratic": step(usual, 32768, 1000),
    }


class Subset:
    """Some samples and their sum."""

    def __init__(self) -> None:
        self.total = 0
        self.items: list[tuple[int, int]] = []

    def merge(self, other: "Subset") -> None:
        self.total += other.total
        self.items += other.items

    def __lt__(self, other: "Subset") -> bool:
        if self.total != other.total:
            return self.total < other.total
        return (len(self.items), self.items) < (len(other.items), other.items)


class Partition:
    """One subset for each part, the largest first."""

    def __init__(self, items: list[tuple[int, int]], parts: int) -> None:
        self.subsets = [Subset() for _ in range(parts)]
        for subset, item in zip(self.subsets, items, strict=False):
            subset.items.append(item)
            subset.total += item[1]
        self.subsets.sort(reverse=True)

    @property
    def spread(self) -> int:
        return self.subsets[0].total - self.subsets[-1].total

    def merge(self, other: "Partition") -> None:
        for subset, opposite in zip(self.subsets, reversed(other.subsets), strict=True):
            subset.merge(opposite)
        self.subsets.sort(reverse=True)

    def __lt__(self, other: "Partition") -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread  # a heap gives the smallest
        return other.subsets[0] < self.subsets[0]


def karmarkar_karp(weights: list[int], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Part weights by the largest differencing method; ``equal``: as many in each part."""
    ascending = sorted((weight, index) for index, weight in enumerate(weights))
    items = [(index, weight) for weight, index in ascending]
    at_once = parts if equal else 1
    heap = [Partition(items[start : start + at_once], parts) for start in range(0, len(items), at_once)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first = heapq.heappop(heap)
        first.merge(heapq.heappop(heap))
        heapq.heappush(heap, first)
    return [[index for index, _ in subset.items] for subset in heap[0].subsets]


def first_fit(sizes: list[int], cap: int) -> list[list[int]]:
    rooms: list[int] = []
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        place = next((place for place, room in enumerate(rooms) if room >= size), None)
        if place is None:
            rooms.append(cap - size)
            bins.append([index])
        else:
            rooms[place] -= size
            bins[place].append(index)
    return bins


def rank_by_rank(step: Step, ranks: int, needed: Callable[[list[int]], int]) -> Batches:
    work, sizes = step.work.tolist(), step.sizes.tolist()
    parts = karmarkar_karp(work, ranks, equal=True)
    count = max(needed([sizes[index] for index in part]) for part in parts)
    return [
        [[part[place] for place in batch] for batch in karmarkar_karp([work[index] for index in part], count)]
        for part in parts
    ]


def verl(step: Step, ranks: int) -> Batches:
    return rank_by_rank(step, ranks, lambda sizes: -(-sum(sizes) // step.cap))


def slime(step: Step, ranks: int) -> Batches:
    return rank_by_rank(step, ranks, lambda sizes: len(first_fit(sizes, step.cap)))


def descending(step: Step, ranks: int) -> Batches:
    order = np.argsort(-step.sizes, kind="stable")
    bins = [order[batch].tolist() for batch in first_fit(step.sizes[order].tolist(), step.cap)]
    while len(bins) % ranks:
        longest = max(bins, key=len)
        bins.append([longest.pop()])
    bins.sort(key=lambda batch: -int(step.work[batch].sum()))
    return [bins[rank::ranks] for rank in range(ranks)]


def headrace(step: Step, ranks: int, meet: Any) -> StepPlan:
    return plan_step(step.sizes, step.cap, num_replicas=ranks, work=step.work, meet=meet)


class Figures(NamedTuple):
    """What a plan of it is worth."""

    over: float
    more: float
    lockstep: float
    lockstep_bound: float
    totals: float
    totals_bound: float
    seconds: float


def timed(run: Callable[[], Any], runs: int) -> tuple[Any, float]:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        found = run()
        times.append(time.perf_counter() - begin)
    return found, median(times)


def figures(step: Step, batches: Batches, bounds: dict[str, StepPlan], seconds: float) -> Figures:
    ranks = len(batches)
    work = np.array([[int(step.work[batch].sum()) for batch in rank] for rank in batches])
    load = np.array([[int(step.sizes[batch].sum()) for batch in rank] for rank in batches])
    unit = work.sum() / ranks
    work = np.sort(work, axis=1)  # each rank's heaviest with those of the others, whatever the order was
    lockstep, totals = work.max(axis=0).sum() / unit, work.sum(axis=1).max() / unit
    return Figures(
        float((load > step.cap).sum()),
        work.shape[1] - bounds["step"].fewest,
        float(lockstep),
        float(lockstep / bounds["micro_batch"].bound),
        float(totals),
        float(totals / bounds["step"].bound),
        seconds,
    )


def compare(count: int, ranks: int, draws: int, runs: int, lengths: str) -> None:
    print(f"\n{count} samples, {ranks} ranks")
    names = ("lockstep", "/bound", "totals", "/bound", "/KK", "/ranks", "/verl")
    print(f"{'':37} {'over':>6} {'more':>5}", " ".join(f"{name:>{max(7, len(name))}}" for name in names))
    others = {"verl": verl, "slime": slime, "first fit": descending}
    for name in [name for name in steps(count, 0) if lengths in name]:
        rows: dict[str, list[Figures]] = {}
        whole, part = [], []  # seconds of Karmarkar-Karp
        for seed in range(draws):
            step = steps(count, seed)[name]
            plans = {meet: timed(partial(headrace, step, ranks, meet), runs) for meet in ("micro_batch", "step")}
            bounds = {meet: plan for meet, (plan, _) in plans.items()}
            for meet, (plan, seconds) in plans.items():
                batches = [[batch.tolist() for batch in rank] for rank in plan.micro_batches]
                rows.setdefault(f'meet="{meet}"', []).append(figures(step, batches, bounds, seconds))
            work = step.work.tolist()
            if not seed or count < 1000:
                n_batches = ranks * plans["step"][0].num_micro_batches
                whole.append(timed(partial(karmarkar_karp, work, n_batches), 1)[1])
            part.append(timed(partial(karmarkar_karp, work, ranks), 1)[1])
            for other, run in others.items():
                found, seconds = timed(partial(run, step, ranks), 1 if count > 1000 else runs)
                rows.setdefault(other, []).append(figures(step, found, bounds, seconds))
        units = [median(whole), median(part), median(row.seconds for row in rows["verl"])]
        for way, found in rows.items():
            over, more, *values = (mean(column) for column in list(zip(*found, strict=True))[:-1])
            seconds = median(row.seconds for row in found)
            shares = " ".join(f"{seconds / unit:7.3f}" for unit in units)
            text = " ".join(f"{value:{width}.4f}" for value, width in zip(values, (8, 7, 7, 7), strict=True))
            print(f"{name:14} {way:22} {over:6.1f} {more:5.1f} {text} {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=6, help="steps of each distribution")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each, of which the median counts")
    parser.add_argument("--lengths", default="", help="only distributions whose name has this in it")
    options = parser.parse_args()
    for count, ranks in ((512, 8), (4096, 64)):
        compare(count, ranks, options.draws, options.runs, options.lengths)


if __name__ == "__main__":
    main()
