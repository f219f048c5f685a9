"""Weights as exact numbers."""

from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

Ratio: TypeAlias = int | float | Fraction | Decimal | np.integer[Any] | np.floating[Any]


def exact(name: str, value: Ratio) -> Fraction:
    """Read a weight as the decimal number its writer sees.

    A float counts as the shortest decimal that gives it back, so 1.1 is 11/10 and not the binary number just
    above it.

    Args:
        name: What to call the weight in an error.
        value: An int, float, ``Fraction``, ``Decimal`` or numpy number.

    Raises:
        TypeError: If it is another type; a bool is no weight.
        ValueError: If it is NaN, infinite or negative.

    >>> exact("weight", 1.1), exact("weight", np.float32(0.25))
    (Fraction(11, 10), Fraction(1, 4))
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction, Decimal, np.integer, np.floating)):
        raise TypeError(f"{name} must be an int, float, Fraction or Decimal, got {value!r} ({type(value).__name__})")
    if not _finite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    weight = _fraction(value)
    if weight < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 leaves a source out")
    return weight


def _fraction(value: Ratio) -> Fraction:
    if isinstance(value, (float, np.floating)):
        return Fraction(str(value))  # the shortest decimal that reads back as this float
    return Fraction(int(value)) if isinstance(value, np.integer) else Fraction(value)


def _finite(value: Ratio) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite()
    return not isinstance(value, (float, np.floating)) or bool(np.isfinite(value))
