"""Shares and turns: pure arithmetic."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.streaming.counting import Batched
from headrace.webdatamodule.streaming.position import Counting
from headrace.webdatamodule.streaming.shares import pieces, rank_share, worker_share
from headrace.webdatamodule.streaming.turns import turns_taken

COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any)


@given(COUNTS, st.integers(1, 16), st.integers(1, 5))
def test_shares_are_equal_and_hold_every_sample(counts: list[int], world: int, workers: int) -> None:
    n, seen = sum(counts), []
    for rank in range(world):
        start, stop = rank_share(n, world, rank)
        assert stop - start == -(-n // world)
        ends = [worker_share(start, stop, worker, workers) for worker in range(workers)]
        assert ends[0][0] == start
        assert ends[-1][1] == stop
        assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert max(b - a for a, b in ends) - min(b - a for a, b in ends) <= 1
        for begin, end in ends:
            parts = list(pieces(counts, begin, end))
            assert all(0 <= first < last <= counts[shard] for shard, first, last in parts)
            seen += [(shard, one) for shard, first, last in parts for one in range(first, last)]
    every = [(shard, one) for shard, count in enumerate(counts) for one in range(count)]
    assert set(seen) == set(every)
    assert len(seen) - len(every) <= world - 1
    assert seen[:n] == every


def test_no_samples_give_no_pieces() -> None:
    assert list(pieces([0, 0], 0, 3)) == list(pieces([], 0, 3)) == []


def round_robin(lengths: list[int]) -> Iterator[int]:
    """As torch's loader does it."""
    left = list(lengths)
    while any(left):
        for worker in range(len(left)):
            if left[worker]:
                left[worker] -= 1
                yield worker


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.data())
def test_turns(lengths: list[int], data: st.DataObject) -> None:
    order = list(round_robin(lengths))
    n = data.draw(st.integers(0, len(order)))
    given_, turn = turns_taken(lengths, n)
    assert given_ == [order[:n].count(worker) for worker in range(len(lengths))]
    left = [length - some for length, some in zip(lengths, given_, strict=True)]
    shifted = round_robin(left[turn:] + left[:turn])
    assert [(worker + turn) % len(lengths) for worker in shifted] == order[n:]


def test_more_turns_than_items() -> None:
    with pytest.raises(ValueError, match="n must be 0 to 3, got 4"):
        turns_taken([1, 2], 4)


FACTORS = st.builds(Batched, st.integers(1, 5), st.booleans())


@given(st.integers(1, 60), st.integers(1, 4), FACTORS, FACTORS, st.integers(1, 40), st.data())
def test_places(
    samples: int, workers: int, inside: Batched, outside: Batched, promised: int, data: st.DataObject
) -> None:
    counting = Counting(samples, workers, inside, outside)
    a_pass = max(1, counting.batches())
    position = data.draw(st.integers(0, 3 * promised))
    turn, lap, done, items = counting.place(position, promised)
    assert turn * promised + done == position
    # Counted one by one.
    laps = [(t, d // a_pass, d % a_pass) for t in range(4) for d in range(promised)]
    _, _, within = laps[position]
    assert lap == len({one[:2] for one in laps[: position + 1]}) - 1
    assert items == within * outside.size
    assert items <= max(0, sum(counting.items())) or counting.batches() == 0
