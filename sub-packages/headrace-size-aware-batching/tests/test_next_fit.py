import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching.sampler import Tally, exact, next_fit

SIZES = st.one_of(
    st.lists(st.integers(0, 30)),
    st.lists(st.floats(0, 30)),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0), st.just(math.inf))),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 1e-17, 5e-324, 1e16, 1, 1e308])),
)
BUDGETS = st.one_of(st.integers(1, 60), st.floats(1e-3, 60), st.integers(1, 2**70), st.just(math.inf))


def run(sizes: Sequence[float], budget: float) -> tuple[list[list[int]], list[object], Tally]:
    tally = Tally(budget, "indices")
    skipped: list[object] = []
    sized = ((i, i, size) for i, size in enumerate(sizes))
    return list(next_fit(sized, tally, lambda key, _: skipped.append(key))), skipped, tally


def total(sizes: list[float]) -> Fraction:
    """Sum without rounding, by another road than the code."""
    return sum((Fraction(size) for size in sizes), Fraction(0))


@given(SIZES, BUDGETS)
def test_laws(sizes: list[float], budget: float) -> None:
    batches, skipped, tally = run(sizes, budget)
    flat = [index for batch in batches for index in batch]
    oversize = [i for i, size in enumerate(sizes) if size > budget or size == math.inf]
    assert skipped == oversize
    assert flat == [i for i in range(len(sizes)) if i not in oversize]  # each once, order kept
    assert all(batches)
    assert all(total([sizes[i] for i in batch]) <= budget for batch in batches)
    for batch, following in pairwise(batches):  # no batch is closed too early
        assert total([sizes[i] for i in [*batch, following[0]]]) > budget
    assert (tally.batches, tally.elements, tally.skipped) == (len(batches), len(flat), len(oversize))
    assert tally.filled == total([sizes[i] for i in flat]) * 2**1074


@given(st.lists(st.floats(0, 1e308)))
def test_sums_do_not_round(values: list[float]) -> None:
    assert Fraction(sum(map(exact, values)), 2**1074) == total(values)


def test_integers_beyond_float_precision_stay_exact() -> None:
    assert run([2**60, 1, 1], 2**60 + 1)[0] == [[0, 1], [2]]  # as floats all three would fit


def test_float_sums_do_not_drift() -> None:
    # A running float sum would lose each 1 against 1e16 and never close the batch.
    assert [len(batch) for batch in run([1e16, *[1.0] * 25], 1e16 + 10)[0]] == [11, 15]
    assert run([0.5, 0.25, 0.25], 1.0)[0] == [[0, 1, 2]]  # exactly full is allowed


def test_one_batch_is_held_and_the_source_may_be_endless() -> None:
    def endless() -> Iterator[tuple[int, str, int]]:
        while True:
            yield 0, "x", 1

    batches = next_fit(endless(), Tally(3, "indices"), print)
    assert [next(batches) for _ in range(3)] == [["x", "x", "x"]] * 3


def test_the_summary_counts_all_and_names_ten() -> None:
    _, skipped, tally = run([9] * 12 + [2, 3], 5)
    assert len(skipped) == 12
    assert tally.summary() == (
        "1 batches of 2 elements, fill 1.0000 of max_total_size=5; "
        "12 skipped as larger than that: indices 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    )
    assert run([3, 3], 4)[2].summary() == "2 batches of 2 elements, fill 0.7500 of max_total_size=4; 0 skipped"


@pytest.mark.parametrize(("sizes", "budget"), [([], 5), ([9], 5), ([1, 2], math.inf)])
def test_no_fill_where_there_is_none(sizes: list[float], budget: float) -> None:
    assert math.isnan(run(sizes, budget)[2].fill())
