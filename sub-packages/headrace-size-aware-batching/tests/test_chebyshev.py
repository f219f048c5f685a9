import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching.memory_model import evaluate, interval, least_squares

NUMBERS = st.floats(-100, 100)


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.lists(st.floats(-3, 3), min_size=1))
def test_evaluate_agrees_with_numpy(coefficients: list[float], points: list[float]) -> None:
    found = evaluate(torch.tensor(coefficients).double(), torch.tensor(points).double()).numpy()
    t = torch.tensor(points).double().numpy()
    expected = np.polynomial.chebyshev.chebval(t, torch.tensor(coefficients).double().numpy())
    assert np.allclose(found, expected, rtol=1e-12, atol=1e-5)


@given(st.lists(st.floats(-1e308, 1e308), min_size=1))
def test_interval_scales_every_value_into_the_unit_interval(values: list[float]) -> None:
    center, half = interval(np.array(values))
    assert half > 0
    assert np.all(np.abs(np.array(values) / half - center / half) <= 1 + 1e-9)


def test_interval_of_equal_values_and_of_the_largest_doubles() -> None:
    assert interval(np.array([3.0, 3.0])) == (3.0, 1.0)
    assert interval(np.array([-1.7e308, 1.7e308])) == (0.0, 1.7e308)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_least_squares_recovers_coefficients(coefficients: list[float]) -> None:
    t = np.linspace(-1, 1, 30, dtype=np.float64)
    y = np.asarray(np.polynomial.chebyshev.chebval(t, coefficients), dtype=np.float64)
    found, rank = least_squares(t, y, len(coefficients) - 1)
    assert rank == len(coefficients)
    assert np.allclose(found, coefficients, atol=1e-10)


def test_rank_tells_when_points_lie_too_close() -> None:
    _, rank = least_squares(np.array([0.5, 0.5, 1.0]), np.ones(3), 2)
    assert rank == 2
