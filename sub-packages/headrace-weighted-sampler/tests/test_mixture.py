"""Laws of the sequence of sources."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.weighted_sampler._mixture import Mixture, build_tree, draws_before, rounded_share
from headrace.weighted_sampler._permutation import WINDOW
from headrace.weighted_sampler.schedule import Stage


@given(st.integers(1, 2**62), st.data())
@example(2**62, None)
@example(2**62 - 1, None)
@example(2**31, None)
@example(2**31 + 1, None)
@example(1, None)
def test_it_is_what_python_computes(whole: int, data: st.DataObject | None) -> None:
    part = whole - whole // 3 if data is None else data.draw(st.integers(0, whole))
    counts = [0, whole // 2, whole] + ([] if data is None else data.draw(st.lists(st.integers(0, whole), max_size=9)))
    want = [(count * part + whole // 2) // whole for count in counts]
    assert rounded_share(np.array(counts), part, whole).tolist() == want


WEIGHTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any)


@given(WEIGHTS, st.lists(st.integers(0, 2**60), min_size=1, max_size=8))
def test_counts_add_up_and_stay_near_their_shares(weights: list[int], positions: list[int]) -> None:
    counts = draws_before(build_tree(weights), np.array(positions), len(weights))
    for position, row in zip(positions, counts.tolist(), strict=True):
        assert sum(row) == position
        for weight, count in zip(weights, row, strict=True):
            assert abs(count - Fraction(position * weight, sum(weights))) < 2


@given(WEIGHTS)
def test_every_step_is_one_sources_and_every_period_exact(weights: list[int]) -> None:
    total = sum(weights)
    start = max(0, total - 300)
    counts = draws_before(build_tree(weights), np.arange(start, total + 300), len(weights))
    steps = np.diff(counts, axis=0)
    assert steps.min() >= 0
    assert (steps.sum(axis=1) == 1).all()
    assert counts[total - start].tolist() == weights


@given(WEIGHTS, st.integers(0, 10**6), st.integers(1, 1000))
def test_it_goes_on_in_periods(weights: list[int], position: int, periods: int) -> None:
    tree = build_tree(weights)
    [here, later] = draws_before(tree, np.array([position, position + periods * tree.weight]), len(weights))
    assert (later - here).tolist() == [periods * weight for weight in weights]


def random_weights(generator: np.random.Generator) -> list[int]:
    """Between 2 and 60 sources of very different weights."""
    sources = int(generator.integers(2, 61))
    shape = generator.choice([0.3, 0.7, 1.5, 5.0])
    return [int(weight) + 1 for weight in np.minimum(generator.pareto(shape, sources) * 1000, 1e9)]


@pytest.mark.parametrize("vectors", [1000])
def test_counts_are_within_one_and_a_half_at_every_windows_end(vectors: int) -> None:
    generator = np.random.default_rng(7)
    worst = 0.0
    for _ in range(vectors):
        weights = random_weights(generator)
        ends = np.arange(1, 1001) * 1024
        counts = draws_before(build_tree(weights), ends, len(weights))
        # Positions up to a million and weights up to 1e9: float64 is exact to 1e-9 here.
        worst = max(worst, float(np.abs(counts - ends[:, None] * (np.array(weights) / sum(weights))).max()))
    assert worst <= 1.5


@given(WEIGHTS)
def test_weights_beyond_the_fast_range_are_exact(weights: list[int]) -> None:
    large = [weight * 2**40 for weight in weights]
    positions = np.arange(50) * 977
    assert np.array_equal(
        draws_before(build_tree(large), positions, len(large)), draws_before(build_tree(weights), positions, len(large))
    )


SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sources = draw(st.integers(1, 6))
    weights = st.tuples(*[st.integers(0, 50)] * sources).filter(any)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 9000), max_size=3)))]
    return Mixture([Stage(start, draw(weights)) for start in starts], draw(st.integers(1, 4000)), draw(SEEDS))


def assigned(mixture: Mixture, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(source, draw) at each position, shape [m, 2]; -1 where none was given."""
    found = np.full((len(offsets), 2), -1)
    for source, where, draws in mixture.assign(epoch, offsets):
        assert (found[where] == -1).all()
        found[where, 0], found[where, 1] = source, draws
    return found


@given(mixtures())
def test_draws_run_on_from_epoch_to_epoch_and_stage_to_stage(mixture: Mixture) -> None:
    length = mixture.epoch_length
    epochs = min(5, 1 + 12_000 // length)
    found = np.concatenate([assigned(mixture, epoch, np.arange(length)) for epoch in range(epochs)])
    for source in range(mixture.num_sources):
        draws = np.sort(found[found[:, 0] == source, 1])
        assert np.array_equal(draws, np.arange(len(draws)))
        assert len(draws) == mixture.draws_before(epochs)[source]


@given(mixtures(), st.integers(0, 10**9), st.data())
def test_any_positions_are_worked_out_by_themselves(mixture: Mixture, epoch: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, mixture.epoch_length - 1), min_size=1, max_size=30)
    offsets = np.array(sorted(data.draw(some)))
    together = assigned(mixture, epoch, offsets)
    alone = [assigned(mixture, epoch, offsets[place : place + 1])[0] for place in range(len(offsets))]
    assert np.array_equal(together, np.stack(alone))


@given(mixtures(), st.integers(0, 3))
def test_the_weights_of_the_stage_hold_at_every_windows_end(mixture: Mixture, epoch: int) -> None:
    length, begin = mixture.epoch_length, epoch * mixture.epoch_length
    found = assigned(mixture, epoch, np.arange(length))
    starts = [stage.start for stage in mixture.stages]
    cuts = sorted({begin, begin + length, *(start for start in starts if begin < start < begin + length)})
    for low, high in pairwise(cuts):
        stage = max(number for number, start in enumerate(starts) if start <= low)
        tree = build_tree(mixture.stages[stage].weights)
        for end in {*range(low + WINDOW, high, WINDOW), high}:
            counts = np.bincount(found[low - begin : end - begin, 0], minlength=mixture.num_sources)
            bounds = np.array([low - starts[stage], end - starts[stage]])
            before, after = draws_before(tree, bounds, mixture.num_sources)
            assert counts.tolist() == (after - before).tolist()


def test_eight_equal_sources_on_eight_ranks_are_shared_evenly() -> None:
    mixture = Mixture([Stage(0, (1,) * 8)], epoch_length=2**20, seed=3)
    found = assigned(mixture, 0, np.arange(2**20))[:, 0]
    for rank in range(8):
        shares = np.bincount(found[rank::8], minlength=8) / 2**17
        assert np.abs(shares * 8 - 1).max() <= 0.02


@pytest.mark.parametrize("world", [1, 3, 64, 200, 5000])
def test_strides_of_all_lengths_see_the_same_sequence(world: int) -> None:
    mixture = Mixture([Stage(0, (5, 1, 7, 2))], epoch_length=300_000, seed=9)
    whole = assigned(mixture, 1, np.arange(300_000))
    assert np.array_equal(assigned(mixture, 1, np.arange(7, 300_000, world)), whole[7::world])


@pytest.mark.parametrize("sources", [1000, 5000])
def test_thousands_of_sources(sources: int) -> None:
    weights = tuple(range(1, sources + 1))
    mixture = Mixture([Stage(0, weights)], epoch_length=sum(weights), seed=9)
    found = assigned(mixture, 0, np.arange(50_000))
    assert np.bincount(found[:, 0], minlength=sources).sum() == 50_000
    positions = np.array([100, 40_000])
    assert np.array_equal(assigned(mixture, 0, positions), found[positions])
