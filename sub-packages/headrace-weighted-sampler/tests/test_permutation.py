"""Laws of the random words, the permutations and the epochs over one source."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.weighted_sampler._permutation import (
    MAX_SHUFFLED,
    MAX_SORTED,
    MAX_TABLE_ROWS,
    ROUNDS,
    Rectangle,
    SourceEpochs,
    below,
    permute,
    permute_by_tables,
    round_tables,
    sort_shuffles,
)
from headrace.weighted_sampler._shared.random import fold_in, splitmix64
from headrace.weighted_sampler._states import STATE_VERSION

WORDS = st.integers(0, 2**64 - 1)


def test_splitmix64_gives_the_published_sequence() -> None:
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden * step % 2**64 for step in range(3)], np.uint64)
    assert [hex(word) for word in splitmix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@given(st.lists(WORDS, min_size=2, max_size=4, unique=True))
def test_keys_depend_on_every_word_and_its_place(words: list[int]) -> None:
    key = int(fold_in(*words)[0])
    assert key != int(fold_in(*reversed(words))[0])
    assert key != int(fold_in(*words, 0)[0])
    assert key != int(fold_in(words[0] ^ 1, *words[1:])[0])


@given(st.lists(WORDS, min_size=1, max_size=5), WORDS)
def test_an_array_of_words_gives_the_keys_of_its_elements(words: list[int], seed: int) -> None:
    together = fold_in(seed, np.array(words, np.uint64), 7).tolist()
    assert together == [int(fold_in(seed, word, 7)[0]) for word in words]


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**31 - 1, 2**31])
def test_scaled_words_stay_below_the_bound(bound: int) -> None:
    scaled = below(np.array([0, 2**63, 2**64 - 1], np.uint64), bound)
    assert scaled.tolist() == [0, bound // 2, bound - 1]


@given(st.integers(1, 3000), st.lists(WORDS, min_size=1, max_size=3))
def test_every_row_is_a_permutation(size: int, keys: list[int]) -> None:
    for row in sort_shuffles(size, np.array(keys, np.uint64)):
        assert np.array_equal(np.sort(row), np.arange(size))


def test_the_longest_row_is_a_permutation() -> None:
    assert np.array_equal(np.sort(sort_shuffles(MAX_SORTED, fold_in(1))[0]), np.arange(MAX_SORTED))


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_each_place_is_equally_likely_everywhere(size: int) -> None:
    rounds = 4000
    rows = sort_shuffles(size, fold_in(17, np.arange(rounds, dtype=np.uint64)))
    counts = np.stack([np.bincount(rows[:, column], minlength=size) for column in range(size)])
    freedom = (size - 1) ** 2
    chi_square = float(((counts - rounds / size) ** 2).sum() / (rounds / size))
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_all_orders_of_four_are_equally_likely() -> None:
    rows = sort_shuffles(4, fold_in(29, np.arange(24_000, dtype=np.uint64)))
    counts = np.unique(rows @ np.array([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 1000) ** 2).sum() / 1000 < 65  # chi-square with 23 degrees of freedom: 1 in 100,000


AROUND_POWERS = [2**power + step for power in range(1, 21) for step in (-1, 0, 1)]
Shuffle = Callable[[int, int], NDArray[np.int64]]


def whole(size: int, key: int) -> NDArray[np.int64]:
    return permute(Rectangle(size), np.arange(size), fold_in(key))


def is_bijection(moved: NDArray[np.int64]) -> bool:
    return bool((np.bincount(moved, minlength=len(moved)) == 1).all())


@pytest.mark.parametrize("size", [*range(1, 70), *AROUND_POWERS, 65_537, 10_007, 999_983])
def test_it_is_a_bijection(size: int) -> None:
    assert is_bijection(whole(size, key=size))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1, 70_000, 5000))  # together they take minutes
def test_it_is_a_bijection_for_every_length_up_to_70_000(first: int) -> None:
    for size in range(first, first + 5000):
        assert is_bijection(whole(size, key=size)), size


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_the_rectangle_holds_every_place_and_few_others(size: int, key: int, data: st.DataObject) -> None:
    shape = Rectangle(size)
    assert size <= shape.rows * shape.columns < size + shape.rows
    assert max(shape.rows, shape.columns) <= 2**31
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    moved = permute(shape, places, fold_in(key))
    assert moved.min() >= 0
    assert moved.max() < size
    assert len(set(moved.tolist())) == len(places)


@given(st.integers(1, 100_000), st.integers(0, 2**64 - 1), st.data())
def test_tables_change_nothing(size: int, key: int, data: st.DataObject) -> None:
    shape = Rectangle(size)
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)))
    made = round_tables(shape, fold_in(key))
    assert np.array_equal(permute_by_tables(shape, made, places), permute(shape, places, fold_in(key)))


def test_tables_of_the_largest_tabulated_list_are_small() -> None:
    assert sum(table.nbytes for table in round_tables(Rectangle(MAX_TABLE_ROWS**2), fold_in(0))) <= 2**20


@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=5))
def test_each_place_may_have_a_key_of_its_own(size: int, keys: list[int]) -> None:
    shape = Rectangle(size)
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


@pytest.mark.slow
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


# On both sides of the line between true shuffles and rectangles, and of tabulated rectangles.
SIZES = st.sampled_from([1, 2, 3, 50, MAX_SORTED - 1, MAX_SORTED, MAX_SORTED + 1, 200_003, 2**26, 2**26 + 1, 2**40])


def test_the_sequence_is_pinned() -> None:
    # Changing these numbers changes every saved run: bump the version of the state as well.
    assert SourceEpochs(3, 11)(np.arange(4, 12)).tolist() == [0, 2, 1, 2, 0, 2, 0, 1]
    assert SourceEpochs(10**6, 11)(np.arange(999_998, 1_000_002)).tolist() == [293238, 259551, 358947, 330578]


@pytest.mark.slow
@given(SIZES, WORDS, st.integers(0, 2**61), st.lists(st.integers(0, 2**20), min_size=1, max_size=60))
def test_what_was_asked_before_changes_nothing(size: int, key: int, far: int, steps: list[int]) -> None:
    draws = far + np.cumsum(steps)
    used = SourceEpochs(size, key)
    together = used(draws)
    alone = [int(SourceEpochs(size, key)(draws[place : place + 1])[0]) for place in range(len(draws))]
    assert together.tolist() == alone
    assert used(draws[::-1]).tolist() == alone[::-1]


@pytest.mark.parametrize("size", [1, 2, 60, 3000, MAX_SORTED, MAX_SORTED + 1, 300_000])
@pytest.mark.parametrize("number", [0, 7])
def test_each_pass_holds_every_place_once(size: int, number: int) -> None:
    drawn = SourceEpochs(size, 5)(np.arange(number * size, (number + 1) * size))
    assert np.array_equal(np.sort(drawn), np.arange(size))


@pytest.mark.parametrize("size", [1000, 100_000])
def test_passes_differ(size: int) -> None:
    passes = SourceEpochs(size, 0)
    one, two = passes(np.arange(size)), passes(np.arange(size, 2 * size))
    assert np.count_nonzero(one == two) <= 12  # one by chance
    follower = np.full(size, -1)
    follower[one[:-1]] = one[1:]
    assert np.count_nonzero(follower[two[:-1]] == two[1:]) <= 12  # neighbours in both: one by chance


@pytest.mark.parametrize("size", [3, 700, 40_000])
def test_many_short_passes_go_in_blocks(size: int) -> None:
    drawn = SourceEpochs(size, 9)(np.arange(1, MAX_SHUFFLED + 3 * size))
    again = SourceEpochs(size, 9)(np.arange(MAX_SHUFFLED, MAX_SHUFFLED + 3 * size))
    assert np.array_equal(drawn[MAX_SHUFFLED - 1 :], again)


def test_a_long_source_over_many_passes() -> None:
    size = 70_000
    drawn = SourceEpochs(size, 2)(np.arange(5 * size))
    assert all(np.array_equal(np.sort(part), np.arange(size)) for part in drawn.reshape(5, size))


def test_the_version_of_states_belongs_to_this_number_of_rounds() -> None:
    """Another number of rounds gives other orders: raise the version with it, and this line."""
    assert (ROUNDS, STATE_VERSION) == (6, 1)
    assert ROUNDS % 2 == 0
