"""Batches in the given order: a batch ends where the next sample would not fit (next-fit)."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Capacity, Limits

NOTHING_FITS = (
    "cost: f(1, {size}) exceeds max_total_size, but f(1, n) of the largest size does not; f(n, largest) must not fall "
    "when the largest size grows"
)
NEAR = 64  # samples beyond a batch's first place that are looked at first


def next_fit(sizes: NDArray[Any], limits: Limits, last: bool = True) -> NDArray[np.int64]:
    """Cut a list of sizes into batches, front to back.

    Args:
        sizes: Sizes in order, shape ``[n]`` or, for several budgets, ``[n, k]``; each fits a batch of its own.
        limits: The budgets.
        last: Whether the order ends here. If not, a batch that is still open at the end is left out.

    Returns:
        Where each batch begins and, last, where the last one ends; shape ``[batches + 1]``, beginning with 0.

    >>> next_fit(np.array([2, 2, 3, 4, 1]), Limits(budgets=(5,))).tolist()
    [0, 2, 3, 5]
    """
    if not len(sizes):
        return np.zeros(1, np.int64)
    if limits.capacity is None and limits.plain and sizes.ndim == 1:
        return one_sum(sizes, limits.budgets[0], last)
    end_of = counted_end(sizes, limits.capacity) if limits.capacity else summed_end(sizes, limits.budgets)
    cuts, begin, length = [0], 0, len(sizes)
    while begin < length:
        end = min(end_of(begin), begin + limits.most_items)
        if end >= length:
            if not last:
                break
            end = length
        else:
            end = begin + limits.floor(end - begin)
        if end <= begin:
            raise ValueError(NOTHING_FITS.format(size=sizes[begin]))
        cuts.append(end)
        begin = end
    return np.array(cuts, np.int64)


def one_sum(sizes: NDArray[Any], budget: int, last: bool) -> NDArray[np.int64]:
    """Do the same for one sum alone, with nothing in the loop but one search for each batch."""
    total = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    running: memoryview[int] = total.data
    length = len(sizes)
    cuts, begin, reach = [0], 0, NEAR
    while begin < length:
        target = running[begin] + budget
        stop = begin + reach
        while stop < length and running[stop] <= target:
            stop += reach
        end = bisect_right(running, target, begin + 1, stop if stop < length else length + 1) - 1
        if end == length and not last:
            break
        cuts.append(end)
        reach = 2 * (end - begin)
        begin = end
    return np.array(cuts, np.int64)


def summed_end(sizes: NDArray[Any], budgets: tuple[int, ...]) -> Callable[[int], int]:
    """Return a function from a batch's first place to one past the last that fits all sums."""
    columns = sizes[:, None].T if sizes.ndim == 1 else sizes.T
    sums: list[memoryview[int]] = [np.cumsum(column, dtype=np.int64).data for column in columns]
    length = len(sizes)

    def end(begin: int) -> int:
        nearest = length
        for running, budget in zip(sums, budgets, strict=True):
            target = (running[begin - 1] if begin else 0) + budget
            near = begin + NEAR
            while near < nearest and running[near] <= target:
                near = begin + 2 * (near - begin)
            nearest = bisect_right(running, target, begin, min(near, nearest))
        return nearest

    return end


def counted_end(sizes: NDArray[Any], capacity: Capacity) -> Callable[[int], int]:
    """Return a function from a batch's first place to one past the last that fits the count of its largest."""
    caps = capacity(sizes)
    length = len(sizes)

    def end(begin: int) -> int:
        # The first sample bounds the count; a larger one further on lowers it. Mostly that is near: look there first.
        stop, near = min(length, begin + int(caps[begin])), NEAR
        while True:
            allowed = np.minimum.accumulate(caps[begin : min(stop, begin + near)])
            over = allowed < np.arange(1, len(allowed) + 1)
            if over.any():
                return begin + int(over.argmax())
            if begin + near >= stop:
                return stop
            near *= 4

    return end
