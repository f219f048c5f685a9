"""What a batch may hold, by sum or by count, and next-fit: batches of samples that are neighbours in a list. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, Number, real_number
from headrace.size_aware_batching.planning.packing import martello_toth

NOTHING_FITS = (
    "cost must not fall when the largest size grows, got more than max_total_size for one sample of a size up to "
    "{size}, and less for one of the largest size"
)
NEAR = 64  # samples beyond a batch's first place that are looked at first


@dataclass(frozen=True)
class Limits(ABC):
    """What a batch may hold; a class for each way in which sizes fill it.

    ``budgets`` are the largest sums, one for each column of sizes; none where a batch is limited by its count. A batch
    has up to ``most_items`` samples, and of more than ``multiple`` a multiple of it. ``quadratic`` is the weight of a
    size's square when batches are compared by their time, as in attention.
    """

    budgets: tuple[int, ...] = ()
    most_items: int = UNLIMITED
    multiple: int = 1
    quadratic: float = 0.0

    @abstractmethod
    def end_of(self, sizes: NDArray[Any]) -> Callable[[int], int]:
        """Return a function from a batch's first place to one past the last that fits."""

    @abstractmethod
    def cut(self, descending: NDArray[Any]) -> NDArray[np.int64]:
        """Cut sizes, largest first, into batches as large as may be; returned as by `next_fit`."""

    @abstractmethod
    def volume(self, sizes: NDArray[Any]) -> float:
        """Return how many batches the sizes fill, whichever share a batch."""

    def fewest(self, sizes: NDArray[Any]) -> int:
        """Return a number of batches that no plan goes below."""
        return math.ceil(self.volume(sizes) - 1e-6)

    def work(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Return the time that samples take, in units of their size."""
        exact = sizes.astype(np.float64)
        return exact + self.quadratic * exact**2

    def with_counts(self, columns: NDArray[Any], n_samples: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return columns of sizes and their budgets; where a batch cannot hold n samples, the count is one more column.

        >>> columns, budgets = SumLimits((9,), most_items=2).with_counts(np.array([[4], [5], [6]]), 3)
        >>> columns.tolist(), budgets.tolist()
        ([[4, 1], [5, 1], [6, 1]], [9, 2])
        """
        budgets = np.array(self.budgets, np.int64)
        if self.most_items >= n_samples:
            return columns, budgets
        ones = np.ones((len(columns), 1), np.int64)
        return np.concatenate([columns, ones], axis=1), np.append(budgets, self.most_items)

    def floor(self, count: int) -> int:
        """Return the largest number of samples up to ``count`` that ``multiple`` allows."""
        return count - count % self.multiple if count > self.multiple else count

    def next_fit(self, sizes: NDArray[Any], last: bool = True) -> NDArray[np.int64]:
        """Return where batches of sizes ``[n]`` or ``[n, k]`` begin, front to back, and where the last one ends.

        ``last`` says whether the order ends here; if not, a batch that is still open at the end is left out.

        >>> SumLimits((5,)).next_fit(np.array([2, 2, 3, 4, 1])).tolist()
        [0, 2, 3, 5]
        """
        if not len(sizes):
            return np.zeros(1, np.int64)
        end_of = self.end_of(sizes)
        offsets, begin, length = [0], 0, len(sizes)
        while begin < length:
            end = min(end_of(begin), begin + self.most_items)
            if end >= length:
                if not last:
                    break
                end = length
            else:
                end = begin + self.floor(end - begin)
            if end <= begin:
                raise ValueError(NOTHING_FITS.format(size=sizes[begin]))
            offsets.append(end)
            begin = end
        return np.array(offsets, np.int64)

    def cut_by_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Cut a list into batches, each of as many samples as its first allows.

        >>> SumLimits().cut_by_counts(np.array([2, 2, 3, 3, 3])).tolist()
        [0, 2, 5]
        """
        caps = counts.tolist()
        offsets, begin, length = [0], 0, len(caps)
        while begin < length:
            begin = min(length, begin + self.floor(caps[begin]))
            offsets.append(begin)
        return np.array(offsets, np.int64)


@dataclass(frozen=True)
class SumLimits(Limits):
    """Sums of sizes are limited, in each column by its budget."""

    def next_fit(self, sizes: NDArray[Any], last: bool = True) -> NDArray[np.int64]:
        """Return the same, faster where a single sum is all that limits a batch."""
        plain = sizes.ndim == 1 and self.most_items == UNLIMITED and self.multiple == 1
        return one_sum(sizes, self.budgets[0], last) if plain and len(sizes) else super().next_fit(sizes, last)

    def cut(self, descending: NDArray[Any]) -> NDArray[np.int64]:
        """Cut by next-fit."""
        return self.next_fit(descending)

    def volume(self, sizes: NDArray[Any]) -> float:
        """Return the largest sum over its budget, or the number of samples over that of a batch."""
        totals = np.atleast_1d(sizes.sum(axis=0, dtype=np.float64))
        filled = float((totals / np.maximum(self.budgets, 1)).max())
        return max(filled, len(sizes) / self.most_items)

    def fewest(self, sizes: NDArray[Any]) -> int:
        """Return the bound by volume, counts and L2 of each column."""
        columns = zip(np.atleast_2d(sizes.T), self.budgets, strict=True)
        return max(-(-len(sizes) // self.most_items), *(martello_toth(column, budget) for column, budget in columns))

    def end_of(self, sizes: NDArray[Any]) -> Callable[[int], int]:
        """Return a function from a batch's first place to one past the last that fits all sums."""
        sums: list[memoryview[int]] = [np.cumsum(column, dtype=np.int64).data for column in np.atleast_2d(sizes.T)]
        length = len(sizes)

        def end(begin: int) -> int:
            nearest = length
            for running, budget in zip(sums, self.budgets, strict=True):
                target = (running[begin - 1] if begin else 0) + budget
                near = begin + NEAR
                while near < nearest and running[near] <= target:
                    near = begin + 2 * (near - begin)
                nearest = bisect_right(running, target, begin, min(near, nearest))
            return nearest

        return end


@dataclass(frozen=True)
class Capacity:
    """How many samples fit into a batch by the largest of them.

    Args:
        count: Function from largest sizes to counts.
        asked: Largest count that ``count`` tries: a count equal to it means "at least".
        least: Count of a sample that does not fit by itself.
    """

    count: Callable[[NDArray[Any]], NDArray[np.int64]]
    asked: int = UNLIMITED
    least: int = 0

    def counts(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return how many samples fit where each is the largest; sizes ``[n]`` or ``[n, k]``."""
        return np.maximum(self.count(sizes), self.least)


@dataclass(frozen=True)
class CountLimits(Limits):
    """The largest sample says how many fit, by a ``capacity``."""

    capacity: Capacity = field(kw_only=True)

    def counts(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return how many samples a batch may have where each is the largest; refuse one that does not fit."""
        counts = np.minimum(self.capacity.counts(sizes), self.most_items)
        if len(counts) and counts.min() < 1:
            raise ValueError(NOTHING_FITS.format(size=sizes[int(counts.argmin())]))
        return counts

    def with_each(self) -> CountLimits:
        """Return the limits where each sample fits at least by itself."""
        return replace(self, capacity=replace(self.capacity, least=1))

    def cut(self, descending: NDArray[Any]) -> NDArray[np.int64]:
        """Cut sizes, largest first, into batches as large as may be: the largest of each says how many it holds.

        >>> from headrace.size_aware_batching.planning.costs import PaddedCost
        >>> PaddedCost().prepare(np.array([50]), 100)[1].cut(np.array([50, 40, 20, 10, 10])).tolist()
        [0, 2, 5]
        """
        return self.cut_by_counts(self.counts(descending))

    def volume(self, sizes: NDArray[Any]) -> float:
        """Return the sum of the shares that samples take of the largest batch that may hold them."""
        return float((1 / np.clip(self.capacity.counts(sizes), 1, self.most_items)).sum())

    def end_of(self, sizes: NDArray[Any]) -> Callable[[int], int]:
        """Return a function from a batch's first place to one past the last that fits the count of its largest."""
        caps = self.capacity.counts(sizes)
        length = len(sizes)

        def allowed(begin: int, stop: int) -> NDArray[np.int64]:
            if sizes.ndim == 1:
                return np.minimum.accumulate(caps[begin:stop])
            return self.capacity.counts(np.maximum.accumulate(sizes[begin:stop], axis=0))  # the largest of each column

        def end(begin: int) -> int:
            # The first sample bounds the count; a larger one further on lowers it. Mostly that is near: look there.
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


Budget = int | float | list[int | float]


def checked_budget(max_total_size: object) -> Number:
    """Return a budget as a number greater than 0; infinity means that everything fits.

    >>> checked_budget(4096)
    4096
    """
    number = real_number(max_total_size, "max_total_size")
    if number <= 0:
        raise ValueError(
            f"max_total_size must be greater than 0, got {number}: where nothing limits a batch give math.inf"
        )
    if UNLIMITED <= number < math.inf:
        raise ValueError(
            f"max_total_size must be less than 2**62, or math.inf for no limit, got {number}: count sizes and budget "
            "in a larger unit"
        )
    return number


def plain_budget(max_total_size: Any) -> Budget:
    """Return a budget, or a list of them, as plain numbers."""
    given = max_total_size
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    numbers: list[int | float] = [checked_budget(budget) for budget in (given if several else [given])]
    return numbers if several else numbers[0]


def budgets_of(budget: Budget, sizes: NDArray[Any]) -> tuple[float, ...]:
    """Return one budget a column of sizes."""
    columns = 1 if sizes.ndim == 1 else sizes.shape[1]
    given = budget if isinstance(budget, list) else [budget]
    if len(given) != columns or not columns:
        raise ValueError(
            f"max_total_size must have one budget for each column of sizes, got {len(given)} for shape {sizes.shape}"
        )
    return tuple(given)
