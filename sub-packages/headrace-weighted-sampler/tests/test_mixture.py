"""Laws of the sequence of sources."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.weighted_sampler import WeightedDistributedSampler
from headrace.weighted_sampler._interleave import Interleave, scaled
from headrace.weighted_sampler._mixture import Mixture
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
    quotients, rests = scaled(np.array(counts), part, whole)
    assert quotients.tolist() == [count * part // whole for count in counts]
    assert rests.tolist() == [count * part % whole for count in counts]


WEIGHTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any)
KEYS = st.integers(0, 2**64 - 1)


@given(WEIGHTS, KEYS, st.lists(st.integers(0, 2**60), min_size=1, max_size=8))
def test_counts_add_up_and_stay_near_their_shares(weights: list[int], key: int, positions: list[int]) -> None:
    sequence = Interleave(weights, key)
    counts = sequence.counts(np.array(positions))
    for position, row in zip(positions, counts.tolist(), strict=True):
        assert sum(row) == position
        for weight, count in zip(weights, row, strict=True):
            assert abs(count - Fraction(position * weight, sum(weights))) <= sequence.off_by


@given(WEIGHTS, KEYS)
def test_every_step_is_one_sources_and_every_period_exact(weights: list[int], key: int) -> None:
    total = sum(weights)
    start = max(0, total - 300)
    counts = Interleave(weights, key).counts(np.arange(start, total + 300))
    steps = np.diff(counts, axis=0)
    assert steps.min() >= 0
    assert (steps.sum(axis=1) == 1).all()
    assert counts[total - start].tolist() == weights


@given(WEIGHTS, KEYS, st.integers(0, 2**40), st.integers(1, 2000))
def test_the_sources_of_positions_are_those_that_are_counted(
    weights: list[int], key: int, begin: int, length: int
) -> None:
    sequence, positions = Interleave(weights, key), np.arange(begin, begin + length)
    sources, draws = sequence.assign(positions)
    [before, after] = sequence.counts(np.array([begin, begin + length]))
    for source in range(len(weights)):
        assert np.array_equal(draws[sources == source], np.arange(before[source], after[source]))


@given(WEIGHTS, KEYS)
def test_weights_beyond_the_fast_range_are_exact(weights: list[int], key: int) -> None:
    large = Interleave([weight * 2**40 for weight in weights], key)
    assert large.counts(np.array([sum(weights) * 2**40])).tolist() == [[weight * 2**40 for weight in weights]]
    positions = np.arange(50) * 977
    counts = large.counts(positions) - positions[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts).max() <= large.off_by
    sources, _ = large.assign(np.arange(977))
    assert np.bincount(sources, minlength=len(weights)).tolist() == large.counts(np.array([977]))[0].tolist()


def random_weights(generator: np.random.Generator) -> list[int]:
    """Between 2 and 60 sources of very different weights, in one case in eight a thousand."""
    sources = 1000 if generator.integers(8) == 0 else int(generator.integers(2, 61))
    shape = generator.choice([0.3, 0.7, 1.5, 5.0])
    return [int(weight) + 1 for weight in np.minimum(generator.pareto(shape, sources) * 1000, 1e9)]


# Powers, and others for which the tree is worst.
HARD = [
    [1, 1],
    [1, 10**6],
    [2**power for power in range(20)],
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144],
    [226, 264, 76, 73, 512, 66, 1082, 697, 2],
    [309, 1122, 139, 895, 2, 158, 4, 140, 978, 1, 921],
    [1000] + [1] * 999,
]


@pytest.mark.parametrize("vectors", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_prefix_and_every_stretch_has_its_shares(vectors: int) -> None:
    generator = np.random.default_rng(7)
    for number in range(len(HARD) + vectors):
        weights = HARD[number] if number < len(HARD) else random_weights(generator)
        sources, _ = Interleave(weights, key=number if number % 2 else None).assign(
            np.arange(20_000) + int(generator.integers(10**9))
        )
        drawn = np.argsort(weights)[-8:].tolist() + np.argsort(weights)[:3].tolist()
        for source in drawn:
            share = weights[source] / sum(weights)
            off = np.concatenate([[0], np.cumsum(sources == source)]) - np.arange(20_001) * share
            # The first position is somewhere in the sequence, where the source is off as well.
            assert np.ptp(off) <= 3
            assert np.abs(off[1000:] - off[:-1000]).max() <= 3


@pytest.mark.slow
def test_a_source_is_off_by_no_more_than_one_and_a_half_draws() -> None:
    generator = np.random.default_rng(3)
    for weights in [*HARD, *(random_weights(generator) for _ in range(300))]:
        sequence = Interleave(weights)
        ends = generator.integers(0, 10**6, 300)
        # Positions up to a million and weights up to 1e9: float64 is exact to 1e-9 here.
        off = np.abs(sequence.counts(ends) - ends[:, None] * (np.array(weights) / sum(weights))).max()
        assert off <= 1.5
        assert sequence.off_by <= 1.7


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
def test_the_weights_of_the_stage_hold_at_every_position(mixture: Mixture, epoch: int) -> None:
    length, begin = mixture.epoch_length, epoch * mixture.epoch_length
    found = assigned(mixture, epoch, np.arange(length))
    starts = [stage.start for stage in mixture.stages]
    cuts = sorted({begin, begin + length, *(start for start in starts if begin < start < begin + length)})
    for low, high in pairwise(cuts):
        weights = mixture.stages[max(number for number, start in enumerate(starts) if start <= low)].weights
        for source, weight in enumerate(weights):
            drawn = np.cumsum(found[low - begin : high - begin, 0] == source)
            assert np.ptp(drawn - np.arange(1, high - low + 1) * (weight / sum(weights))) <= 3


# Whatever the weights, also where a regular order would give a rank always the same source.
@pytest.mark.parametrize(
    ("weights", "world"), [([1] * 8, 8), ([1, 1], 2), ([5, 3], 8), ([3, 1], 4), ([13, 1, 1, 1], 16), ([1] * 30, 5)]
)
def test_all_ranks_see_the_sources_evenly(weights: list[int], world: int) -> None:
    length = 4096 * world
    ranges = {(10 * place, 10 * place + 10): weight for place, weight in enumerate(weights)}
    for rank in range(world):
        sampler = WeightedDistributedSampler(
            range(10 * len(weights)), ranges, world, rank, semantics="proportion", epoch_length=length, seed=3
        )
        sources = np.array(list(sampler)) // 10
        for source, weight in enumerate(weights):
            off = np.concatenate([[0], np.cumsum(sources == source)]) - np.arange(4097) * weight / sum(weights)
            assert np.abs(off[256:] - off[:-256]).max() <= 9  # independent draws: 15 to 30
            assert abs(off[-1]) <= 9


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
