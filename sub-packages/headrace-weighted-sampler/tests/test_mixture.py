"""Laws of the endless sequence of sources."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.weighted_sampler.interleaving import build_tree, draws_before
from headrace.weighted_sampler.mixture import Mixture, Stage
from headrace.weighted_sampler.windows import WIDTH

SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sources = draw(st.integers(1, 6))
    weights = st.tuples(*[st.integers(0, 50)] * sources).filter(any)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 9000), max_size=3)))]
    return Mixture([Stage(start, draw(weights)) for start in starts], draw(st.integers(1, 4000)), draw(SEEDS))


def dealt(mixture: Mixture, epoch: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(source, draw) at each position, shape [m, 2]; -1 where none was given."""
    found = np.full((len(offsets), 2), -1)
    for source, where, draws in mixture.turns(epoch, offsets):
        assert (found[where] == -1).all()
        found[where, 0], found[where, 1] = source, draws
    return found


@given(mixtures())
def test_draws_run_on_from_epoch_to_epoch_and_stage_to_stage(mixture: Mixture) -> None:
    length = mixture.epoch_length
    epochs = min(5, 1 + 12_000 // length)
    found = np.concatenate([dealt(mixture, epoch, np.arange(length)) for epoch in range(epochs)])
    for source in range(mixture.sources):
        draws = np.sort(found[found[:, 0] == source, 1])
        assert np.array_equal(draws, np.arange(len(draws)))
        assert len(draws) == mixture.draws_before(epochs * length)[source]


@given(mixtures(), st.integers(0, 10**9), st.data())
def test_any_positions_are_worked_out_by_themselves(mixture: Mixture, epoch: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, mixture.epoch_length - 1), min_size=1, max_size=30)
    offsets = np.array(sorted(data.draw(some)))
    together = dealt(mixture, epoch, offsets)
    alone = [dealt(mixture, epoch, offsets[place : place + 1])[0] for place in range(len(offsets))]
    assert np.array_equal(together, np.stack(alone))


@given(mixtures(), st.integers(0, 3))
def test_the_weights_of_the_stage_hold_at_every_windows_end(mixture: Mixture, epoch: int) -> None:
    length, begin = mixture.epoch_length, epoch * mixture.epoch_length
    found = dealt(mixture, epoch, np.arange(length))
    starts = [stage.start for stage in mixture.stages]
    cuts = sorted({begin, begin + length, *(start for start in starts if begin < start < begin + length)})
    for low, high in pairwise(cuts):
        stage = max(number for number, start in enumerate(starts) if start <= low)
        tree = build_tree(mixture.stages[stage].weights)
        for end in {*range(low + WIDTH, high, WIDTH), high}:
            counts = np.bincount(found[low - begin : end - begin, 0], minlength=mixture.sources)
            bounds = np.array([low - starts[stage], end - starts[stage]])
            before, after = draws_before(tree, bounds, mixture.sources)
            assert counts.tolist() == (after - before).tolist()


def test_eight_equal_sources_on_eight_ranks_are_shared_evenly() -> None:
    mixture = Mixture([Stage(0, (1,) * 8)], epoch_length=2**20, seed=3)
    found = dealt(mixture, 0, np.arange(2**20))[:, 0]
    for rank in range(8):
        shares = np.bincount(found[rank::8], minlength=8) / 2**17
        assert np.abs(shares * 8 - 1).max() <= 0.02


@pytest.mark.parametrize("world", [1, 3, 64, 200, 5000])
def test_strides_of_all_lengths_see_the_same_sequence(world: int) -> None:
    mixture = Mixture([Stage(0, (5, 1, 7, 2))], epoch_length=300_000, seed=9)
    whole = dealt(mixture, 1, np.arange(300_000))
    assert np.array_equal(dealt(mixture, 1, np.arange(7, 300_000, world)), whole[7::world])


@pytest.mark.parametrize("sources", [1000, 5000])
def test_thousands_of_sources(sources: int) -> None:
    weights = tuple(range(1, sources + 1))
    mixture = Mixture([Stage(0, weights)], epoch_length=sum(weights), seed=9)
    found = dealt(mixture, 0, np.arange(50_000))
    assert np.bincount(found[:, 0], minlength=sources).sum() == 50_000
    positions = np.array([100, 40_000])
    assert np.array_equal(dealt(mixture, 0, positions), found[positions])
