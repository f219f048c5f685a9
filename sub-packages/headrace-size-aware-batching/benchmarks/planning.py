"""What planning costs against ``numpy.random.permutation``, and what the batches are worth.

    python benchmarks/planning.py             # 10,000,000 samples, some minutes
    python benchmarks/planning.py --samples 1e6

Every time is a median of alternating runs in this process, printed as a ratio to the permutation's.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching._shared.random import fold_in

KINDS = {"usual": (2048, 16384), "heavy": (16384, 32768)}
WAYS = {"sequential": "sum", "stratified": "sum", "bucketed": "padded", "packed": "sum"}


def lengths(longest: int, count: int) -> NDArray[np.int32]:
    drawn = np.random.default_rng(0).lognormal(np.log(360), 0.8, count)
    return np.clip(drawn, 8, longest).astype(np.int32)


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def alternating(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Return the median time of each, all of them run in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            times[name].append(timed(work))
    return {name: median(found) for name, found in times.items()}


def sampler(way: str, sizes: NDArray[np.int32], budget: int) -> DistributedSizeAwareBatchSampler:
    return DistributedSizeAwareBatchSampler(sizes, budget, strategy=way, cost=WAYS[way])  # type: ignore[arg-type]  # of WAYS


def samplers(sizes: NDArray[np.int32], budget: int) -> dict[str, DistributedSizeAwareBatchSampler]:
    return {way: sampler(way, sizes, budget) for way in WAYS}


def first_batch(made: DistributedSizeAwareBatchSampler) -> list[int]:
    return next(iter(made))


def greedy(order: list[int], sizes: list[int], budget: int) -> int:
    """Form batches element by element, as a loop in Python does."""
    batches, batch, total = 0, list[int](), 0
    for index in order:
        if total + sizes[index] > budget:
            batches, batch, total = batches + 1, [], 0
        batch.append(index)
        total += sizes[index]
    return batches + bool(batch)


def first_epoch(way: str, sizes: NDArray[np.int32], budget: int) -> None:
    sampler(way, sizes, budget).plan()


def planning(kind: str, count: int, runs: int) -> None:
    longest, budget = KINDS[kind]
    sizes = lengths(longest, count)
    made = samplers(sizes, budget)
    works: dict[str, Callable[[], Any]] = {"permutation": lambda: np.random.permutation(count)}
    for way in WAYS:
        works[f"{way}, first epoch"] = partial(first_epoch, way, sizes, budget)
        works[f"{way}, later epoch"] = partial(made[way].plan, 1)
    for prepared in made.values():
        prepared.plan()
    found = alternating(works, runs)
    for name, seconds in found.items():
        print(f"{kind:6} plan {count:.0e}: {name:26} {seconds / found['permutation']:6.2f} x permutation")


def loop(count: int, runs: int) -> None:
    sizes = lengths(2048, count)
    made = sampler("sequential", sizes, 16384)
    order, listed = np.random.permutation(count).tolist(), sizes.tolist()
    found = alternating({"loop": lambda: greedy(order, listed, 16384), "plan": lambda: made.plan(1)}, runs)
    print(f"usual  plan {count:.0e}: a loop in Python takes {found['loop'] / found['plan']:.1f} x sequential")


def access(kind: str, count: int) -> None:
    longest, budget = KINDS[kind]
    for way, made in samplers(lengths(longest, count), budget).items():
        made.plan()
        first, some, resumed = [], [0.0], []
        for epoch in range(1, 8):
            made.set_epoch(epoch)
            first.append(timed(partial(first_batch, made)))
        if way != "sequential":  # whose batches are known by number only once they are planned
            numbers = np.random.default_rng(0).integers(0, len(made), 20).tolist()
            some = [timed(partial(made.batch, number)) for number in numbers]
        for position in np.random.default_rng(1).integers(0, count, 20).tolist():
            made.load_state_dict(made.state_dict(position=position))
            resumed.append(timed(partial(first_batch, made)))
        print(
            f"{kind:6} {count:.0e} {way:11} first batch {1e3 * median(first):5.1f} ms, resume anywhere "
            f"{1e3 * median(resumed):5.1f} ms, any batch {1e3 * median(some):5.1f} ms (worst {1e3 * max(some):5.1f})"
        )


def memory(count: int) -> None:
    for way in WAYS:
        sizes = lengths(2048, count)
        tracemalloc.start()
        first_epoch(way, sizes, 16384)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        print(f"usual  {count:.0e} {way:11} peak growth {peak / count:5.2f} bytes a sample")


def worth(kind: str, count: int) -> None:
    longest, budget = KINDS[kind]
    sizes = lengths(longest, count)
    bound = float(np.ceil((1 / (budget // sizes)).sum()))
    for way, made in samplers(sizes, budget).items():
        plan = made.plan(0)
        report = plan.report(other=made.plan(1))
        balance = ", ".join(f"{ranks}: {plan.report(ranks).imbalance:.4f}" for ranks in (8, 64, 6, 48))
        against = f"{len(plan) / bound:.4f} x the bound" if way == "bucketed" else f"fill {report.fill:.5f}"
        print(
            f"{kind:6} {count:.0e} {way:11} {against}, largest {report.largest:,.0f}, "
            f"batch-co-occurrence {report.co_occurrence:.2f} x chance, imbalance at ranks {balance}"
        )


def waves(count: int) -> None:
    """Print how alike successive steps are, and their imbalance, by the ranks that steps are balanced for."""
    sizes = lengths(2048, count)
    for way, cost in WAYS.items():
        for ranks in (64, 8, 1) if way != "sequential" else ():
            options: dict[str, Any] = {"strategy": way, "cost": cost, "balanced_ranks": ranks}
            plan = DistributedSizeAwareBatchSampler(sizes, 16384, **options).plan()
            reports = {world: plan.report(world) for world in (1, 8, 64)}
            figures = [f"{n}: {one.autocorrelation:5.2f}, {one.imbalance:.4f}" for n, one in reports.items()]
            print(
                f"usual  {count:.0e} {way:11} balanced ranks {ranks:2}, fill {reports[1].fill:.5f}, "
                f"autocorrelation and imbalance at ranks {'; '.join(figures)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=lambda word: int(float(word)), default=10_000_000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for kind in KINDS:
        worth(kind, options.samples)
    waves(min(options.samples, 300_000))
    for kind in KINDS:
        access(kind, options.samples)
    memory(options.samples)
    loop(min(options.samples, 1_000_000), options.runs)
    for kind in KINDS:
        planning(kind, options.samples, options.runs)
    print(f"key of this version: {int(fold_in(0)[0]):x}")


if __name__ == "__main__":
    main()
