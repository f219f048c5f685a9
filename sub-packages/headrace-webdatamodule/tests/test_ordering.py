from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.shards.reading.dataset import by_shard


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_groups_and_order_lead_back_to_the_indices(counts: list[int], data: st.DataObject) -> None:
    ends = list(accumulate(counts))
    count = sum(counts)
    indices = data.draw(st.lists(st.integers(-count, count - 1), max_size=30)) if count else []
    groups, order = by_shard(indices, ends)
    flat = [(ends[shard] - counts[shard] + number, number < counts[shard]) for shard, one in groups for number in one]
    assert all(number >= 0 for _, one in groups for number in one)
    assert all(inside for _, inside in flat)
    assert {place: at for place, (at, _) in zip(order, flat, strict=True)} == {
        place: index % count for place, index in enumerate(indices)
    }
    shards = [shard for shard, _ in groups]
    assert shards == sorted(set(shards))
    assert all(one == sorted(one) for _, one in groups)


@pytest.mark.parametrize("indices", [[5], [-6], [0, 99, 1]])
def test_a_position_that_is_not_there_is_named(indices: list[int]) -> None:
    with pytest.raises(IndexError, match=r"-5 to 4, got (5|-6|99)"):
        by_shard(indices, [3, 5])


@pytest.mark.parametrize("indices", [[0.5], ["a"], [[0, 1]], [True]])
def test_what_is_no_position_is_refused(indices: list[int]) -> None:
    with pytest.raises(TypeError, match="indices must be integers"):
        by_shard(indices, [3, 5])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_arrays_of_any_integers_will_do(dtype: type[np.integer]) -> None:
    assert by_shard(np.array([4, 0, 3], dtype), [3, 300]) == ([(0, [0]), (1, [0, 1])], [1, 2, 0])
