"""Polynomials in the Chebyshev basis on a scaled interval: least squares that stays exact at byte counts."""

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def interval(x: Floats) -> tuple[float, float]:
    """Return centre and half-width of the values; the half-width is 1 where all are the same.

    >>> interval(np.array([2.0, 10.0]))
    (6.0, 4.0)
    """
    low, high = float(x.min()), float(x.max())
    return low / 2 + high / 2, (high / 2 - low / 2) or 1.0


def least_squares(t: Floats, y: Floats, degree: int) -> tuple[Floats, int]:
    """Fit ``sum(c[k] * T_k(t))`` to ``y``.

    On [-1, 1] the Chebyshev polynomials are close to orthogonal, so the problem is well conditioned where
    powers of the raw values would not be.

    Args:
        t: Shape ``[n]``, in [-1, 1].
        y: Shape ``[n]``.
        degree: From 0.

    Returns:
        Coefficients of shape ``[degree + 1]``, and the rank of the problem.
    """
    basis = np.polynomial.chebyshev.chebvander(t, degree)
    coefficients, _, rank, _ = np.linalg.lstsq(basis, y, rcond=None)
    # fitting what is left once more takes out the rounding of the first solution
    coefficients += np.linalg.lstsq(basis, y - np.polynomial.chebyshev.chebval(t, coefficients), rcond=None)[0]
    return coefficients.astype(np.float64, copy=False), int(rank)


def evaluate(coefficients: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Evaluate by the recurrence of C. W. Clenshaw (1955), elementwise.

    >>> evaluate(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 2.0]))  # 1 + (2 t^2 - 1)
    tensor([0.5000, 8.0000])
    """
    next_one = after = torch.zeros_like(t)
    for coefficient in reversed(coefficients[1:].unbind()):
        next_one, after = coefficient + 2 * t * next_one - after, next_one
    return coefficients[0] + t * next_one - after
