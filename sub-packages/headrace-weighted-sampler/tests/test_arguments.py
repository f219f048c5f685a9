"""Integers and exact weights as arguments, and what the errors say."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler._arguments import as_int
from headrace.weighted_sampler.weights import as_fraction


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_python_and_numpy_integers_are_accepted(value: object) -> None:
    got = as_int("rank", value, 0)
    assert (got, type(got)) == (3, int)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, np.array([1, 2]), torch.tensor([1, 2])])
def test_everything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"^rank must be an int >= 0, got"):
        as_int("rank", value, 0)


@pytest.mark.parametrize(
    ("value", "high", "allowed"), [(-1, None, ">= 0"), (-1, 5, "from 0 to 5"), (6, 5, "from 0 to 5")]
)
def test_bounds_are_named(value: int, high: int | None, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^epoch must be an int {allowed}, got {value}$"):
        as_int("epoch", value, 0, high)


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_a_float_counts_as_its_shortest_decimal(ratio: float) -> None:
    assert as_fraction("weight", ratio) == Fraction(repr(ratio))
    assert float(as_fraction("weight", ratio)) == ratio


@pytest.mark.parametrize(
    ("weight", "want"),
    [
        (1.1, Fraction(11, 10)),
        (np.float32(1.1), Fraction(11, 10)),
        (np.float64(1.1), Fraction(11, 10)),
        (np.longdouble("1.1"), Fraction(11, 10)),
        (Decimal("1.1"), Fraction(11, 10)),
        (Fraction(1, 3), Fraction(1, 3)),
        (2, 2),
        (np.int8(2), 2),
        (10**17, 10**17),
    ],
)
def test_kinds_of_numbers(weight: Any, want: Fraction) -> None:
    assert as_fraction("weight", weight) == want


@pytest.mark.parametrize("weight", [True, np.True_, "1.1", None, 1j, [1.0]])
def test_what_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match=r"weight of ours must be an int, float"):
        as_fraction("weight of ours", weight)


NOT_FINITE = [
    *(math.nan, math.inf, -math.inf, np.float32("nan")),
    *map(Decimal, ("NaN", "sNaN", "inf", "-inf")),
]


@pytest.mark.parametrize("weight", NOT_FINITE, ids=str)
def test_what_is_not_finite_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of ours must be finite, got"):
        as_fraction("weight of ours", weight)


@pytest.mark.parametrize("weight", [-1, -0.5, Fraction(-1, 3), Decimal("-1e-9"), np.float64(-2)], ids=str)
def test_what_is_negative_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -"):
        as_fraction("weight of ours", weight)
