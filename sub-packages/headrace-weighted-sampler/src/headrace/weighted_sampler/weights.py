"""Ratios into exact numbers of draws."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from headrace.weighted_sampler.checks import integer

Ratio: TypeAlias = int | float | Fraction | Decimal | np.integer[Any] | np.floating[Any]
MOST_DRAWS = 2**62  # positions are 64-bit integers; this leaves room for padding


@dataclass(frozen=True)
class WeightedRange:
    """One range of dataset indices and what an epoch draws from it.

    Attributes:
        begin: First index of the range.
        end: One past its last index.
        ratio: How many times an epoch asks for each sample, exactly.
    """

    begin: int
    end: int
    ratio: Fraction

    @property
    def size(self) -> int:
        """Number of samples in the range."""
        return self.end - self.begin

    @property
    def draws(self) -> int:
        """Number of draws an epoch takes: ``size * ratio``, rounded up.

        >>> WeightedRange(0, 100, exact("ratio", 1.1)).draws
        110
        """
        return math.ceil(self.size * self.ratio)


def exact(name: str, value: Ratio) -> Fraction:
    """Read a ratio as the decimal number its writer sees.

    A float counts as the shortest decimal that gives it back, so 1.1 is 11/10 and not the binary number just
    above it.

    Args:
        name: What to call the ratio in an error.
        value: An int, float, ``Fraction``, ``Decimal`` or numpy number.

    Raises:
        TypeError: If it is another type; a bool is no ratio.
        ValueError: If it is NaN, infinite or negative.

    >>> exact("ratio", 1.1), exact("ratio", np.float32(0.25))
    (Fraction(11, 10), Fraction(1, 4))
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction, Decimal, np.integer, np.floating)):
        raise TypeError(f"{name} must be an int, float, Fraction or Decimal, got {value!r} ({type(value).__name__})")
    if not _finite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    ratio = _fraction(value)
    if ratio < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 leaves a range out")
    return ratio


def _fraction(value: Ratio) -> Fraction:
    if isinstance(value, (float, np.floating)):
        return Fraction(str(value))  # the shortest decimal that reads back as this float
    return Fraction(int(value)) if isinstance(value, np.integer) else Fraction(value)


def _finite(value: Ratio) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite()
    return not isinstance(value, (float, np.floating)) or bool(np.isfinite(value))


def weighted_ranges(weights: Mapping[tuple[int, int], Ratio], length: int) -> tuple[WeightedRange, ...]:
    """Check the ranges of a ``weight_dict`` and sort them by their first index.

    Args:
        weights: ``{(begin, end): ratio}``; ``end`` is not included.
        length: Number of samples in the dataset.

    Returns:
        The ranges that are drawn from. Those of ratio 0 are checked, then left out.

    Raises:
        TypeError: If ``weights`` is no mapping, a key no tuple of two integers, or a ratio no number.
        ValueError: If there is nothing to draw, a range is reversed, empty, outside the dataset or overlaps
            another, or a ratio is negative, NaN or infinite.

    >>> [part.draws for part in weighted_ranges({(10, 30): 0.25, (0, 10): 2}, length=30)]
    [20, 5]
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weight_dict must be a dict {{(begin, end): ratio}}, got {type(weights).__name__}")
    ranges = sorted((_range(key, ratio, length) for key, ratio in weights.items()), key=lambda r: r.begin)
    _refuse_overlap(ranges)
    drawn = tuple(part for part in ranges if part.ratio > 0)
    if not drawn:
        raise ValueError(
            f"weight_dict must hold at least one range of ratio above 0, got {dict(weights)!r}: "
            "there is nothing to draw"
        )
    if sum(part.draws for part in drawn) > MOST_DRAWS:
        raise ValueError("weight_dict asks for more than 2**62 draws an epoch; use smaller ratios")
    return drawn


def _range(key: object, ratio: Ratio, length: int) -> WeightedRange:
    if not isinstance(key, tuple) or len(key) != 2:
        raise TypeError(f"weight_dict keys must be tuples (begin, end), got {key!r}")
    begin = integer(f"begin of the weight_dict range {key}", key[0], 0)
    end = integer(f"end of the weight_dict range {key}", key[1], 0)
    if end <= begin:
        fault = "is reversed" if end < begin else "is empty"
        raise ValueError(f"weight_dict range ({begin}, {end}) {fault}: end must be greater than begin")
    if end > length:
        raise ValueError(
            f"weight_dict range ({begin}, {end}) reaches outside the dataset of {length} samples: "
            f"end must be at most {length}"
        )
    return WeightedRange(begin, end, exact(f"ratio of the weight_dict range ({begin}, {end})", ratio))


def _refuse_overlap(ranges: Iterable[WeightedRange]) -> None:
    before: WeightedRange | None = None
    for part in ranges:
        if before is not None and part.begin < before.end:
            raise ValueError(
                f"weight_dict ranges ({before.begin}, {before.end}) and ({part.begin}, {part.end}) overlap: "
                "every sample may be in one range only"
            )
        before = part
