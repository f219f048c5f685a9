"""Weights as the decimals that were written, and what is no weight."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.weights import exact


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_a_float_counts_as_its_shortest_decimal(ratio: float) -> None:
    assert exact("weight", ratio) == Fraction(repr(ratio))
    assert float(exact("weight", ratio)) == ratio


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
    assert exact("weight", weight) == want


@pytest.mark.parametrize("weight", [True, np.True_, "1.1", None, 1j, [1.0]])
def test_what_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match=r"weight of ours must be an int, float"):
        exact("weight of ours", weight)


NOT_FINITE = [
    *(math.nan, math.inf, -math.inf, np.float32("nan")),
    *map(Decimal, ("NaN", "sNaN", "inf", "-inf")),
]


@pytest.mark.parametrize("weight", NOT_FINITE, ids=str)
def test_what_is_not_finite_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of ours must be finite, got"):
        exact("weight of ours", weight)


@pytest.mark.parametrize("weight", [-1, -0.5, Fraction(-1, 3), Decimal("-1e-9"), np.float64(-2)], ids=str)
def test_what_is_negative_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -"):
        exact("weight of ours", weight)
