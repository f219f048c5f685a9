"""Planners: from sizes and options to the batches of any epoch, window by window."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._binpacking import (
    GRID,
    MAX_BATCHES,
    best_fit_decreasing,
    cut_descending,
    greedy_balance,
    next_fit,
    split_long,
    split_until,
)
from headrace.size_aware_batching._budget import Limits, PreparedSizes
from headrace.size_aware_batching._options import Options
from headrace.size_aware_batching._order import NaturalOrder, Order, ShuffledOrder, Strata, sorted_by_size
from headrace.size_aware_batching._random import Words, derive, shuffle_blocks
from headrace.size_aware_batching._sharding import Chunk, chunk_length, shuffle_sorted_chunks

BLOCK = 64  # neighbours in size among which samples change places


@dataclass(frozen=True)
class WorstCasePlan:
    """Which stratum goes to which batch.

    Args:
        batches: The batch of each stratum's sample, shape ``[depth]``.
        n_batches: Number of batches, none of them empty.
        work: Cost of each batch, shape ``[n_batches]``.
        block: Strata among which samples may change places, a power of two.
        free: Which blocks may, shape ``[ceil(depth / block)]``; None for all.
    """

    batches: NDArray[np.uint32]
    n_batches: int
    work: NDArray[np.float64]
    block: int = 1
    free: NDArray[np.bool_] | None = None


def batch_of_place(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Turn lists of places into the batch of each place."""
    batches = np.empty(len(places), np.uint32)
    batches[places] = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint32), np.diff(offsets))
    return batches


