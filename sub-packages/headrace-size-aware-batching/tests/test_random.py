"""Keyed shuffles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples

from headrace.size_aware_batching._shared.random import fold_in, splitmix64
from headrace.size_aware_batching.planning.shuffles import LONGEST_ROW, shuffle_blocks, shuffle_groups, shuffle_rows


@examples(50)
@given(st.integers(0, 2**11), st.integers(0, 2**63))
def test_rows_are_shuffled_in_themselves(length: int, key: int) -> None:
    for row in shuffle_rows(fold_in(key, np.arange(3, dtype=np.uint64)), length):
        assert sorted(row.tolist()) == list(range(length))


def test_the_first_random_words_stay_what_they_are() -> None:
    # A change here changes every plan of every run that is to be resumed.
    assert [hex(word) for word in splitmix64(np.arange(2, dtype=np.uint64))] == [
        "0xe220a8397b1dcdaf",
        "0x910a2dec89025cc1",
    ]
    assert hex(fold_in(7, 1)[0]) == "0x9cd42d1744f0e31e"


@examples(50)
@given(st.lists(st.integers(0, 5), max_size=300), st.integers(0, 2**63))
def test_groups_are_shuffled_in_themselves(lengths: list[int], key: int) -> None:
    groups = np.repeat(np.arange(len(lengths)), lengths)
    shuffled = shuffle_groups(key, groups)
    assert sorted(shuffled.tolist()) == list(range(len(groups)))
    assert groups[shuffled].tolist() == groups.tolist()


@examples(50)
@given(st.integers(0, 5000), st.sampled_from([1, 2, 7, LONGEST_ROW, LONGEST_ROW + 1, 2**20]), st.integers(0, 2**63))
def test_blocks_are_shuffled_in_themselves(count: int, block: int, key: int) -> None:
    shuffled = shuffle_blocks(key, count, block)
    assert sorted(shuffled.tolist()) == list(range(count))
    assert (shuffled // block == np.arange(count) // block).all()


def test_blocks_are_shuffled_each_by_itself_and_evenly() -> None:
    drawn = np.stack([shuffle_blocks(key, 20, 8) for key in range(4000)])
    expected = {first: 4000 / length for first, length in ((0, 8), (8, 8), (16, 4))}
    for first, often in expected.items():
        counts = np.bincount(drawn[:, first] - first)
        assert abs(counts - often).max() < 5 * often**0.5
    together = (drawn[:, 0] == drawn[:, 8] - 8).mean()
    assert abs(together - 1 / 8) < 0.03
