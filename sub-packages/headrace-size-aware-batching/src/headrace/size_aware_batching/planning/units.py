"""Sizes and budgets in whole units, so that sums are exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED


def round_up(size: Any, multiple: int) -> Any:
    """Round a number, or each of an array, up to a multiple.

    >>> round_up(9, 8), round_up(np.array([7.5, 8.0], np.float32), 8).tolist()
    (16, [8.0, 8.0])
    """
    if multiple == 1:
        return size
    if isinstance(size, np.ndarray | np.generic):  # small integer types would overflow
        size = size.astype(np.float64 if size.dtype.kind == "f" else np.int64)
    return -(-size // multiple) * multiple


FINE = 2**40  # units of a budget, to which real sizes are rounded up


def whole_limits(sizes: NDArray[Any], budgets: tuple[float, ...]) -> NDArray[Any]:
    """Return the largest sizes that fit by themselves, to be compared with sizes exactly."""
    if sizes.dtype.kind not in "iu":
        return np.array(budgets, np.float64)
    return np.array([math.floor(budget) if budget < UNLIMITED else UNLIMITED for budget in budgets], np.int64)


def whole_units(
    sizes: NDArray[Any], budgets: tuple[float, ...], largest: int | None = None
) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Turn sizes and budgets into integers whose sums are exact and stay inside 63 bits.

    Integers stay what they are unless their total leaves 62 bits. All else is rounded up to a 2**40th of the budget:
    sums never come out smaller than they are. With the ``largest`` size the total need not be taken.
    """
    whole = sizes.dtype.kind in "iu" or (bool((sizes == np.floor(sizes)).all()) and float(sizes.max(initial=0)) < 2**53)
    if whole and all(budget >= 1 for budget in budgets):
        integers = sizes if sizes.dtype.kind in "iu" else sizes.astype(np.int64)
        limits = [min(UNLIMITED, math.floor(budget) if math.isfinite(budget) else UNLIMITED) for budget in budgets]
        few = largest is not None and largest * len(sizes) < UNLIMITED
        if few or float(sizes.sum(axis=0, dtype=np.float64).max(initial=0)) < UNLIMITED:
            return integers, tuple(limits)
        return coarser_units(integers, limits)
    divisor = np.array(budgets) if sizes.ndim == 2 else np.float64(budgets[0])
    with np.errstate(over="ignore"):
        units = np.minimum(np.ceil(sizes / divisor * FINE), 2.0**60).astype(np.int64)
    return units, (FINE,) * len(budgets)


def coarser_units(sizes: NDArray[Any], limits: list[int]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Count integers in larger units, so that no budget has more than about 40 bits."""
    units = [max(1, -(-limit // FINE)) for limit in limits]
    divisor = np.array(units) if sizes.ndim == 2 else units[0]
    return -(-sizes.astype(np.int64) // divisor), tuple(
        limit // unit for limit, unit in zip(limits, units, strict=True)
    )
