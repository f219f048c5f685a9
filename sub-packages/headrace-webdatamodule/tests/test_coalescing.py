from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.remote.filesystem import Pieces, coalesce
from headrace.webdatamodule.shards.remote.shards import windows

FILE = np.random.default_rng(0).bytes(400)
SPANS = st.lists(
    st.tuples(st.integers(0, 399), st.integers(0, 60)).map(lambda s: (s[0], min(400, sum(s)))), max_size=12
)


@given(SPANS, st.integers(0, 50), st.integers(1, 300))
def test_pieces_give_what_the_file_gives(spans: list[tuple[int, int]], gap: int, most: int) -> None:
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    asked = coalesce(begins, ends, gap=gap, most=most)
    pieces = Pieces(asked, [FILE[begin:end] for begin, end in asked])
    for begin, end in spans:
        assert pieces[begin:end] == FILE[begin:end]
    assert asked == sorted(asked)
    assert all(before[1] <= after[0] for before, after in pairwise(asked))


@given(SPANS, st.integers(0, 50))
def test_no_more_is_read_than_members_and_gaps(spans: list[tuple[int, int]], gap: int) -> None:
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    asked = coalesce(begins, ends, gap=gap, most=10**6)
    wanted = {at for begin, end in spans for at in range(begin, end)}
    vain = sorted({at for begin, end in asked for at in range(begin, end)} - wanted)
    runs = np.split(vain, np.flatnonzero(np.diff(vain) > 1) + 1) if vain else []
    assert all(len(run) <= gap for run in runs)
    assert all(after[0] - before[1] > gap for before, after in pairwise(asked))


def test_what_was_not_read_is_an_error() -> None:
    pieces = Pieces([(10, 20)], [bytes(10)])
    for wanted in (slice(0, 5), slice(15, 25), slice(30, 31)):
        with pytest.raises(LookupError, match="were not read"):
            pieces[wanted]


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 80))
def test_windows_are_a_partition(sizes: list[int], most: int) -> None:
    parts = windows(np.array(sizes, np.int64), most)
    assert [at for begin, end in parts for at in range(begin, end)] == list(range(len(sizes)))
    assert all(sum(sizes[begin : end - 1]) <= most for begin, end in parts)
