"""What a batch of a stream may hold: any cost, with sizes that are only known as they come."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._binpacking import cut_descending
from headrace.size_aware_batching._budget import (
    UNLIMITED,
    Capacity,
    CostFunction,
    Limits,
    PaddedCapacity,
    largest_count,
    round_up,
    whole_units,
)
from headrace.size_aware_batching.vectors import Number, real_number

REMEMBERED = 2**16  # distinct sizes whose count is kept for a cost function: a stream may bring any number of them

Measure = Callable[[int, Number, Number], Number]
Cuts = Callable[[NDArray[Any]], NDArray[np.int64]]


@dataclass(frozen=True)
class StreamBudget:
    """A cost and its budget.

    Args:
        limit: Largest cost of a batch, in the unit of the cost.
        measure: ``measure(count, largest, total)`` gives the cost of a batch.
        cuts: Cuts sizes that fall, shape ``[n]``, into batches; see `strategies.bucketed.cut`.
        multiple: Batches that hold more samples than this hold a multiple of it.
    """

    limit: Number
    measure: Measure
    cuts: Cuts
    multiple: int = 1

    def exceeded_by(self, size: Number) -> bool:
        """Return whether a sample of this size exceeds the budget by itself; an infinite one always does."""
        if math.isinf(size):
            return True
        cost = self.measure(1, size, size)
        return math.isinf(cost) or cost > self.limit

    def cut(self, falling: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
        """Cut sizes that fall into batches.

        Args:
            falling: Sizes, largest first, shape ``[n]``; none of them exceeds the budget, and there is one at least.

        Returns:
            Where each batch begins and, last, where the last one ends; and how many of them are complete: what is
            over at the end, among the smallest, might have taken more.

        >>> budget = stream_budget("padded", 12, most_items=4)
        >>> budget.cut(np.array([6, 5, 4, 3, 3, 1]))
        (array([0, 2, 5, 6]), 2)
        """
        cuts = self.cuts(falling)
        complete = len(cuts) - 2
        count = int(cuts[-1] - cuts[-2])
        if count > self.multiple and (over := count % self.multiple):
            cuts = np.insert(cuts, len(cuts) - 1, cuts[-1] - over)
        return cuts, complete


def stream_budget(
    cost: Literal["sum", "padded"] | CostFunction,
    limit: Number,
    most_items: int,
    multiple: int = 1,
    length_multiple: int = 1,
) -> StreamBudget:
    """Make a budget of the options of `bucketed_batching`, which see.

    Args:
        cost: ``"sum"``, ``"padded"`` or ``f(n, largest)``.
        limit: Largest cost of a batch.
        most_items: Largest number of samples in a batch.
        multiple: What the number of samples is a multiple of.
        length_multiple: The largest size is rounded up to a multiple of this, unless sizes are summed.

    >>> stream_budget("padded", 10, most_items=100, length_multiple=4).measure(2, 3, 6)
    8
    """
    limit = math.inf if limit >= UNLIMITED else limit  # nothing gets there, see `largest_size`
    if cost == "sum":
        return StreamBudget(
            limit, lambda _count, _largest, total: total, sum_cuts(limit, most_items, multiple), multiple
        )
    if callable(cost):
        function, capacity = cost, remembered_capacity(cost, limit, most_items, length_multiple)
    else:
        function, capacity = padded, PaddedCapacity(limit, length_multiple)
    limits = Limits(capacity=capacity, most_items=most_items, multiple=multiple)

    def cuts_by_count(falling: NDArray[Any]) -> NDArray[np.int64]:
        with np.errstate(over="ignore"):  # the count of a size of 1e-310 is infinite, which no limit minds
            return cut_descending(falling, limits)

    return StreamBudget(
        limit,
        lambda count, largest, _total: real_number(function(count, rounded(largest, length_multiple)), "cost"),
        cuts_by_count,
        multiple,
    )


def padded(count: int, largest: Number) -> Number:
    """Return the cost of samples that are padded to the largest."""
    return count * largest


def rounded(size: Number, multiple: int) -> Number:
    """Round a finite size up to a multiple.

    >>> rounded(5, 4), rounded(8, 4), rounded(2.5, 1)
    (8, 8, 2.5)
    """
    return size if multiple == 1 else math.ceil(size / multiple) * multiple


def largest_size(samples: int) -> int:
    """Return the largest size with which the sum over so many samples stays within 62 bits."""
    return UNLIMITED // samples


def sum_cuts(limit: Number, most_items: int, multiple: int) -> Cuts:
    """Return a function that cuts falling sizes by their sum."""

    def cuts(falling: NDArray[Any]) -> NDArray[np.int64]:
        units, budgets = whole_units(falling, (limit,))  # whole numbers, so that sums do not round
        return cut_descending(units, Limits(budgets=budgets, most_items=most_items, multiple=multiple))

    return cuts


def remembered_capacity(cost: CostFunction, limit: float, most: int, length_multiple: int) -> Capacity:
    """Return how many samples fit by a cost function; the same sizes come again and are looked up once."""

    @lru_cache(REMEMBERED)
    def count(largest: float) -> int:
        return max(1, largest_count(cost, limit, largest, most))

    return lambda sizes: np.array([count(largest) for largest in round_up(sizes, length_multiple).tolist()], np.int64)
