"""Next-fit bin packing and cutting sorted lists: batches of samples that are neighbours in a list. Pure."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.limits import Capacity, Limits

NOTHING_FITS = (
    "cost must not fall when the largest size grows, got more than max_total_size for one sample of a size up to "
    "{size}, and less for one of the largest size"
)
NEAR = 64  # samples beyond a batch's first place that are looked at first


def next_fit(sizes: NDArray[Any], limits: Limits, last: bool = True) -> NDArray[np.int64]:
    """Return where batches of sizes ``[n]`` or ``[n, k]`` begin, front to back, and where the last one ends.

    ``last`` says whether the order ends here; if not, a batch that is still open at the end is left out.

    >>> next_fit(np.array([2, 2, 3, 4, 1]), Limits(budgets=(5,))).tolist()
    [0, 2, 3, 5]
    """
    if not len(sizes):
        return np.zeros(1, np.int64)
    if limits.capacity is None and limits.plain and sizes.ndim == 1:
        return one_sum(sizes, limits.budgets[0], last)
    end_of = counted_end(sizes, limits.capacity) if limits.capacity else summed_end(sizes, limits.budgets)
    offsets, begin, length = [0], 0, len(sizes)
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
        offsets.append(end)
        begin = end
    return np.array(offsets, np.int64)


def one_sum(sizes: NDArray[Any], budget: int, last: bool) -> NDArray[np.int64]:
    """Pack by a single sum, where each batch takes one search."""
    total = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    running: memoryview[int] = total.data
    length = len(sizes)
    offsets, begin, reach = [0], 0, NEAR
    while begin < length:
        target = running[begin] + budget
        stop = begin + reach
        while stop < length and running[stop] <= target:
            stop += reach
        end = bisect_right(running, target, begin + 1, stop if stop < length else length + 1) - 1
        if end == length and not last:
            break
        offsets.append(end)
        reach = 2 * (end - begin)
        begin = end
    return np.array(offsets, np.int64)


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

    def allowed(begin: int, stop: int) -> NDArray[np.int64]:
        if sizes.ndim == 1:
            return np.minimum.accumulate(caps[begin:stop])
        return capacity(np.maximum.accumulate(sizes[begin:stop], axis=0))  # the largest of each column

    def end(begin: int) -> int:
        # The first sample bounds the count; a larger one further on lowers it. Mostly that is near: look there first.
        stop, near = min(length, begin + int(caps[begin])), NEAR
        while True:
            counts = allowed(begin, min(stop, begin + near))
            over = counts < np.arange(1, len(counts) + 1)
            if over.any():
                return begin + int(over.argmax())
            if begin + near >= stop:
                return stop
            near *= 4

    return end


def cut_descending(descending: NDArray[Any], limits: Limits) -> NDArray[np.int64]:
    """Cut sizes, largest first, into batches: the largest of each sets how many it holds; returned as by `next_fit`.

    >>> from headrace.size_aware_batching.planning.costs import PaddedCapacity
    >>> cut_descending(np.array([50, 40, 20, 10, 10]), Limits(capacity=PaddedCapacity(100))).tolist()
    [0, 2, 5]
    """
    if limits.capacity is None:
        return next_fit(descending, limits)
    return cut_by_counts(largest_counts(descending, limits.capacity, limits), limits)


def largest_counts(sizes: NDArray[Any], capacity: Capacity, limits: Limits) -> NDArray[np.int64]:
    """Return how many samples fit where each is the largest."""
    counts = np.minimum(capacity(sizes), limits.most_items)
    if len(counts) and counts.min() < 1:
        raise ValueError(NOTHING_FITS.format(size=sizes[int(counts.argmin())]))
    return counts


def cut_by_counts(counts: NDArray[np.int64], limits: Limits) -> NDArray[np.int64]:
    """Cut a list into batches, each of as many samples as its first allows.

    >>> cut_by_counts(np.array([2, 2, 3, 3, 3]), Limits()).tolist()
    [0, 2, 5]
    """
    caps = counts.tolist()
    offsets, begin, length = [0], 0, len(caps)
    while begin < length:
        begin = min(length, begin + limits.floor(caps[begin]))
        offsets.append(begin)
    return np.array(offsets, np.int64)
