"""What a plan is worth, at the sizes of the benchmarks but with fewer samples: everything that is no timing."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.size_aware_batching import BatchPlan, DistributedSizeAwareBatchSampler

N = 300_000
USUAL, HEAVY = (2048, 16384), (16384, 32768)  # longest sample, budget


def lengths(longest: int, count: int = N) -> NDArray[np.int32]:
    drawn = np.random.default_rng(0).lognormal(np.log(360), 0.8, count)
    return np.clip(drawn, 8, longest).astype(np.int32)


def plan(kind: tuple[int, int], count: int = N, **options: object) -> tuple[BatchPlan, NDArray[np.int32]]:
    longest, budget = kind
    sizes = lengths(longest, count)
    sampler = DistributedSizeAwareBatchSampler(sizes, budget, **options)  # type: ignore[arg-type]  # options vary
    return sampler.plan(), sizes


@pytest.mark.parametrize(("kind", "fill"), [(USUAL, 0.995), (HEAVY, 0.99)])
def test_fill_of_stratified_batches(kind: tuple[int, int], fill: float) -> None:
    report = plan(kind)[0].report()
    assert report.fill >= fill
    assert report.largest <= kind[1]


@pytest.mark.parametrize("kind", [USUAL, HEAVY])
def test_fill_of_packed_batches(kind: tuple[int, int]) -> None:
    report = plan(kind, count=1_000_000, strategy="packed")[0].report()
    assert report.fill >= 0.9999
    assert report.largest <= kind[1]


@pytest.mark.parametrize("kind", [USUAL, HEAVY])
def test_padded_batches_against_the_bound(kind: tuple[int, int]) -> None:
    # At 300,000 samples there are few windows, so that a bit more is lost than at the benchmark's 10,000,000.
    planned, sizes = plan(kind, strategy="bucketed", cost="padded", window=N)
    bound = np.ceil((1 / (kind[1] // sizes)).sum())
    assert len(planned) <= 1.002 * bound
    assert planned.report().largest <= kind[1]


@pytest.mark.parametrize(("kind", "most"), [(USUAL, 1.01), (HEAVY, 1.03)])
@pytest.mark.parametrize("ranks", [8, 64])
def test_steps_cost_the_same_on_all_ranks(kind: tuple[int, int], most: float, ranks: int) -> None:
    assert plan(kind, count=1_000_000)[0].report(ranks).imbalance <= most


def mates(batch: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return the share of pairs (of near neighbours in a list of batches) that share a batch of another list too."""
    order = np.argsort(batch, kind="stable")
    met = pairs = 0
    for distance in range(1, 8):
        together = batch[order[distance:]] == batch[order[:-distance]]
        first, second = order[distance:][together], order[:-distance][together]
        met += int((other[first] == other[second]).sum())
        pairs += len(first)
    return met / pairs


def batch_of_each(planned: BatchPlan) -> NDArray[np.int64]:
    batch = np.empty(len(planned.indices), np.int64)
    batch[planned.indices] = np.repeat(np.arange(len(planned)), np.diff(planned.offsets))
    return batch


@pytest.mark.parametrize("kind", [USUAL, HEAVY])
def test_batch_mates_meet_again_as_seldom_as_by_chance(kind: tuple[int, int]) -> None:
    sampler = DistributedSizeAwareBatchSampler(lengths(kind[0]), kind[1])
    first, second = batch_of_each(sampler.plan(0)), batch_of_each(sampler.plan(1))
    by_chance = np.mean([mates(first, second[np.random.default_rng(seed).permutation(N)]) for seed in range(5)])
    assert mates(first, second) <= 2 * by_chance


def test_planning_takes_little_memory() -> None:
    count = 4_000_000
    sizes = lengths(2048, count)
    sampler = DistributedSizeAwareBatchSampler(sizes, 16384)
    tracemalloc.start()
    try:
        planned = sampler.plan()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(planned.indices) == count
    # What a window takes does not grow with the samples, but counts here too.
    assert peak / count <= 12 + 40e6 / count


def test_the_first_batch_of_a_later_epoch_takes_the_memory_of_a_window() -> None:
    sampler = DistributedSizeAwareBatchSampler(lengths(2048, 2_000_000), 16384)
    next(iter(sampler))
    sampler.set_epoch(1)
    tracemalloc.start()
    try:
        assert len(sampler) > 0
        next(iter(sampler))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6
