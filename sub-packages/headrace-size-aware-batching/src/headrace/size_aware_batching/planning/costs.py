"""What a batch costs, and how many samples fit by that; the work by which steps are balanced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, shown
from headrace.size_aware_batching.planning.limits import Capacity, Limits
from headrace.size_aware_batching.planning.units import round_up

CostFunction = Callable[[int, Any], float]  # of the count and the largest size, a vector where there are several
PROBES = 256


@dataclass(frozen=True)
class PaddedCapacity:
    """How many samples fit when each is padded to the largest: n * largest <= budget."""

    budget: float
    length_multiple: int = 1

    def __call__(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the count for each size as the largest.

        >>> PaddedCapacity(100)(np.array([30, 50, 101])).tolist()
        [3, 2, 0]
        """
        if self.budget >= UNLIMITED:
            return np.full(len(sizes), UNLIMITED, np.int64)
        longest = round_up(sizes, self.length_multiple)
        with np.errstate(divide="ignore", over="ignore"):
            counts = np.minimum(np.floor(self.budget / longest), UNLIMITED).astype(np.int64)
        counts -= counts * longest > self.budget  # a quotient that was rounded up
        return np.where(longest == 0, UNLIMITED, counts)


def looked_up(ascending: NDArray[np.float64], counts: NDArray[np.int64], sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the counts of sizes that are all in a table."""
    found: NDArray[np.int64] = counts[np.searchsorted(ascending, sizes)]
    return found


def padded_columns(
    sizes: NDArray[Any], budgets: tuple[float, ...], length_multiple: int
) -> tuple[NDArray[np.float64], Capacity]:
    """Reduce padded columns to one: the largest share of a budget that a sample takes, and how many fit by that.

    Exact, since the smallest count of a batch decides.

    >>> shares, capacity = padded_columns(np.array([[30, 10], [10, 30]]), (100, 60), 1)
    >>> shares.tolist(), capacity(shares).tolist()
    ([0.3, 0.5], [3, 2])
    """
    columns = list(zip(sizes.T, budgets, strict=True))
    counts = np.minimum.reduce([PaddedCapacity(budget, length_multiple)(column) for column, budget in columns])
    shares = np.maximum.reduce([round_up(column, length_multiple) / budget for column, budget in columns])
    distinct, inverse = np.unique(shares, return_inverse=True)
    table = np.full(len(distinct), UNLIMITED, np.int64)
    np.minimum.at(table, inverse.reshape(-1), counts)
    return shares, partial(looked_up, distinct, np.minimum.accumulate(table))


@dataclass(frozen=True)
class FunctionCapacity:
    """How many samples fit by a cost function, at most ``most``; found once for each distinct largest size.

    ``remembered``: how many of these counts are kept at most, about. ``several``: the cost takes a vector of sizes.
    """

    cost: CostFunction
    budget: float
    most: int
    length_multiple: int = 1
    remembered: int = UNLIMITED
    several: bool = False
    _known: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the count for each size as the largest; shape ``[n]`` for sizes ``[n]`` or ``[n, k]``."""
        if len(self._known) > self.remembered:
            self._known.clear()
        rounded = round_up(sizes[:, None] if self.several and sizes.ndim == 1 else sizes, self.length_multiple)
        distinct, inverse = np.unique(rounded, axis=0 if self.several else None, return_inverse=True)
        table = np.zeros(len(distinct), np.int64)
        high = min(self.most, UNLIMITED)
        for place, largest in enumerate(distinct.tolist()):
            key = tuple(largest) if self.several else largest
            if key not in self._known:
                self._known[key] = largest_count(
                    self.cost, self.budget, np.array(largest) if self.several else largest, high
                )
            table[place] = self._known[key]
            if not self.several:
                high = self._known[key]  # a larger size allows no more
        return table[inverse.reshape(-1)]


def at_least_one(capacity: Capacity, sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the counts of a capacity, 1 or more: every sample may have a batch of its own."""
    return np.maximum(capacity(sizes), 1)


def refuse_decreasing(cost: CostFunction, smallest: Any, largest: Any, most: int) -> None:
    """Refuse a cost function that decreases somewhere on a few probes."""
    counts = [2**power for power in range(12) if 2**power <= most]
    sizes = (smallest, largest)
    found = {(count, end): checked_cost(cost, count, sizes[end]) for end in (0, 1) for count in counts}
    pairs = [((a, end), (b, end)) for end in (0, 1) for a, b in pairwise(counts)]
    pairs += [((count, 0), (count, 1)) for count in counts]
    for less, more in pairs:
        if found[more] < found[less]:
            raise ValueError(
                "cost must not fall when the number of samples or the largest size grows, got "
                f"f({less[0]}, {sizes[less[1]]}) = {found[less]} and f({more[0]}, {sizes[more[1]]}) = {found[more]}"
            )


def largest_count(cost: CostFunction, budget: float, largest: Any, most: int) -> int:
    """Return the largest n up to ``most`` with ``cost(n, largest) <= budget``, 0 if there is none."""
    low, step = 0, 1
    while low + step <= most and checked_cost(cost, low + step, largest) <= budget:
        low, step = low + step, 2 * step
    while step := step // 2:
        if low + step <= most and checked_cost(cost, low + step, largest) <= budget:
            low += step
    return low


def checked_cost(cost: CostFunction, count: int, largest: Any) -> float:
    """Return the value of a cost function; refuse one that is not a number."""
    found = cost(count, largest)
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise TypeError(f"cost must return a number, got {shown(found)} for f({count}, {largest})") from None
    if value != value:
        raise ValueError(f"cost must return a number, got NaN for f({count}, {largest})")
    return value


Work = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


def work_function(sizes: NDArray[Any], limits: Limits, own: NDArray[np.float64] | None) -> Work:
    """Return a function to the work of batches: by each sample's ``own``, or its size, in the planner's order."""
    if own is not None:
        return lambda places, offsets: np.add.reduceat(own[places], offsets[:-1], axis=1)
    if sizes.ndim > 1 and limits.capacity is not None:
        scale = np.maximum(sizes.max(axis=0, initial=0), 1)

        def padded_columns(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
            longest = np.maximum.reduceat(sizes[places], offsets[:-1], axis=1)
            return np.asarray(np.diff(offsets) * (longest / scale).sum(axis=2))

        return padded_columns
    if sizes.ndim > 1:
        shares = sample_work(sizes, limits, None).astype(np.float32)
        return lambda places, offsets: np.add.reduceat(shares[places], offsets[:-1], axis=1, dtype=np.float64)
    if limits.capacity is None:
        return lambda places, offsets: np.add.reduceat(limits.work(sizes[places]), offsets[:-1], axis=1)

    def padded(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        longest = np.maximum.reduceat(sizes[places], offsets[:-1], axis=1)
        return np.diff(offsets) * limits.work(longest)

    return padded


def sample_work(sizes: NDArray[Any], limits: Limits, own: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the work of each sample by itself."""
    if own is not None:
        return own
    return limits.work(sizes) if sizes.ndim == 1 else (sizes / np.maximum(limits.budgets, 1)).sum(axis=1)


def cost_part(cost: str | CostFunction, sizes: NDArray[Any], capacity: Capacity | None) -> Any:
    """Return what stands for a cost in a fingerprint: for a function, the counts that it allows at some sizes."""
    if not callable(cost) or capacity is None or not len(sizes):
        return "function" if callable(cost) else cost
    return capacity(np.linspace(sizes.min(axis=0), sizes.max(axis=0), PROBES).astype(sizes.dtype))
