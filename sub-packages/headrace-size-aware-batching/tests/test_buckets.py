from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching.buckets import bucket_of
from headrace.size_aware_batching.utils import Buckets, create_buckets


def slow_buckets(sizes: list[int], width: int, count: int) -> tuple[list[int], list[int]]:
    """The same rule, one value at a time."""
    bounds, held = [min(sizes)], [0]
    for value in range(min(sizes), max(sizes) + 1):
        full = held[-1] >= count and value in sizes
        if full or value - bounds[-1] == width:
            bounds.append(value)
            held.append(0)
        held[-1] += sizes.count(value)
    return [*bounds, max(sizes) + 1], held


def test_a_gap_becomes_empty_buckets() -> None:
    sizes = torch.tensor([1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 22, 22, 22, 22])
    buckets = create_buckets(sizes, max_width=5, min_bucket_count=10)
    assert isinstance(buckets, Buckets)
    assert buckets.bucket_boundaries.tolist() == [1, 6, 11, 16, 21, 23]
    assert buckets.bucket_sizes.tolist() == [12, 0, 0, 0, 4]


def test_a_bucket_closes_when_it_holds_enough() -> None:
    bounds, held = create_buckets(torch.arange(20), 10, 5)
    assert bounds.tolist() == [0, 5, 10, 15, 20]
    assert held.tolist() == [5, 5, 5, 5]
    assert bounds.dtype == held.dtype == torch.int64


@given(st.lists(st.integers(0, 60), min_size=1), st.integers(1, 20), st.integers(1, 8))
def test_equals_the_rule_value_by_value(sizes: list[int], width: int, count: int) -> None:
    bounds, held = create_buckets(sizes, width, count)
    assert (bounds.tolist(), held.tolist()) == slow_buckets(sizes, width, count)


@given(
    st.lists(st.integers(0, 10**5), min_size=1),
    st.integers(1, 10**6),
    st.integers(1, 50),
    st.integers(0, 2**40),
)
def test_laws(sizes: list[int], width: int, count: int, shift: int) -> None:
    bounds, held = create_buckets(torch.tensor(sizes) + shift, width, count)
    widths = bounds.diff()
    assert (widths >= 1).all()
    assert (widths <= width).all()
    assert bounds[0] == min(sizes) + shift
    assert bounds[-1] == max(sizes) + shift + 1
    assert held.tolist() == np.histogram(np.array(sizes) + shift, bounds.numpy())[0].tolist()
    assert int(held.sum()) == len(sizes)


@pytest.mark.parametrize("sizes", [[7], np.array([7, 7], dtype=np.uint8), torch.tensor([7], dtype=torch.int16)])
def test_one_value(sizes: Any) -> None:
    bounds, held = create_buckets(sizes, 5, 1)
    assert bounds.tolist() == [7, 8]
    assert held.tolist() == [len(sizes)]


def test_numbers_at_the_edge_of_int64() -> None:
    top = 2**63 - 2
    assert create_buckets([top - 1, top], 2**62, 1).bucket_boundaries.tolist() == [top - 1, top, top + 1]
    assert create_buckets([0, top], 2**62, 1).bucket_sizes.tolist() == [1, 1]
    with pytest.raises(ValueError, match="would leave the 64-bit integers"):
        create_buckets([2**63 - 1], 5, 1)


def test_huge_gaps_are_refused_and_large_ones_are_quick() -> None:
    with pytest.raises(
        ValueError, match=r"empty buckets between 8 and 1000000000, more than .* use a greater max_width"
    ):
        create_buckets([1, 3, 10**9], 5, 1)
    assert len(create_buckets([0, 10**6], 1, 1).bucket_sizes) == 10**6 + 1
    assert len(create_buckets([0, 10**15], 10**10, 1).bucket_sizes) == 10**5 + 1


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ([], ValueError, "sizes is empty"),
        (torch.tensor([1.0, 2.0]), TypeError, "sizes must be integers, got float64"),
        (torch.tensor([[1, 2]]), ValueError, "sizes must be 1-D"),
        ([3, -1], ValueError, "1 negative sizes, the first is -1 at index 1"),
        ([True], TypeError, "real number"),
        ("123", TypeError, "1-D"),
    ],
)
def test_sizes_that_are_refused(sizes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_buckets(sizes, 5, 1)


@pytest.mark.parametrize("name", ["max_width", "min_bucket_count"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_options_that_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    options = {"max_width": 5, "min_bucket_count": 5} | {name: value}
    with pytest.raises(error, match=f"{name} must be"):
        create_buckets([1, 2], **options)


@given(st.lists(st.floats(-5, 25)), st.lists(st.integers(0, 20), min_size=2, max_size=6, unique=True).map(sorted))
def test_every_size_is_in_the_interval_that_holds_it(sizes: list[float], bounds: list[int]) -> None:
    found = bucket_of(np.array(sizes, dtype=np.float64), np.array(bounds))
    for size, bucket in zip(sizes, found.tolist(), strict=True):
        holding = [j for j in range(len(bounds) - 1) if bounds[j] <= size < bounds[j + 1]]
        assert holding == ([] if bucket == -1 else [bucket])
