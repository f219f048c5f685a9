"""What a batch costs and how much it may cost: sums against budgets, or a count that depends on the largest."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Capacity = Callable[[NDArray[Any]], NDArray[np.int64]]
CostFunction = Callable[[int, float], float]
UNLIMITED = 2**62


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    Args:
        budgets: Largest sum of the sizes, one entry for each column of sizes. Not used with ``capacity``.
        capacity: For costs that depend on the count and the largest sample: maps sizes to the number of samples
            that a batch may hold when its largest has that size. None for sums.
        most_items: Largest number of samples.
        multiple: The number of samples is a multiple of this where the batch holds more than that many.
        quadratic: What the square of a size weighs beside the size itself when batches are compared by the time
            they take, as in attention.
    """

    budgets: tuple[int, ...] = ()
    capacity: Capacity | None = None
    most_items: int = UNLIMITED
    multiple: int = 1
    quadratic: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing but budgets limits a batch."""
        return self.most_items == UNLIMITED and self.multiple == 1

    def work(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Return the time that samples take, in units of their size."""
        exact = sizes.astype(np.float64)
        return exact + self.quadratic * exact**2

    def floor(self, count: int) -> int:
        """Return the largest number of samples up to ``count`` that ``multiple`` allows."""
        return count - count % self.multiple if count > self.multiple else count


@dataclass(frozen=True)
class PaddedCapacity:
    """How many samples fit when each is padded to the largest: n * largest <= budget.

    Args:
        budget: In the unit of the sizes.
        length_multiple: The largest size is rounded up to a multiple of this, for static shapes.
    """

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


@dataclass(frozen=True)
class FunctionCapacity:
    """How many samples fit by a cost function, as a table over the distinct sizes.

    Args:
        cost: ``cost(n, largest)``; must not fall when either grows.
        budget: Largest cost of a batch, in the unit of ``cost``.
        most: Largest number of samples that is looked for.
        length_multiple: The largest size is rounded up to a multiple of this.
    """

    cost: CostFunction
    budget: float
    most: int
    length_multiple: int = 1

    def __call__(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the count for each size as the largest.

        Raises:
            TypeError: If the function gives what is no number.
            ValueError: If it gives NaN.
        """
        distinct, inverse = np.unique(round_up(sizes, self.length_multiple), return_inverse=True)
        table = np.zeros(len(distinct), np.int64)
        high = min(self.most, UNLIMITED)
        if len(distinct):
            refuse_falling(self.cost, distinct[0].item(), distinct[-1].item(), high)
        for place, largest in enumerate(distinct.tolist()):
            high = largest_count(self.cost, self.budget, largest, high)
            table[place] = high
        return table[inverse]


@dataclass(frozen=True)
class AtLeastOne:
    """Lets every sample have a batch of its own."""

    capacity: Capacity

    def __call__(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return the count for each size as the largest, 1 or more."""
        return np.maximum(self.capacity(sizes), 1)


def refuse_falling(cost: CostFunction, smallest: float, largest: float, most: int) -> None:
    """Refuse a cost function that falls somewhere on a few probes.

    Raises:
        ValueError: If a batch gets cheaper by a further sample or by a larger one.
    """
    counts = [2**power for power in range(12) if 2**power <= most]
    probes = [(count, size) for size in (smallest, largest) for count in counts]
    found = {probe: checked_cost(cost, *probe) for probe in probes}
    pairs = [((a, size), (b, size)) for size in (smallest, largest) for a, b in pairwise(counts)]
    pairs += [((count, smallest), (count, largest)) for count in counts]
    for less, more in pairs:
        if found[more] < found[less]:
            raise ValueError(
                f"cost: f{less} gave {found[less]}, but f{more} less, {found[more]}; f(n, largest) must not fall when "
                "the number of samples or the largest size grows"
            )


def largest_count(cost: CostFunction, budget: float, largest: float, most: int) -> int:
    """Return the largest n up to ``most`` with ``cost(n, largest) <= budget``, 0 if there is none."""
    low, step = 0, 1
    while low + step <= most and checked_cost(cost, low + step, largest) <= budget:
        low, step = low + step, 2 * step
    while step := step // 2:
        if low + step <= most and checked_cost(cost, low + step, largest) <= budget:
            low += step
    return low


def checked_cost(cost: CostFunction, count: int, largest: float) -> float:
    """Return what a cost function gives, and refuse what is no cost."""
    found = cost(count, largest)
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise TypeError(f"cost: f({count}, {largest}) gave {found!r}, expected a number") from None
    if value != value:
        raise ValueError(f"cost: f({count}, {largest}) gave NaN, expected a number")
    return value


def round_up(sizes: NDArray[Any], multiple: int) -> NDArray[Any]:
    """Round sizes up to a multiple."""
    rounded: NDArray[Any] = sizes if multiple == 1 else np.ceil(sizes / multiple).astype(np.int64) * multiple
    return rounded
