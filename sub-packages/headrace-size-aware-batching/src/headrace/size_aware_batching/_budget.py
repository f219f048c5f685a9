"""What a batch costs and how much it may cost; sizes and budgets in whole units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._options import Capacity, CostFunction, Options
from headrace.size_aware_batching._sizes import any_column
from headrace.size_aware_batching._validation import UNLIMITED, Number, real_number, shortlist, shown, warn


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    ``budgets`` are the largest sums, one for each column of sizes. With ``capacity`` (costs of the count and the
    largest sample) the largest size says how many samples fit. Batches of more than ``multiple`` samples hold a
    multiple of it. ``quadratic`` is the weight of a size's square when batches are compared by their time, as in
    attention.
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


@dataclass(frozen=True)
class PreparedSizes:
    """Sizes ready for planning: integers wherever sums are taken, and limits in their unit.

    ``kept`` are the samples that are planned, ascending (None for all), ``oversize`` those that exceed a budget by
    themselves, ``work`` what steps are balanced by (None for the sizes).
    """

    sizes: NDArray[Any]
    limits: Limits
    kept: NDArray[np.int64] | None
    oversize: NDArray[np.int64]
    work: NDArray[np.float64] | None = None

    @property
    def n_samples(self) -> int:
        """Number of samples that are planned."""
        return len(self.sizes) if self.kept is None else len(self.kept)

    @property
    def columns(self) -> int:
        """Number of sizes of a sample."""
        return 1 if self.sizes.ndim == 1 else self.sizes.shape[1]


Budget = int | float | list[int | float]


def checked_budget(max_total_size: object) -> Number:
    """Return a budget as a number greater than 0; infinity means that everything fits.

    >>> checked_budget(4096)
    4096
    """
    number = real_number(max_total_size, "max_total_size")
    if number <= 0:
        raise ValueError(f"max_total_size must be greater than 0, got {number}: nothing would fit")
    return number


def plain_budget(max_total_size: Any) -> Budget:
    """Return a budget, or a list of them, as plain numbers; from 2**62 on they are infinite."""
    given = max_total_size
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    numbers = [checked_budget(budget) for budget in (given if several else [given])]
    plain = [math.inf if number >= UNLIMITED else number for number in numbers]
    return plain if several else plain[0]


def prepare(sizes: NDArray[Any], budget: Budget, options: Options) -> PreparedSizes:
    """Return sizes and budgets in whole units, and the samples that are too large, which may be refused."""
    table, budgets, capacity, over = summed(sizes, budget) if options.sums else counted(sizes, budget, options)
    refuse_oversize(sizes, over, budget, options)
    kept = None
    if options.oversize == "skip" and len(over):
        kept = np.setdiff1d(np.arange(len(sizes)), over, assume_unique=True)
    scale = float(budgets[0]) if options.sums else 8 * float(sizes.max(initial=1))
    if options.cost == "padded" and math.isfinite(budgets[0]):
        scale = float(budgets[0])
    limits = Limits(
        budgets=tuple(int(b) if math.isfinite(b) else UNLIMITED for b in budgets),
        capacity=capacity,
        most_items=options.max_items or UNLIMITED,
        multiple=options.batch_size_multiple,
        quadratic=8 / max(scale, 8.0),
    )
    return PreparedSizes(table, limits, kept, over)


Parts = tuple[NDArray[Any], tuple[float, ...], Capacity | None, NDArray[np.int64]]


def summed(sizes: NDArray[Any], budget: Budget) -> Parts:
    """Return sizes and budgets in units, no capacity, and which samples are too large, for costs that are sums."""
    limits = budgets_of(budget, sizes)
    table, budgets = whole_units(sizes, limits)
    over = np.flatnonzero(any_column(sizes > whole_limits(sizes, limits)))
    if table is not sizes or len(over):
        # What fits a batch of its own does so in rounded units, too; what does not is left out, or clipped to fit.
        table = np.minimum(table.astype(np.int64), budgets if table.ndim == 2 else budgets[0])
    return table, budgets, None, over


def counted(sizes: NDArray[Any], budget: Budget, options: Options) -> Parts:
    """Return sizes, budgets, capacity and which samples are too large, for costs of the count and the largest sizes."""
    most = options.max_items or max(1, len(sizes))
    capacity: Capacity
    if callable(options.cost):
        if isinstance(budget, list) and len(budget) != 1:
            raise ValueError(f"max_total_size must be one number for a cost function, got {shown(budget)}")
        limits: tuple[float, ...] = (budget[0] if isinstance(budget, list) else budget,)
        if len(sizes):
            smallest, largest = (
                round_up(end, options.length_multiple) for end in (sizes.min(axis=0), sizes.max(axis=0))
            )
            one = sizes.ndim == 1
            refuse_decreasing(
                options.cost, smallest.item() if one else smallest, largest.item() if one else largest, most
            )
        capacity = FunctionCapacity(options.cost, limits[0], most, options.length_multiple, several=sizes.ndim > 1)
    else:
        limits = budgets_of(budget, sizes)
        if sizes.ndim > 1:
            sizes, capacity = padded_columns(sizes, limits, options.length_multiple)
        else:
            capacity = PaddedCapacity(limits[0], options.length_multiple)
    over = np.zeros(0, np.int64)
    if len(sizes) and capacity(sizes.max(axis=0, keepdims=True))[0] < 1:
        over = np.flatnonzero(capacity(sizes) < 1)
    return sizes, limits, partial(at_least_one, capacity) if options.oversize == "own_batch" else capacity, over


def refuse_oversize(sizes: NDArray[Any], over: NDArray[np.int64], budget: Any, options: Options) -> None:
    """Raise an error that names samples that are too large, if that is what was asked for."""
    if not len(over) or options.oversize != "raise":
        return
    some = ", ".join(f"sample {index} has size {shown(sizes[index].tolist())}" for index in over[:3])
    cure = "raise the budget"
    if callable(options.cost):
        largest = round_up(sizes[over].max(axis=0), options.length_multiple)
        if math.isinf(checked_cost(options.cost, 1, largest if sizes.ndim > 1 else largest.item())):
            rounded = f", rounded up to length_multiple={options.length_multiple}" * (options.length_multiple > 1)
            cure = (
                f"cost(1, {largest}) is infinite, as that of a memory model is beyond what it measured: give "
                f"fit_budget these sizes{rounded}, or the sampler model.cost(extrapolate=True)"
            )
    raise ValueError(
        f"sizes must not exceed max_total_size={shown(budget)}, got {len(over)} of {len(sizes)} samples that do so "
        f"by themselves ({some}{', ...' if len(over) > 3 else ''}): {cure}, cut them in the collate function and count "
        "them so with max_length=, or choose oversize='skip' or 'own_batch'"
    )


def warn_of_skipped(over: NDArray[np.int64], budget: Any) -> None:
    """Warn of samples that an epoch does not deliver."""
    some = shortlist(over[:5].tolist(), len(over))
    left_out = "1 sample is" if len(over) == 1 else f"{len(over)} samples are"
    warn(f"{left_out} left out as larger than max_total_size={shown(budget)}: {some}")


def budgets_of(budget: Budget, sizes: NDArray[Any]) -> tuple[float, ...]:
    """Return one budget a column of sizes."""
    columns = 1 if sizes.ndim == 1 else sizes.shape[1]
    given = budget if isinstance(budget, list) else [budget]
    if len(given) != columns or not columns:
        raise ValueError(
            f"max_total_size must have one budget for each column of sizes, got {len(given)} for shape {sizes.shape}"
        )
    return tuple(given)


def whole_limits(sizes: NDArray[Any], budgets: tuple[float, ...]) -> NDArray[Any]:
    """Return the largest sizes that fit by themselves, to be compared with sizes exactly."""
    if sizes.dtype.kind not in "iu":
        return np.array(budgets, np.float64)
    return np.array([math.floor(budget) if budget < UNLIMITED else UNLIMITED for budget in budgets], np.int64)


def whole_units(sizes: NDArray[Any], budgets: tuple[float, ...]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Turn sizes and budgets into integers whose sums are exact and stay inside 63 bits.

    Integers stay what they are unless their total leaves 62 bits. All else is rounded up to a 2**40th of the budget:
    sums never come out smaller than they are.
    """
    whole = sizes.dtype.kind in "iu" or (bool((sizes == np.floor(sizes)).all()) and float(sizes.max(initial=0)) < 2**53)
    if whole and all(budget >= 1 for budget in budgets):
        integers = sizes if sizes.dtype.kind in "iu" else sizes.astype(np.int64)
        limits = [min(UNLIMITED, math.floor(budget) if math.isfinite(budget) else UNLIMITED) for budget in budgets]
        if float(sizes.sum(axis=0, dtype=np.float64).max(initial=0)) < UNLIMITED:
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
