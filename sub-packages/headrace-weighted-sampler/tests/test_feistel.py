"""Laws of the rectangle's permutation, and how random it is."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.weighted_sampler.feistel import MOST_ROWS, Rectangle, permute, permute_by, tables
from headrace.weighted_sampler.keyed import derive

AROUND_POWERS = [2**power + step for power in range(1, 21) for step in (-1, 0, 1)]
Shuffle = Callable[[int, int], NDArray[np.int64]]


def whole(size: int, key: int) -> NDArray[np.int64]:
    return permute(Rectangle.of(size), np.arange(size), derive(key))


def is_bijection(moved: NDArray[np.int64]) -> bool:
    return bool((np.bincount(moved, minlength=len(moved)) == 1).all())


@pytest.mark.parametrize("size", [*range(1, 70), *AROUND_POWERS, 65_537, 10_007, 999_983])
def test_it_is_a_bijection(size: int) -> None:
    assert is_bijection(whole(size, key=size))


@pytest.mark.nightly
def test_it_is_a_bijection_for_every_length_up_to_70_000() -> None:
    for size in range(1, 70_001):
        assert is_bijection(whole(size, key=size)), size


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_the_rectangle_holds_every_place_and_few_others(size: int, key: int, data: st.DataObject) -> None:
    shape = Rectangle.of(size)
    assert size <= shape.rows * shape.columns < size + shape.rows
    assert max(shape.rows, shape.columns) <= 2**31
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    moved = permute(shape, places, derive(key))
    assert moved.min() >= 0
    assert moved.max() < size
    assert len(set(moved.tolist())) == len(places)


@given(st.integers(1, 100_000), st.integers(0, 2**64 - 1), st.data())
def test_tables_change_nothing(size: int, key: int, data: st.DataObject) -> None:
    shape = Rectangle.of(size)
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)))
    made = tables(shape, derive(key))
    assert np.array_equal(permute_by(shape, made, places), permute(shape, places, derive(key)))


def test_tables_of_the_largest_tabulated_list_are_small() -> None:
    assert sum(table.nbytes for table in tables(Rectangle.of(MOST_ROWS**2), derive(0))) <= 2**20


@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=5))
def test_each_place_may_have_a_key_of_its_own(size: int, keys: list[int]) -> None:
    shape = Rectangle.of(size)
    places = np.full(len(keys), size // 2)
    alone = [int(permute(shape, places[:1], np.array([key], np.uint64))[0]) for key in keys]
    assert permute(shape, places, np.array(keys, np.uint64)).tolist() == alone


# -- How random: the same four statistics of this permutation and of numpy's own ---------------------------------


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    """Standard deviations from what chance gives (Wilson and Hilferty's normal approximation)."""
    freedom = counts.size - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    deviation: float = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return deviation


def by_position(moved: NDArray[np.int64]) -> float:
    """Where the first hundredth goes."""
    size = len(moved)
    return chi_square(np.bincount(moved[: size // 100] * 50 // size, minlength=50), size / 100 / 50)


def by_difference(moved: NDArray[np.int64]) -> float:
    """How far apart neighbours land, going round."""
    size = len(moved)
    return chi_square(np.bincount(np.diff(moved) % size * 50 // size, minlength=50), (size - 1) / 50)


def by_parity(moved: NDArray[np.int64]) -> float:
    """Parities of a place, its neighbour and their new places."""
    parity = moved % 2
    kinds = (np.arange(len(moved) - 1) % 2) * 4 + parity[:-1] * 2 + parity[1:]
    return chi_square(np.bincount(kinds, minlength=8), (len(moved) - 1) / 8)


def by_block(moved: NDArray[np.int64]) -> float:
    """From which block of a root's length to which."""
    size, blocks = len(moved), 30
    cells = (np.arange(size) * blocks // size) * blocks + moved * blocks // size
    return chi_square(np.bincount(cells, minlength=blocks**2), size / blocks**2)


STATISTICS = [by_position, by_difference, by_parity, by_block]


def numpys(size: int, key: int) -> NDArray[np.int64]:
    return np.random.default_rng(key).permutation(size)


def spread(shuffle: Shuffle, size: int, keys: int) -> NDArray[np.float64]:
    """The four statistics over some keys, shape [keys, 4]."""
    return np.array(
        [[statistic(moved) for statistic in STATISTICS] for moved in (shuffle(size, k) for k in range(keys))]
    )


@pytest.mark.parametrize(
    ("size", "keys"), [(100_000, 20), pytest.param(1_000_000, 20, marks=pytest.mark.nightly), (65_537, 20)]
)
def test_it_is_as_random_as_numpys_permutation(size: int, keys: int) -> None:
    # A permutation is more even than independent draws, so that both are compared with one another as well.
    ours, theirs = spread(whole, size, keys), spread(numpys, size, keys)
    assert (np.abs(ours).max(axis=0) <= np.maximum(4.5, 1.5 * np.abs(theirs).max(axis=0))).all()
    assert np.abs(ours.mean(axis=0) - theirs.mean(axis=0)).max() < 4.5 * (2 / keys) ** 0.5


def test_the_statistics_find_a_permutation_that_is_not_random() -> None:
    def affine(size: int, key: int) -> NDArray[np.int64]:
        return np.arange(size) * 48_271 % size

    assert np.abs(spread(affine, 100_003, 1)).max() > 20
