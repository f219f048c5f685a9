"""Laws of the endless run of passes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.passes import BLOCK, Passes
from headrace.weighted_sampler.shuffles import MOST

WORDS = st.integers(0, 2**64 - 1)
# On both sides of the line between true shuffles and rectangles, and of tabulated rectangles.
SIZES = st.sampled_from([1, 2, 3, 50, MOST - 1, MOST, MOST + 1, 200_003, 2**26, 2**26 + 1, 2**40])


def test_the_sequence_is_pinned() -> None:
    # Changing these numbers changes every saved run: bump the version of the state as well.
    assert Passes(3, 11)(np.arange(4, 12)).tolist() == [0, 2, 1, 2, 0, 2, 0, 1]
    assert Passes(10**6, 11)(np.arange(999_998, 1_000_002)).tolist() == [293238, 259551, 358947, 330578]


@given(SIZES, WORDS, st.integers(0, 2**61), st.lists(st.integers(0, 2**20), min_size=1, max_size=60))
def test_what_was_asked_before_changes_nothing(size: int, key: int, far: int, steps: list[int]) -> None:
    draws = far + np.cumsum(steps)
    used = Passes(size, key)
    together = used(draws)
    alone = [int(Passes(size, key)(draws[place : place + 1])[0]) for place in range(len(draws))]
    assert together.tolist() == alone
    assert used(draws[::-1]).tolist() == alone[::-1]


@pytest.mark.parametrize("size", [1, 2, 60, 3000, MOST, MOST + 1, 300_000])
@pytest.mark.parametrize("number", [0, 7])
def test_each_pass_holds_every_place_once(size: int, number: int) -> None:
    drawn = Passes(size, 5)(np.arange(number * size, (number + 1) * size))
    assert np.array_equal(np.sort(drawn), np.arange(size))


@pytest.mark.parametrize("size", [1000, 100_000])
def test_passes_differ(size: int) -> None:
    passes = Passes(size, 0)
    assert np.count_nonzero(passes(np.arange(size)) == passes(np.arange(size, 2 * size))) <= 12  # one by chance


@pytest.mark.parametrize("size", [3, 700, 40_000])
def test_many_short_passes_go_in_blocks(size: int) -> None:
    drawn = Passes(size, 9)(np.arange(1, BLOCK + 3 * size))
    again = Passes(size, 9)(np.arange(BLOCK, BLOCK + 3 * size))
    assert np.array_equal(drawn[BLOCK - 1 :], again)


def test_a_long_source_over_many_passes() -> None:
    size = 70_000
    drawn = Passes(size, 2)(np.arange(5 * size))
    assert all(np.array_equal(np.sort(part), np.arange(size)) for part in drawn.reshape(5, size))
