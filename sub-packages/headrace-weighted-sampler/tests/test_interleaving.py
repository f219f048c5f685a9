"""Laws of the interleave: what each source has had at any position."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.interleaving import build_tree, draws_before

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
