"""Exact counts from ratios, and every kind of range that is refused."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import WeightedRange, weighted_ranges
from headrace.weighted_sampler.weights import exact


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(0, 6))
def test_counts_are_exact_for_every_decimal(size: int, digits: int, places: int) -> None:
    written = Fraction(digits, 10**places)
    want = -(-size * digits // 10**places)
    for ratio in (float(f"{digits}e-{places}"), Decimal(digits).scaleb(-places), written):
        [part] = weighted_ranges({(0, size): ratio}, size)
        assert part.draws == want


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_a_float_counts_as_its_shortest_decimal(ratio: float) -> None:
    assert exact("ratio", ratio) == Fraction(repr(ratio))
    assert float(exact("ratio", ratio)) == ratio


@pytest.mark.parametrize(
    ("ratio", "want"),
    [
        (1.1, 110),
        (np.float32(1.1), 110),
        (np.float64(1.1), 110),
        (np.longdouble("1.1"), 110),
        (Decimal("1.1"), 110),
        (Fraction(1, 3), 34),
        (2, 200),
        (np.int8(2), 200),
        (0.3, 30),
        (1e-9, 1),
        (10**17, 10**19 // 1),
    ],
)
def test_draws_of_a_hundred_samples(ratio: Any, want: int) -> None:
    assert WeightedRange(0, 100, exact("ratio", ratio)).draws == want


@pytest.mark.parametrize("ratio", [True, np.True_, "1.1", None, 1j, [1.0]])
def test_a_ratio_that_is_no_number_is_refused(ratio: Any) -> None:
    with pytest.raises(TypeError, match=r"ratio of the weight_dict range \(0, 5\) must be an int, float"):
        weighted_ranges({(0, 5): ratio}, 10)


NOT_FINITE = [
    *(math.nan, math.inf, -math.inf, np.float32("nan")),
    *map(Decimal, ("NaN", "sNaN", "inf", "-inf")),
]


@pytest.mark.parametrize("ratio", NOT_FINITE, ids=str)
def test_a_ratio_that_is_not_finite_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"ratio of the weight_dict range \(0, 5\) must be finite, got"):
        weighted_ranges({(0, 5): ratio}, 10)


@pytest.mark.parametrize("ratio", [-1, -0.5, Fraction(-1, 3), Decimal("-1e-9"), np.float64(-2)], ids=str)
def test_a_negative_ratio_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -"):
        weighted_ranges({(0, 5): ratio}, 10)


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        ({(5, 2): 1}, r"\(5, 2\) is reversed"),
        ({(5, 5): 1}, r"\(5, 5\) is empty"),
        ({(0, 11): 1}, r"\(0, 11\) reaches outside the dataset of 10 samples: end must be at most 10"),
        ({(-1, 5): 1}, r"begin of the weight_dict range \(-1, 5\) must be at least 0, got -1"),
        ({(0, 5): 1, (4, 8): 1}, r"\(0, 5\) and \(4, 8\) overlap"),
        ({(4, 8): 1, (0, 10): 1}, r"\(0, 10\) and \(4, 8\) overlap"),
        ({(4, 8): 1, (4, 9): 0}, r"\(4, 8\) and \(4, 9\) overlap"),
        ({}, "at least one range of ratio above 0, got {}"),
        ({(0, 5): 0, (5, 10): 0.0}, "at least one range of ratio above 0"),
        ({(0, 5): 10**30}, "more than 2\\*\\*62 draws"),
        ({(0, 5): 10**5000}, "more than 2\\*\\*62 draws"),
    ],
)
def test_a_range_that_cannot_be_is_refused(ranges: dict[tuple[int, int], Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        weighted_ranges(ranges, 10)


@pytest.mark.parametrize("key", [5, "ab", (1,), (0, 1, 2), frozenset({0, 5})])
def test_a_key_that_is_no_pair_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="keys must be tuples"):
        weighted_ranges({key: 1.0}, 10)


@pytest.mark.parametrize("key", [(0, 5.0), (False, 5), ("0", 5), (None, 5)])
def test_a_bound_that_is_no_integer_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"of the weight_dict range .* must be an integer"):
        weighted_ranges({key: 1.0}, 10)


@pytest.mark.parametrize("weights", [None, [((0, 5), 1.0)], {(0, 5)}])
def test_weights_that_are_no_mapping_are_refused(weights: Any) -> None:
    with pytest.raises(TypeError, match="weight_dict must be a dict"):
        weighted_ranges(weights, 10)


def test_ranges_come_sorted_and_without_those_of_ratio_zero() -> None:
    weights: dict[Any, float] = {(np.int64(8), np.int64(10)): 2, (3, 5): 0, (0, 3): 0.5}
    assert weighted_ranges(weights, 10) == (
        WeightedRange(0, 3, Fraction(1, 2)),
        WeightedRange(8, 10, Fraction(2)),
    )
