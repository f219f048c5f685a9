"""Laws of the global order of samples, through the sampler's ``take``."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples
from numpy.typing import NDArray

from headrace.weighted_sampler import WeightedDistributedSampler

SEEDS = st.integers(0, 2**64 - 1)
Weights = dict[tuple[int, int], Fraction]


def order(weights: Weights, seed: int, epoch: int) -> NDArray[np.int64]:
    sampler = WeightedDistributedSampler(range(300), weights, seed=seed)
    sampler.set_epoch(epoch)
    return sampler.take(0, sampler.epoch_length)


@st.composite
def mixtures(draw: st.DrawFn) -> Weights:
    cuts = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=6)))
    ratios = st.fractions(Fraction(1, 100), 3, max_denominator=100)
    return {bounds: draw(ratios) for bounds in pairwise(cuts)}


@pytest.mark.slow
@given(mixtures(), SEEDS, st.integers(0, 2**40))
def test_each_range_gets_exactly_its_draws(weights: Weights, seed: int, epoch: int) -> None:
    drawn = order(weights, seed, epoch)
    for (begin, end), ratio in weights.items():
        assert np.count_nonzero((drawn >= begin) & (drawn < end)) == -(-(end - begin) * ratio // 1)


@pytest.mark.slow
@given(mixtures(), SEEDS)
def test_no_sample_is_a_whole_pass_ahead_of_another(weights: Weights, seed: int) -> None:
    drawn = Counter(np.concatenate([order(weights, seed, epoch) for epoch in range(4)]).tolist())
    for begin, end in weights:
        counts = [drawn[index] for index in range(begin, end)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.slow
@given(mixtures(), SEEDS, st.integers(1, 3000), st.integers(0, 3000))
def test_every_sample_comes_before_any_comes_again(weights: Weights, seed: int, length: int, change: int) -> None:
    later = dict(zip(weights, reversed(weights.values()), strict=True))
    sampler = WeightedDistributedSampler(
        range(300), weights, seed=seed, semantics="proportion", epoch_length=length, schedule=[(change + 1, later)]
    )
    parts = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        parts.append(sampler.take(0, length))
    drawn = np.concatenate(parts)
    for begin, end in weights:
        own = drawn[(drawn >= begin) & (drawn < end)]
        for low in range(0, len(own), end - begin):
            one_pass = own[low : low + end - begin]
            assert len(np.unique(one_pass)) == len(one_pass)


@pytest.mark.parametrize("world", [1, 7, 300])
def test_ranks_and_passes_follow_the_global_sequence(world: int) -> None:
    weights = {(0, 3000): 20, (3000, 10_000): 5, (10_000, 90_000): 1.5}
    ranks = [WeightedDistributedSampler(range(90_000), weights, world, rank, seed=1) for rank in (0, world - 1)]
    drawn = ranks[0].take(0, ranks[0].epoch_length)
    for rank in ranks:
        own = np.array(list(rank))
        steps = drawn[: len(drawn) // world * world].reshape(-1, world)
        assert (steps == own[: len(steps), None]).any(axis=1).all()
    for begin, end in weights:
        source = drawn[(drawn >= begin) & (drawn < end)]
        for low in range(0, len(source), end - begin):
            one_pass = source[low : low + end - begin]
            assert len(np.unique(one_pass)) == len(one_pass)


@pytest.mark.slow
@given(mixtures(), SEEDS, st.integers(0, 2**40))
def test_a_range_does_not_depend_on_the_others(weights: Weights, seed: int, epoch: int) -> None:
    drawn = order(weights, seed, epoch)
    for (begin, end), ratio in weights.items():
        alone = order({(begin, end): ratio}, seed, epoch)
        assert sorted(drawn[(drawn >= begin) & (drawn < end)]) == sorted(alone)


@examples(60)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**40)), min_size=2, max_size=2, unique=True))
def test_orders_of_different_seeds_and_epochs_agree_by_chance_only(pairs: list[tuple[int, int]]) -> None:
    agree_by_chance(*pairs)


@pytest.mark.parametrize("seed", range(20))
def test_seed_0_at_epoch_1_is_unlike_seed_1_at_epoch_0(seed: int) -> None:
    agree_by_chance((seed, 1), (seed + 1, 0))


def agree_by_chance(one: tuple[int, int], two: tuple[int, int]) -> None:
    orders = []
    for seed, epoch in (one, two):
        sampler = WeightedDistributedSampler(range(2000), {(0, 1000): 1, (1000, 2000): 1}, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(sampler.take(0, 2000))
    # Both counts are Poisson of mean 1 by chance: above 15 once in 10**13 cases.
    assert np.count_nonzero(orders[0] == orders[1]) <= 15
    followers, others = np.full(2000, -1), np.full(2000, -2)
    followers[orders[0][:-1]], others[orders[1][:-1]] = orders[0][1:], orders[1][1:]
    assert np.count_nonzero(followers == others) <= 15
    # The first halves of long passes share half of their samples by chance: 1000 +- 8 standard deviations.
    assert abs(len(np.intersect1d(orders[0][:1000], orders[1][:1000])) - 500) <= 8 * 11.2


@given(st.integers(1, 2000), st.integers(0, 50), st.integers(1, 16), st.data())
def test_stretches_join(length: int, epoch: int, cuts: int, data: st.DataObject) -> None:
    sampler = WeightedDistributedSampler(
        range(1000), {(0, 700): 2, (700, 1000): 1}, semantics="proportion", epoch_length=length, seed=1
    )
    sampler.set_epoch(epoch)
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, length), max_size=cuts))), length]
    parts = [sampler.take(low, high) for low, high in pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), sampler.take(0, length))


def test_the_order_is_pinned() -> None:
    # Changing these numbers changes every saved run: bump the version of the state as well.
    assert order({(0, 6): Fraction(1, 2), (6, 9): Fraction(2)}, seed=4, epoch=3).tolist() == [6, 3, 8, 7, 5, 7, 8, 2, 6]
    long = WeightedDistributedSampler(range(10**9), {(0, 10**8): 3, (10**8, 10**9): 0.5}, seed=2**63)
    long.set_epoch(7)
    assert long.take(123_456_789, 123_456_793).tolist() == [474221689, 671037688, 98603039, 326250950]


def test_billions_of_positions_are_sampled_at_once() -> None:
    size = 4 * 10**9
    sampler = WeightedDistributedSampler(range(size), {(0, 10**9): 0.5, (10**9, size): 1.25}, 1024, 1023, seed=5)
    assert sampler.epoch_length == 4_250_000_000
    sampler.set_skip_batches(10**5, 40)
    first = [index for index, _ in zip(sampler, range(100), strict=False)]
    begins = range(4096 * 10**6, 4096 * 10**6 + 1024 * 100, 1024)
    assert all(index in sampler.take(begin, begin + 1024) for index, begin in zip(first, begins, strict=True))
    assert len(set(first)) == 100
