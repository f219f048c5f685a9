"""Packing into few batches: greedy balancing, repair and the lower bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples

from headrace.size_aware_batching.planning.packing import lower_bound, pack


@examples(50)
@given(cases(), st.integers(1, 400), st.sampled_from([1, 4, 128]), st.integers(1, 3), st.integers(0, 9))
def test_packing_fits_or_says_that_it_does_not(case: Case, n_batches: int, block: int, columns: int, key: int) -> None:
    sizes, budget = case
    if not len(sizes):
        return
    n_batches = min(n_batches, len(sizes))
    table = np.sort(sizes)[::-1][:, None] * np.array([1, 1, 0])[:columns]
    table[:, -1] = table[::-1, -1]
    capacity = np.full(columns, budget)
    assert (lower_bound(table, capacity) <= len(sizes)) or budget == 0
    batches = pack(table, capacity, n_batches, key, block)
    if batches is not None:
        assert sorted(set(batches.tolist())) == list(range(n_batches))
        for column in table.T:
            assert np.bincount(batches, column, minlength=n_batches).max() <= budget
        assert n_batches >= lower_bound(table, capacity)


def test_a_few_batches_of_very_many_samples() -> None:
    # Many small samples and some giants: handfuls of them are dealt at once, the giants one by one.
    sizes = np.sort(np.concatenate([np.full(20, 300_000), np.full(300_000, 7)]))[::-1, None]
    batches = pack(sizes, np.array([1_000_000]), 9, key=1, block=128)
    assert batches is not None
    sums = np.bincount(batches, sizes[:, 0], minlength=9)
    assert sums.max() <= 1_000_000
    assert sums.sum() == sizes.sum()


@pytest.mark.parametrize(
    ("sizes", "capacity", "fewest"), [([34] * 10, 100, 5), ([51] * 7, 100, 7), ([60, 40] * 5, 100, 5)]
)
def test_the_lower_bound_knows_coarse_sizes(sizes: list[int], capacity: int, fewest: int) -> None:
    assert lower_bound(np.array(sizes)[:, None], np.array([capacity])) == fewest
