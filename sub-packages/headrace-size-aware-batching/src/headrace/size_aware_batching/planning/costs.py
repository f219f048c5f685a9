"""Costs: what a batch costs, how many samples fit by that, and the work by which steps are balanced.

Each kind of cost is one class here; a plan asks none which kind it is, a report does. `as_cost` makes them from
what users give.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._validation import UNLIMITED, Number, one_of, real_number
from headrace.size_aware_batching.planning.limits import Budget, Capacity, CountLimits, Limits, SumLimits, budgets_of
from headrace.size_aware_batching.planning.units import round_up, whole_limits, whole_units
from headrace.size_aware_batching.sizes.read import any_column

CostFunction = Callable[[int, Any], float]  # of the count and the largest size, a vector where there are several
Work = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]  # of places in a list, and offsets
Streamed = Callable[[NDArray[Any]], tuple[NDArray[Any], Limits]]  # descending sizes -> sizes and limits to cut them by

PROBES = 256  # sizes at which a function's counts stand for it in a fingerprint
FURTHEST = 2**20  # samples of a batch that a function is asked for, where max_items says no less
REMEMBERED = 2**16  # distinct sizes whose count is kept for a stream, which may bring any number of them
# Steps are balanced by their time, which is taken to be size + size**2 / turning for a sample, as of attention. The
# turning size, where both parts are equal, is an assumption: the largest of 8 equal samples that fill a budget. Where
# the budget is in no unit of sizes, or infinite, it is the largest size.
LARGEST_IN_A_BUDGET = 8


class Cost(ABC):
    """The cost of a batch.

    A class says how sizes and budgets become limits to plan by (`prepare` for all sizes at once, `streamed` for sizes
    that come while a stream is read), what batches cost (`of`, `measure`), and how long they take (`work`).
    """

    name: ClassVar[str]  # in reports
    strategies: ClassVar[tuple[str, ...]]  # that can plan by it, the usual one first
    pads: ClassVar[bool]  # whether a batch is as long as its longest sample

    @abstractmethod
    def prepare(
        self, sizes: NDArray[Any], budget: Budget, max_items: int | None = None, largest: int | None = None, /
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return the sizes in the unit of the limits, the limits, and the samples that exceed them by themselves.

        ``largest`` is the largest size, where it is known.
        """

    @abstractmethod
    def of(self, sizes: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what batches cost, shape ``[batches, budgets]``; sizes ``[n]`` or ``[n, k]``, batch by batch."""

    @abstractmethod
    def measure(self, count: int, largest: Number, total: Number, /) -> Number:
        """Return what one batch costs by its count, its largest size and the sum of its sizes."""

    @abstractmethod
    def streamed(self, limit: Number, most_items: int, multiple: int = 1) -> Streamed:
        """Return a function from descending sizes of a stream to what they are cut by."""

    @abstractmethod
    def work(self, sizes: NDArray[Any], limits: Limits) -> Work:
        """Return a function to the work of batches of places in a list of prepared sizes."""

    @abstractmethod
    def sample_work(self, sizes: NDArray[Any], limits: Limits) -> NDArray[np.float64]:
        """Return the work of each sample by itself."""

    def digest(self, _sizes: NDArray[Any], _budget: Budget, _max_items: int | None, /) -> Any:
        """Return what stands for the cost in a fingerprint."""
        return self.name

    def cure(self, _over: NDArray[Any], /) -> str:
        """Return what helps where samples of these sizes exceed a budget by themselves."""
        return "raise the budget"


@dataclass(frozen=True)
class SumCost(Cost):
    """The sum of the sizes, in each column against its own budget."""

    name = "sum"
    strategies = ("stratified", "packed", "bucketed", "sequential")
    pads = False

    def prepare(
        self,
        sizes: NDArray[Any],
        budget: Budget,
        _max_items: int | None = None,
        largest: int | None = None,
        /,
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return whole units, whose sums are exact, and the budgets in them."""
        given = budgets_of(budget, sizes)
        table, budgets = whole_units(sizes, given, largest)
        most = whole_limits(sizes, given)
        over = np.zeros(0, np.int64)
        if largest is None or largest > most[0]:
            over = np.flatnonzero(any_column(sizes > most))
        if table is not sizes or len(over):
            # What fits a batch of its own does so in rounded units, too; what does not is left out, or clipped to fit.
            table = np.minimum(table.astype(np.int64), budgets if table.ndim == 2 else budgets[0])
        return table, SumLimits(budgets, quadratic=quadratic(budgets[0] / LARGEST_IN_A_BUDGET)), over

    def of(self, sizes: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the sums."""
        return reduced(np.add, columns_of(sizes), offsets)

    def measure(self, _count: int, _largest: Number, total: Number, /) -> Number:
        """Return the sum."""
        return total

    def streamed(self, limit: Number, most_items: int, multiple: int = 1) -> Streamed:
        """Return a function to whole units and the limit in them."""

        def prepared(descending: NDArray[Any]) -> tuple[NDArray[Any], Limits]:
            units, budgets = whole_units(descending, (limit,))
            return units, SumLimits(budgets, most_items, multiple)

        return prepared

    def work(self, sizes: NDArray[Any], limits: Limits) -> Work:
        """Return a function to the sum of the samples' work."""
        if sizes.ndim == 1:
            return lambda places, offsets: np.add.reduceat(limits.work(sizes[places]), offsets[:-1], axis=1)
        shares = self.sample_work(sizes, limits).astype(np.float32)
        return lambda places, offsets: np.add.reduceat(shares[places], offsets[:-1], axis=1, dtype=np.float64)

    def sample_work(self, sizes: NDArray[Any], limits: Limits) -> NDArray[np.float64]:
        """Return the time of each sample, or the shares of the budgets that its sizes take together."""
        return limits.work(sizes) if sizes.ndim == 1 else (sizes / np.maximum(limits.budgets, 1)).sum(axis=1)


@dataclass(frozen=True)
class CountedCost(Cost):
    """A cost of the count and the largest size, which is rounded up to a multiple: so the largest says how many fit."""

    length_multiple: int = 1

    strategies = ("bucketed", "sequential")
    pads = True

    @abstractmethod
    def counted(self, counts: NDArray[np.int64], longest: NDArray[Any]) -> NDArray[np.float64]:
        """Return the costs of batches by count and rounded largest sizes, ``[batches]`` or ``[batches, k]``."""

    def one(self, count: int, largest: Any) -> float:
        """Return the cost of one batch by count and rounded largest size, or sizes."""
        return float(self.counted(np.array([count]), np.array([largest]))[0])

    def capacity(
        self, budget: float, max_items: int | None, several: bool = False, remembered: int = UNLIMITED, /
    ) -> Capacity:
        """Return how many samples fit by their largest; ``several``: a sample has a vector of sizes."""
        asked = max_items or FURTHEST
        return Capacity(CountsByFunction(self.one, budget, asked, self.length_multiple, remembered, several), asked)

    def prepare(
        self, sizes: NDArray[Any], budget: Budget, max_items: int | None = None, largest: int | None = None, /
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return the sizes, and how many samples fit one budget."""
        capacity = self.capacity(one_budget(budget), max_items, sizes.ndim > 1)
        limits = CountLimits(quadratic=quadratic(float(sizes.max(initial=1))), capacity=capacity)
        return sizes, limits, not_fitting(sizes, capacity, largest)

    def measure(self, count: int, largest: Number, _total: Number, /) -> Number:
        """Return the cost by count and largest size."""
        return self.one(count, round_up(largest, self.length_multiple))

    def of(self, sizes: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the costs by count and largest size."""
        longest = round_up(reduced(np.maximum, sizes, offsets), self.length_multiple)
        return columns_of(self.counted(np.diff(offsets), longest))

    def streamed(self, limit: Number, most_items: int, multiple: int = 1) -> Streamed:
        """Return a function to the sizes themselves, and limits that remember what they counted."""
        capacity = self.capacity(limit, most_items, False, REMEMBERED)
        limits = CountLimits(most_items=most_items, multiple=multiple, capacity=capacity).with_each()
        return lambda descending: (descending, limits)

    def work(self, sizes: NDArray[Any], limits: Limits) -> Work:
        """Return a function to the count times the work of the largest, in all columns together."""
        scale = np.maximum(sizes.max(axis=0, initial=0), 1) if sizes.ndim > 1 else None

        def padded(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
            longest = np.maximum.reduceat(sizes[places], offsets[:-1], axis=1)
            each = limits.work(longest) if scale is None else (longest / scale).sum(axis=2)
            return np.asarray(np.diff(offsets) * each)

        return padded

    def sample_work(self, sizes: NDArray[Any], limits: Limits) -> NDArray[np.float64]:
        """Return the time of each sample by itself; sizes ``[n]``."""
        return limits.work(sizes)


@dataclass(frozen=True)
class PaddedCost(CountedCost):
    """The count times the largest size, in each column against its own budget."""

    name = "padded"

    def prepare(
        self,
        sizes: NDArray[Any],
        budget: Budget,
        _max_items: int | None = None,
        largest: int | None = None,
        /,
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return the sizes, several columns reduced to one, and how many samples fit."""
        budgets = budgets_of(budget, sizes)
        turning = budgets[0] / LARGEST_IN_A_BUDGET if math.isfinite(budgets[0]) else float(sizes.max(initial=1))
        capacity = self.capacity(budgets[0], None)
        if sizes.ndim > 1:
            sizes, capacity = padded_columns(sizes, budgets, self.length_multiple)
        limits = CountLimits(quadratic=quadratic(turning), capacity=capacity)
        return sizes, limits, not_fitting(sizes, capacity, largest)

    def capacity(
        self,
        budget: float,
        _max_items: int | None,
        _several: bool = False,
        _remembered: int = UNLIMITED,
        /,
    ) -> Capacity:
        """Return the quotient of budget and size."""
        return Capacity(partial(padded_counts, budget, self.length_multiple))

    def counted(self, counts: NDArray[np.int64], longest: NDArray[Any]) -> NDArray[np.float64]:
        """Return the products."""
        return np.asarray(counts * longest if longest.ndim == 1 else counts[:, None] * longest, np.float64)

    def measure(self, count: int, largest: Number, _total: Number, /) -> Number:
        """Return the product."""
        product: Number = count * round_up(largest, self.length_multiple)
        return product


@dataclass(frozen=True)
class FunctionCost(CountedCost):
    """A user's function of the count and the largest size, against one budget in any unit."""

    function: CostFunction = field(kw_only=True)

    name = "function"

    def prepare(
        self,
        sizes: NDArray[Any],
        budget: Budget,
        max_items: int | None = None,
        _largest: int | None = None,
        /,
    ) -> tuple[NDArray[Any], Limits, NDArray[np.int64]]:
        """Return the sizes and how many samples fit; refuse a function that decreases."""
        most, several = max_items or FURTHEST, sizes.ndim > 1
        if len(sizes):
            smallest, longest = (round_up(end, self.length_multiple) for end in (sizes.min(axis=0), sizes.max(axis=0)))
            ends = (smallest, longest) if several else (smallest.item(), longest.item())
            refuse_decreasing(self.function, *ends, most)
        return super().prepare(sizes, budget, max_items)

    def one(self, count: int, largest: Any) -> float:
        """Return the function's value."""
        return self.function(count, largest)

    def counted(self, counts: NDArray[np.int64], longest: NDArray[Any]) -> NDArray[np.float64]:
        """Return the function's values, asked once for each pair of count and size."""
        known: dict[Any, float] = {}
        costs = []
        for place, count in enumerate(counts.tolist()):
            key = (count, *np.atleast_1d(longest[place]).tolist())
            if key not in known:
                known[key] = float(self.function(count, longest[place] if longest.ndim > 1 else key[1]))
            costs.append(known[key])
        return np.array(costs, np.float64)

    def measure(self, count: int, largest: Number, total: Number, /) -> Number:
        """Return the function's value."""
        return real_number(super().measure(count, largest, total), "cost")

    def digest(self, sizes: NDArray[Any], budget: Budget, max_items: int | None, /) -> Any:
        """Return the counts that it allows at some sizes: functions have no value of their own."""
        if not len(sizes):
            return self.name
        probes = np.linspace(sizes.min(axis=0), sizes.max(axis=0), PROBES).astype(sizes.dtype)
        return self.capacity(one_budget(budget), max_items, sizes.ndim > 1).counts(probes)

    def cure(self, over: NDArray[Any], /) -> str:
        """Name the end of a memory model's range where that is the cause."""
        largest = round_up(over.max(axis=0), self.length_multiple)
        if not math.isinf(checked_cost(self.function, 1, largest if over.ndim > 1 else largest.item())):
            return super().cure(over)
        rounded = f", rounded up to length_multiple={self.length_multiple}" * (self.length_multiple > 1)
        return (
            f"cost(1, {largest}) is infinite, as that of a memory model is beyond what it measured: give "
            f"fit_budget these sizes{rounded}, or the sampler model.cost(extrapolate=True)"
        )


COSTS: dict[str, Callable[[int], Cost]] = {"sum": lambda _: SumCost(), "padded": PaddedCost}  # by length_multiple


def as_cost(cost: object, length_multiple: int = 1) -> Cost:
    """Return the cost that users name, or give as a function.

    >>> as_cost("padded", 8).measure(2, 9, 15), as_cost(lambda n, largest: n * largest**2).measure(2, 3, 5)
    (32, 18)
    """
    if isinstance(cost, Cost):
        return cost
    if callable(cost):
        return FunctionCost(length_multiple, function=cost)
    one_of("cost", cost, (*COSTS, "a function of (n, largest)"))
    return COSTS[str(cost)](length_multiple)


def quadratic(turning: float) -> float:
    """Return the weight of a size's square by the size at which it weighs as much as the size itself."""
    return 1 / max(turning, 1.0)


def columns_of(values: NDArray[Any]) -> NDArray[Any]:
    """Return values of shape ``[n]`` as ``[n, 1]``, others as they are."""
    return values[:, None] if values.ndim == 1 else values


def reduced(reduce: np.ufunc, values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[Any]:
    """Reduce the values of each batch to one."""
    if len(offsets) < 2:
        return values[:0]
    found: NDArray[Any] = reduce.reduceat(values, offsets[:-1], axis=0)
    return found


def one_budget(budget: Budget) -> float:
    """Return the budget of a cost that sizes have only together."""
    if isinstance(budget, list) and len(budget) != 1:
        raise ValueError(f"max_total_size must be one number for a cost function, got {shown(budget)}")
    return budget[0] if isinstance(budget, list) else budget


def not_fitting(sizes: NDArray[Any], capacity: Capacity, largest: int | None = None) -> NDArray[np.int64]:
    """Return the samples that do not fit by themselves; ``largest`` is the largest size, where it is known."""
    if not len(sizes):
        return np.zeros(0, np.int64)
    most = sizes.max(axis=0, keepdims=True) if largest is None else np.array([largest], sizes.dtype)
    if capacity.counts(most)[0] < 1:
        return np.flatnonzero(capacity.counts(sizes) < 1)
    return np.zeros(0, np.int64)


def given_work(work: NDArray[np.float64]) -> Work:
    """Return a function to the work of batches by that of each sample in a list."""
    return lambda places, offsets: np.add.reduceat(work[places], offsets[:-1], axis=1)


def padded_counts(budget: float, length_multiple: int, sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many samples fit when each is padded to the largest: n * largest <= budget.

    >>> padded_counts(100, 1, np.array([30, 50, 101])).tolist()
    [3, 2, 0]
    """
    if budget >= UNLIMITED:
        return np.full(len(sizes), UNLIMITED, np.int64)
    longest = round_up(sizes, length_multiple)
    with np.errstate(divide="ignore", over="ignore"):
        counts = np.minimum(np.floor(budget / longest), UNLIMITED).astype(np.int64)
    counts -= counts * longest > budget  # a quotient that was rounded up
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
    >>> shares.tolist(), capacity.counts(shares).tolist()
    ([0.3, 0.5], [3, 2])
    """
    columns = list(zip(sizes.T, budgets, strict=True))
    counts = np.minimum.reduce([padded_counts(budget, length_multiple, column) for column, budget in columns])
    shares = np.maximum.reduce([round_up(column, length_multiple) / budget for column, budget in columns])
    distinct, inverse = np.unique(shares, return_inverse=True)
    table = np.full(len(distinct), UNLIMITED, np.int64)
    np.minimum.at(table, inverse.reshape(-1), counts)
    return shares, Capacity(partial(looked_up, distinct, np.minimum.accumulate(table)))


@dataclass(frozen=True)
class CountsByFunction:
    """How many samples fit by a cost function, up to ``asked``; found once for each distinct largest size.

    ``remembered``: how many of these counts are kept at most, about. ``several``: the cost takes a vector of sizes.
    """

    cost: CostFunction
    budget: float
    asked: int = FURTHEST
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
        high = self.asked
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