def even_blocks(values: NDArray[Any], block: int) -> NDArray[np.bool_]:
    """Return which blocks of neighbours hold one value only, shape ``[ceil(n / block)]``."""
    firsts = values[np.arange(len(values)) // block * block]
    even = np.ones(-(-len(values) // block), bool)
    even[np.flatnonzero(values != firsts) // block] = False
    return even


def bucketed_worst_case(falling: NDArray[Any], limits: Limits) -> WorstCasePlan:
    """Plan for padded cost: neighbours in size share a batch.

    Samples change places where that costs nothing: where as many fit a batch whichever of them is its largest.
    """
    offsets = cut_descending(falling, limits)
    batches = batch_of_place(np.arange(len(falling)), offsets)
    alike = falling if limits.capacity is None else np.minimum(limits.capacity(falling), limits.most_items)
    work = np.diff(offsets).astype(np.float64) * limits.work(falling[offsets[:-1]])
    return WorstCasePlan(batches, len(offsets) - 1, work, BLOCK, even_blocks(alike, BLOCK))


def packed_worst_case(falling: NDArray[np.int64], limits: Limits) -> WorstCasePlan:
    """Plan for bins filled to the brim; samples change places only where the sizes are equal."""
    places, offsets = split_long(*best_fit_decreasing(falling, limits.budgets[0]), limits.most_items)
    work: NDArray[Any] = np.add.reduceat(limits.work(falling[places]), offsets[:-1])
    return WorstCasePlan(batch_of_place(places, offsets), len(offsets) - 1, work, BLOCK, even_blocks(falling, BLOCK))


def stratified_worst_case(units: NDArray[Any], limits: Limits, n_batches: int) -> WorstCasePlan:
    """Plan for equal sums, in at least ``n_batches`` batches (as far as there are samples)."""
    budget = limits.budgets[0]
    n_batches = min(n_batches, len(units))
    dealt, fits = greedy_balance(units[None, :], min(n_batches, MAX_BATCHES), budget, derive(0), 1)
    counts = np.bincount(dealt[0], minlength=n_batches)
    if n_batches <= MAX_BATCHES and fits[0] and counts.min() > 0 and counts.max() <= limits.most_items:
        batches, found = dealt[0].astype(np.uint32), n_batches
    else:
        places, offsets = split_long(*best_fit_decreasing(units.astype(np.int64), budget), limits.most_items)
        if n_batches <= MAX_BATCHES:  # else nothing is dealt, and what fits is what there is
            places, offsets = split_until(places, offsets, n_batches)
        batches, found = batch_of_place(places, offsets), len(offsets) - 1
    work: NDArray[Any] = np.bincount(batches, limits.work(units), minlength=found)
    return WorstCasePlan(batches, found, work)


TRIES = (128, 64, 16, 4)  # ever shorter shuffles, should the batches of a window not fit at first


@dataclass(frozen=True)
class StrataPlanner:
    """The batches of any epoch over samples that are sorted by size.

    Args:
        order: Samples by size, largest first, shape ``[n]``.
        falling: Their sizes, shape ``[n]``.
        strata: How the samples are dealt to windows.
        templates: For a window with a sample of every stratum, and for one without a sample of the last.
        limits: The budgets.
        units: Maps sizes to the units that batches are dealt in; None for batches that follow the template.
        together: Windows that are dealt in lock-step and listed together, their batches arranged as one list.
    """

    order: NDArray[Any]
    falling: NDArray[Any]
    strata: Strata
    templates: tuple[WorstCasePlan, WorstCasePlan]
    limits: Limits
    units: Callable[[NDArray[Any]], NDArray[Any]] | None
    together: int = 1
    listed: dict[tuple[int, int], Chunk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return len(self.order)

    def n_batches_before(self, window: int) -> int:
        """Return the number of batches in the windows before this one."""
        full, short = (template.n_batches for template in self.templates)
        return min(window, self.strata.n_full) * full + max(0, window - self.strata.n_full) * short

    def unit(self, window: int) -> tuple[int, int]:
        """Return the first window, and one past the last, of those that are listed together with this one."""
        begin, end = (
            (0, self.strata.n_full) if window < self.strata.n_full else (self.strata.n_full, self.strata.n_windows)
        )
        first = begin + (window - begin) // self.together * self.together
        return first, min(first + self.together, end)

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        if position in (0, self.n_samples):  # known without a look at any window
            return self.n_batches_before(self.strata.n_windows) if position < self.n_samples else 0
        first, _ = self.unit(self.strata.window_of(position))
        _, offsets = self.group_batches(epoch_key, first)
        inside = int(np.searchsorted(offsets, position - self.strata.start(first), side="right")) - 1
        return self.n_batches_before(self.strata.n_windows) - self.n_batches_before(first) - inside

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        full = self.strata.n_full * self.templates[0].n_batches
        if number < full:
            window = number // self.templates[0].n_batches
        else:
            window = self.strata.n_full + (number - full) // self.templates[1].n_batches
        first, _ = self.unit(window)
        indices, offsets = self.group_batches(epoch_key, first)
        inside = number - self.n_batches_before(first)
        return indices[offsets[inside] : offsets[inside + 1]]

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on; the first may be the rest of a batch.

        Args:
            epoch_key: Key of the epoch.
            position: Samples of the epoch that come before.
        """
        if position >= self.n_samples:
            return
        first, stop = self.unit(self.strata.window_of(position))
        skip = position - self.strata.start(first)
        indices, offsets = self.group_batches(epoch_key, first)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        while stop < self.strata.n_windows:
            first, stop = self.unit(stop)
            yield self.group_batches(epoch_key, first)

    def group_batches(self, epoch_key: int, first: int) -> Chunk:
        """Return the batches of the windows that are listed together, by the first of them.

        The last ones are kept: their number, a batch of them and what follows a position are often asked in a row.
        """
        if (epoch_key, first) not in self.listed:
            self.listed.clear()
            self.listed[epoch_key, first] = self.plan_group(epoch_key, first)
        return self.listed[epoch_key, first]

    def plan_group(self, epoch_key: int, first: int) -> Chunk:
        """Plan these windows."""
        stop = self.unit(first)[1]
        template = self.templates[0 if first < self.strata.n_full else 1]
        keys = derive(epoch_key, np.arange(first, stop, dtype=np.uint64))
        places = self.strata.places(first, stop, self.strata.shifts(epoch_key))[:, : len(template.batches)]
        if self.units is None:
            batches, work = follow(template, keys)
        else:
            batches, work = self.dealt(self.falling[places], template, keys)
        goes_to = shuffle_sorted_chunks(
            work.ravel(), int(keys[0]), self.n_batches_before(first), chunk_length(work.size)
        )
        rows = np.arange(stop - first)[:, None] * template.n_batches
        numbers = goes_to[(batches + rows).ravel()]
        by_batch = np.argsort(numbers.astype(np.uint16 if len(goes_to) < 2**16 else np.uint32), kind="stable")
        counts = np.bincount(numbers, minlength=len(goes_to))
        return self.order[places.ravel()[by_batch]], np.concatenate([[0], np.cumsum(counts)])

    def dealt(
        self, sizes: NDArray[Any], template: WorstCasePlan, keys: Words
    ) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        """Deal windows at random; one that does not fit, not even with a shorter shuffle, follows the template."""
        units = sizes if self.units is None else self.units(sizes)
        n_batches, budget = template.n_batches, self.limits.budgets[0]
        batches = np.broadcast_to(template.batches, sizes.shape).copy()
        open_rows = np.arange(len(sizes)) if n_batches <= MAX_BATCHES else np.zeros(0, int)
        rows = np.arange(len(sizes))[:, None] * n_batches
        for attempt, block in enumerate(TRIES):
            if not len(open_rows):
                break
            dealt, fits = greedy_balance(units[open_rows], n_batches, budget, derive(keys[open_rows], attempt), block)
            flat = dealt + np.arange(len(open_rows))[:, None] * n_batches
            counts = np.bincount(flat.ravel(), minlength=len(open_rows) * n_batches).reshape(-1, n_batches)
            fits &= (counts.min(axis=1) > 0) & (counts.max(axis=1) <= self.limits.most_items)
            batches[open_rows[fits]] = dealt[fits]
            open_rows = open_rows[~fits]
        work: NDArray[Any] = np.bincount(
            (batches + rows).ravel(), self.limits.work(units).ravel(), minlength=len(sizes) * n_batches
        )
        return batches, work.reshape(len(sizes), n_batches)


def follow(template: WorstCasePlan, keys: Words) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
    """Give windows the template's batches, samples of like size changing places."""
    depth = len(template.batches)
    places = shuffle_blocks(keys, depth, template.block)
    if template.free is not None:
        fixed = ~np.repeat(template.free, template.block)[:depth]
        places[:, fixed] = np.flatnonzero(fixed)
    work = np.broadcast_to(template.work, (len(keys), template.n_batches))
    return template.batches[places], work


FIRST, MOST = 2**14, 2**18  # samples looked at in one go: few at first, so that the first batch comes soon


def batch_by_walking(chunks: Iterator[Chunk], number: int) -> NDArray[Any]:
    """Return one batch of a list that has to be planned up to it."""
    for indices, offsets in chunks:
        if number < len(offsets) - 1:
            return indices[offsets[number] : offsets[number + 1]]
        number -= len(offsets) - 1
    raise IndexError(number)


@dataclass(frozen=True)
class NextFitPlanner:
    """Batches in the order's own order. From any batch's first position on, they come out the same."""

    order: Order
    sizes: Callable[[NDArray[Any]], NDArray[Any]]
    limits: Limits
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return self.order.n_samples

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on."""
        length, reach = self.n_samples, FIRST
        while position < length:
            stop = min(length, position + reach)
            samples = self.order.take(epoch_key, position, stop)
            offsets = next_fit(self.sizes(samples), self.limits, last=stop == length)
            reach = min(2 * reach, MOST) if len(offsets) > 1 else 2 * reach
            if len(offsets) > 1:
                yield samples[: offsets[-1]], offsets
                position += int(offsets[-1])

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on; they have to be planned for that."""
        known = self.counts.get((epoch_key, position))
        if known is None:
            known = sum(len(offsets) - 1 for _, offsets in self.chunks(epoch_key, position))
            self.counts.clear()
            self.counts[epoch_key, position] = known
        return known

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch; those before it have to be planned for that."""
        return batch_by_walking(self.chunks(epoch_key, 0), number)


@dataclass(frozen=True)
class WindowPlanner:
    """Batches formed inside windows of the order, each window by itself.

    Args:
        order: The samples in order.
        n_windows: Windows of an epoch, all of about the same number of positions.
        form: Plans one window: its samples to their batches.
    """

    order: Order
    n_windows: int
    form: Callable[[NDArray[Any]], StrataPlanner]
    counts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return self.order.n_samples

    def start(self, window: int) -> int:
        """Return the first position of a window."""
        return window * self.n_samples // self.n_windows

    def window_of(self, position: int) -> int:
        """Return the window of a position."""
        window = position * self.n_windows // self.n_samples
        while self.start(window + 1) <= position:
            window += 1
        return window

    def window(self, epoch_key: int, window: int) -> Chunk:
        """Return the batches of one window."""
        samples = self.order.take(epoch_key, self.start(window), self.start(window + 1))
        return self.form(samples).group_batches(epoch_key ^ window, 0)

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        if position >= self.n_samples:
            return
        begin = self.window_of(position)
        skip = position - self.start(begin)
        indices, offsets = self.window(epoch_key, begin)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        for window in range(begin + 1, self.n_windows):
            yield self.window(epoch_key, window)

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on; the windows have to be planned for that, once."""
        if position >= self.n_samples:
            return 0
        if epoch_key not in self.counts:
            self.counts.clear()
            self.counts[epoch_key] = [len(self.window(epoch_key, w)[1]) - 1 for w in range(self.n_windows)]
        begin = self.window_of(position)
        _, offsets = self.window(epoch_key, begin)
        rest = int((offsets > position - self.start(begin)).sum())
        return rest + sum(self.counts[epoch_key][begin + 1 :])

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch; those before it have to be planned for that."""
        return batch_by_walking(self.chunks(epoch_key, 0), number)


TARGET = 0.998  # of a budget that random dealing aims at; what is left lets nearly every window fit at once
BATCHES = 512  # of a window, about: enough to balance, few enough to list in a millisecond
WIDE = 2**40  # a budget in the units of the wide grid
MANY = 256  # samples in a batch whose rounding up the narrow grid would show
FAR = 2**43  # budgets from here on are divided, not multiplied, to get to the dealing grid
LISTED = 170_000  # samples that are listed together, at most, unless one window holds more
BUCKETED, LEAST_BUCKETED = 2**17, 2**12
PACKED = 2**18
PACKED_WASTE = 8e-5  # wasted share that is small enough
BRIM = 3e-5  # share that best-fit leaves empty


@dataclass(frozen=True)
class Grid:
    """Maps integer sizes to units of the dealing grid, rounded up: sums never come out smaller than they are.

    Args:
        budget: Of a batch, in the unit of the sizes.
        wide: Whether to count in 64 bits: slower, but fine enough for batches of very many samples.
    """

    budget: int
    wide: bool = False

    @property
    def unit(self) -> int:
        """What a unit of the grid stands for, where sizes are too large to be multiplied."""
        return max(1, -(-self.budget // (WIDE if self.wide else GRID)))

    @property
    def exact(self) -> bool:
        """Whether sizes stay what they are."""
        return self.unit == 1

    @property
    def capacity(self) -> int:
        """The budget in units of the grid."""
        return self.budget // self.unit if self.exact or self.wide or self.budget >= FAR else GRID

    def __call__(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return sizes in units of the grid, in 32 or 64 bits."""
        kind = np.int64 if self.wide else np.int32
        if self.exact:
            return sizes.astype(kind)
        whole = sizes.astype(np.int64)
        multiplied = not self.wide and self.budget < FAR
        units = -(-(whole * GRID) // self.budget) if multiplied else -(-whole // self.unit)
        # What fits a batch of its own does so here, too: rounded up, nothing but zeros can join it then.
        return np.minimum(units, self.capacity).astype(kind)


def together(depth: int) -> int:
    """Return how many windows are listed together: as many as take milliseconds."""
    return max(1, LISTED // depth)


def both(
    strata: Strata, firsts: NDArray[Any], plan: Callable[[NDArray[Any]], WorstCasePlan]
) -> tuple[WorstCasePlan, WorstCasePlan]:
    """Plan windows with a sample of every stratum, and windows without one of the last."""
    full = plan(firsts)
    short = plan(firsts[:-1]) if strata.n_full < strata.n_windows and strata.depth > 1 else full
    return full, short


def stratified_planner(
    order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None
) -> StrataPlanner:
    """List batches of nearly equal sum."""
    budget = limits.budgets[0]
    total = float(falling.sum(dtype=np.float64))
    items = len(falling) * budget / max(total, 1.0)
    grid = Grid(budget, wide=budget > GRID and items > MANY)
    capacity = grid.capacity
    in_grid = Limits((capacity,), most_items=limits.most_items, quadratic=limits.quadratic * budget / capacity)
    needed = max(total / (budget * TARGET), len(falling) / limits.most_items)
    if n_windows is None:
        n_windows = max(1, min(round(needed / BATCHES), len(falling)))
    batches = max(1, int(np.ceil(needed / n_windows)))
    strata = Strata(len(falling), n_windows)
    firsts = grid(falling[strata.firsts()])
    pair = both(strata, firsts, lambda part: stratified_worst_case(part, in_grid, batches))
    return StrataPlanner(order, falling, strata, pair, in_grid, grid, together(strata.depth))


def bucketed_planner(
    order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None
) -> StrataPlanner:
    """List batches of neighbours in size."""
    length = len(falling)
    if n_windows is None:
        n_windows = max(1, round(length / min(BUCKETED, max(LEAST_BUCKETED, length // 8))))
    strata = Strata(length, n_windows)
    pair = both(strata, falling[strata.firsts()], lambda part: bucketed_worst_case(part, limits))
    return StrataPlanner(order, falling, strata, pair, limits, None, together(strata.depth))


def packed_planner(
    order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None
) -> StrataPlanner:
    """List batches that are filled to the brim."""
    if n_windows is None:
        n_windows = packed_windows(falling, limits.budgets[0])
    strata = Strata(len(falling), n_windows)
    firsts = falling[strata.firsts()].astype(np.int64)
    pair = both(strata, firsts, lambda part: packed_worst_case(part, limits))
    return StrataPlanner(order, falling, strata, pair, limits, None, together(strata.depth))


def packed_windows(falling: NDArray[Any], budget: int) -> int:
    """Return the number of windows, of the usual length or twice that, that wastes least.

    A window wastes what its last batch leaves empty and what its samples are smaller than the strata's firsts.
    """
    total = float(falling.sum(dtype=np.float64))
    best, least = 1, np.inf
    for length, enough in ((PACKED, PACKED_WASTE), (2 * PACKED, np.inf)):
        middle = max(1, round(len(falling) / length))
        fewest = max(1, -(-len(falling) // (2 * PACKED)))
        for count in np.unique(np.linspace(max(fewest, 0.9 * middle), 1.3 * middle + 1, 16).astype(int)).tolist():
            firsts = float(falling[::count].sum(dtype=np.float64))
            waste = count * np.ceil(firsts / budget * (1 + BRIM)) * budget / max(total, 1.0) - 1
            if waste < least:
                best, least = count, waste
        if least <= enough:
            break
    return best


BUILDERS = {"stratified": stratified_planner, "bucketed": bucketed_planner, "packed": packed_planner}


class Planner(Protocol):
    """The batches of every epoch, which none of them need be planned for beforehand."""

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches behind the first ``position`` samples of the epoch's list."""

    def count(self, epoch_key: int, position: int) -> int:
        """Return how many batches these are."""

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""


def make_planner(sized: PreparedSizes, options: Options, order: Order | None = None) -> Planner:
    """Choose how batches are listed.

    Args:
        sized: Sizes and budgets.
        options: What was asked for.
        order: An order that was given; None for one of our own.
    """
    if order is None and options.shuffle and options.strategy != "sequential":
        return whole(sized, options)
    if order is None:
        n_samples = len(sized.sizes) if sized.kept is None else len(sized.kept)
        order = ShuffledOrder(n_samples, sized.kept) if options.shuffle else NaturalOrder(n_samples, sized.kept)
    if options.strategy == "sequential" or order.n_samples == 0:
        return NextFitPlanner(order, sized.sizes.__getitem__, sized.limits)
    return window_planner(sized, options, order)


def whole(sized: PreparedSizes, options: Options) -> Planner:
    """List batches over all samples, sorted by size once."""
    sizes = sized.sizes if sized.kept is None else sized.sizes[sized.kept]
    if not len(sizes):
        return NextFitPlanner(NaturalOrder(0), sizes.__getitem__, sized.limits)
    order, falling = sorted_by_size(sizes)
    if sized.kept is not None:
        order = sized.kept[order].astype(order.dtype)
    n_windows = None if options.window is None else max(1, round(len(order) / options.window))
    return BUILDERS[options.strategy](order, falling, sized.limits, n_windows)


def window_planner(sized: PreparedSizes, options: Options, order: Order) -> Planner:
    """Form batches inside windows of an order, each window as if it were all there is."""
    build_one = BUILDERS[options.strategy]

    def form(samples: NDArray[Any]) -> StrataPlanner:
        sizes = sized.sizes[samples]
        by_size, falling = sorted_by_size(sizes)
        return build_one(samples[by_size], falling, sized.limits, 1)

    length = options.window or window_length(sized, options)
    return WindowPlanner(order, max(1, round(order.n_samples / length)), form)


def window_length(sized: PreparedSizes, options: Options) -> int:
    """Return how many samples of an order make a window, about."""
    if options.strategy == "bucketed":
        return BUCKETED
    if options.strategy == "packed":
        return PACKED
    mean = float(sized.sizes.mean(dtype=np.float64))
    return int(np.clip(BATCHES * sized.limits.budgets[0] / max(mean, 1.0), 2**10, 2**17))
