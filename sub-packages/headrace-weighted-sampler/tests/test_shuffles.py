"""Laws of the true shuffles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.keyed import derive
from headrace.weighted_sampler.shuffles import MOST, shuffles

WORDS = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), st.lists(WORDS, min_size=1, max_size=3))
def test_every_row_is_a_permutation(size: int, keys: list[int]) -> None:
    for row in shuffles(size, np.array(keys, np.uint64)):
        assert np.array_equal(np.sort(row), np.arange(size))


def test_the_longest_row_is_a_permutation() -> None:
    assert np.array_equal(np.sort(shuffles(MOST, derive(1))[0]), np.arange(MOST))


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_each_place_is_equally_likely_everywhere(size: int) -> None:
    rounds = 4000
    rows = shuffles(size, derive(17, np.arange(rounds, dtype=np.uint64)))
    counts = np.stack([np.bincount(rows[:, column], minlength=size) for column in range(size)])
    freedom = (size - 1) ** 2
    chi_square = float(((counts - rounds / size) ** 2).sum() / (rounds / size))
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_all_orders_of_four_are_equally_likely() -> None:
    rows = shuffles(4, derive(29, np.arange(24_000, dtype=np.uint64)))
    counts = np.unique(rows @ np.array([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 1000) ** 2).sum() / 1000 < 65  # chi-square with 23 degrees of freedom: 1 in 100,000
