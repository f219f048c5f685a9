"""Laws of dealing positions to ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.ranks import deal_end, rank_positions

LENGTHS = st.integers(0, 300)
WORLDS = st.integers(1, 16)


@given(LENGTHS, st.integers(0, 320), WORLDS, st.booleans())
def test_the_end_is_the_nearest_full_step(length: int, start: int, world: int, drop_last: bool) -> None:
    end = deal_end(length, start, world, drop_last)
    assert (end - start) % world == 0
    if start >= length:
        assert end == start
    elif drop_last:
        assert length - world < end <= length
    else:
        assert length <= end < length + world


@given(st.integers(0, 50), st.integers(0, 300), WORLDS, st.integers(1, 7))
def test_the_ranks_share_the_positions_in_turn(start: int, steps: int, world: int, block: int) -> None:
    end = start + steps * world
    shares = []
    for rank in range(world):
        blocks = list(rank_positions(start, end, world, rank, block))
        assert all(1 <= len(part) <= block for part in blocks)
        shares.append(np.concatenate([np.empty(0, np.int64), *blocks]))
    assert [len(share) for share in shares] == [steps] * world
    assert np.array_equal(np.stack(shares, axis=1).ravel(), np.arange(start, end))
