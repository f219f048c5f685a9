"""Planners: from sizes and options to the batches of any epoch, window by window."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._binpacking import NOTHING_FITS, next_fit
from headrace.size_aware_batching._budget import Limits, PreparedSizes
from headrace.size_aware_batching._options import Options
from headrace.size_aware_batching._order import NaturalOrder, Order, ShuffledOrder, Strata, kd_order, sorted_by_size
from headrace.size_aware_batching._random import derive
from headrace.size_aware_batching._sharding import Chunk, chunk_length, shuffle_sorted_chunks, work_function
from headrace.size_aware_batching._windowplan import (
    PACKED,
    STRATIFIED,
    Cuts,
    Density,
    RandomPacking,
    WindowPlan,
    WindowPlans,
    equal_groups,
    padded_cuts,
)

FIRST_CUT, LONGEST_CUT = (
    2**14,
    2**18,
)  # samples cut at a time: few at first, so that the first batch comes soon
BATCHES = 512  # of a window, about: enough to balance, few enough to list in a millisecond
LISTED = 170_000  # samples that are listed together, at most, unless one window holds more
BUCKETED = 2**17  # samples of a window of padded batches
SHORT = 32  # batches of a window in which samples do not change places
PACKED_WINDOW = 2**17
PACKED_WINDOWS = (2**15, 2**16, 2**17, 2**18, 2**19)
PACKED_WASTE = 9e-5  # wasted share that is small enough
BRIM = 1.2e-5  # share that packing leaves empty


class Planner(Protocol):
    """The batches of every epoch, none of which need be planned beforehand."""

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches behind the first ``position`` samples of the epoch's list."""

    def count(self, epoch_key: int, position: int) -> int:
        """Return how many batches these are."""

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""


@dataclass(frozen=True)
class StrataPlanner:
    """Batches over samples in strata: every window takes one sample of each, and follows the epoch's plan.

    Args:
        order: Samples by size, stratum by stratum, shape ``[n]``.
        strata: Which sample belongs to which window.
        plans: For a window with a sample of every stratum, and for one without a sample of the last.
        work: ``work(places, offsets)`` gives the work of batches: places in ``order`` of shape ``[c, depth]``, batch by
            batch, with the same offsets in each row; returns shape ``[c, batches]``.
    """

    order: NDArray[Any]
    strata: Strata
    plans: tuple[WindowPlans, WindowPlans]
    work: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
    # What was planned last: a number of batches, one of them and what follows a position are often asked in a row.
    _drawn: dict[tuple[int, bool], WindowPlan] = field(default_factory=dict, repr=False, compare=False)
    _listed: dict[tuple[int, int], Chunk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.order)

    def plan(self, epoch_key: int, full: bool) -> WindowPlan:
        """Return the plan of the epoch's windows."""
        if (epoch_key, full) not in self._drawn:
            for known in [known for known in self._drawn if known[0] != epoch_key]:
                del self._drawn[known]
            self._drawn[epoch_key, full] = self.plans[0 if full else 1].plan(epoch_key)
        return self._drawn[epoch_key, full]

    def n_batches_before(self, window: int) -> int:
        """Return the number of batches in the windows before this one."""
        full, short = (plans.n_batches for plans in self.plans)
        return min(window, self.strata.n_full) * full + max(0, window - self.strata.n_full) * short

    def group_of(self, window: int) -> tuple[int, int]:
        """Return the first window, and one past the last, of those that are listed together with this one."""
        full = self.strata.n_full
        begin, end = (0, full) if window < full else (full, self.strata.n_windows)
        together = max(1, LISTED // self.strata.depth)
        first = begin + (window - begin) // together * together
        return first, min(first + together, end)

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        if position in (0, self.n_samples):  # known without a look at any window
            return self.n_batches_before(self.strata.n_windows) if position < self.n_samples else 0
        first, _ = self.group_of(self.strata.window_of(position))
        _, offsets = self.group(epoch_key, first)
        inside = int(np.searchsorted(offsets, position - self.strata.start(first), side="right")) - 1
        return self.n_batches_before(self.strata.n_windows) - self.n_batches_before(first) - inside

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        full = self.strata.n_full * self.plans[0].n_batches
        if number < full:
            window = number // self.plans[0].n_batches
        else:
            window = self.strata.n_full + (number - full) // self.plans[1].n_batches
        first, _ = self.group_of(window)
        indices, offsets = self.group(epoch_key, first)
        inside = number - self.n_batches_before(first)
        return indices[offsets[inside] : offsets[inside + 1]]

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        if position >= self.n_samples:
            return
        first, stop = self.group_of(self.strata.window_of(position))
        skip = position - self.strata.start(first)
        indices, offsets = self.group(epoch_key, first)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        while stop < self.strata.n_windows:
            first, stop = self.group_of(stop)
            yield self.group(epoch_key, first)

    def group(self, epoch_key: int, first: int) -> Chunk:
        """Return the batches of the windows that are listed together, by the first of them."""
        if (epoch_key, first) not in self._listed:
            self._listed.clear()
            self._listed[epoch_key, first] = self._plan_group(epoch_key, first)
        return self._listed[epoch_key, first]

    def _plan_group(self, epoch_key: int, first: int) -> Chunk:
        stop = self.group_of(first)[1]
        plan = self.plan(epoch_key, first < self.strata.n_full)
        places = self.strata.places(first, stop, self.strata.shifts(epoch_key), plan.sequence)
        work = self.work(places, plan.offsets).ravel()
        key = int(derive(epoch_key, first, 1)[0])
        goes_to = shuffle_sorted_chunks(work, key, self.n_batches_before(first), chunk_length(work.size))
        arranged = np.empty_like(goes_to)
        arranged[goes_to] = np.arange(len(goes_to))
        begins = (np.arange(stop - first)[:, None] * len(plan.sequence) + plan.offsets[:-1]).ravel()[arranged]
        lengths = np.tile(np.diff(plan.offsets), stop - first)[arranged]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        taken = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return self.order[places.ravel()[taken]], offsets


@dataclass(frozen=True)
class NextFitPlanner:
    """Batches in the order's own order. From any batch's first position on, they come out the same."""

    order: Order
    sizes: Callable[[NDArray[Any]], NDArray[Any]]
    limits: Limits
    _offsets: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""
        return self.order.n_samples

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on."""
        length, reach = self.n_samples, FIRST_CUT
        while position < length:
            stop = min(length, position + reach)
            samples = self.order.take(epoch_key, position, stop)
            offsets = next_fit(self.sizes(samples), self.limits, last=stop == length)
            reach = min(2 * reach, LONGEST_CUT) if len(offsets) > 1 else 2 * reach
            if len(offsets) > 1:
                yield samples[: offsets[-1]], offsets
                position += int(offsets[-1])

    def offsets(self, epoch_key: int) -> NDArray[np.int64]:
        """Return where all batches of the epoch begin; they are planned for that, once."""
        if epoch_key not in self._offsets:
            lengths = [np.diff(offsets) for _, offsets in self.chunks(epoch_key, 0)]
            self._offsets.clear()
            self._offsets[epoch_key] = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        return self._offsets[epoch_key]

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on."""
        offsets = self.offsets(epoch_key)
        begun = int(np.searchsorted(offsets, position))
        if offsets[begun] == position:
            return len(offsets) - 1 - begun
        return sum(len(offsets) - 1 for _, offsets in self.chunks(epoch_key, position))

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        begin, end = self.offsets(epoch_key)[number : number + 2].tolist()
        return self.order.take(epoch_key, begin, end)


@dataclass(frozen=True)
class WindowPlanner:
    """Batches formed inside windows of an order, each window by itself.

    Args:
        order: The samples in order.
        n_windows: Windows of an epoch, all of about the same number of positions.
        form: Plans one window: its samples and a key to their batches.
    """

    order: Order
    n_windows: int
    form: Callable[[NDArray[Any], int], Chunk]
    _counts: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)
    _latest: dict[tuple[int, int], Chunk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""
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
        """Return the batches of one window; those of the last one are kept."""
        if (epoch_key, window) not in self._latest:
            samples = self.order.take(epoch_key, self.start(window), self.start(window + 1))
            self._latest.clear()
            self._latest[epoch_key, window] = self.form(samples, int(derive(epoch_key, window)[0]))
        return self._latest[epoch_key, window]

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

    def counts(self, epoch_key: int) -> NDArray[np.int64]:
        """Return how many batches come before each window; the windows are planned for that, once."""
        if epoch_key not in self._counts:
            counts = [len(self.window(epoch_key, window)[1]) - 1 for window in range(self.n_windows)]
            self._counts.clear()
            self._counts[epoch_key] = np.cumsum([0, *counts])
        return self._counts[epoch_key]

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on."""
        if position >= self.n_samples:
            return 0
        before = self.counts(epoch_key)
        if position == 0:
            return int(before[-1])
        begin = self.window_of(position)
        _, offsets = self.window(epoch_key, begin)
        rest = int((offsets > position - self.start(begin)).sum())
        return rest + int(before[-1] - before[begin + 1])

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        before = self.counts(epoch_key)
        window = int(np.searchsorted(before, number, side="right")) - 1
        indices, offsets = self.window(epoch_key, window)
        inside = number - int(before[window])
        return indices[offsets[inside] : offsets[inside + 1]]


def make_planner(sized: PreparedSizes, options: Options, order: Order | None = None) -> Planner:
    """Choose how batches are planned.

    Args:
        sized: Sizes and budgets.
        options: What was asked for.
        order: The order of a user's sampler; None for one of our own.
    """
    if order is None and options.shuffle and options.strategy != "sequential":
        return over_all_samples(sized, options)
    if order is None:
        order = (ShuffledOrder if options.shuffle else NaturalOrder)(sized.n_samples, sized.kept)
    if options.strategy == "sequential" or order.n_samples == 0:
        return NextFitPlanner(order, sized.sizes.__getitem__, sized.limits)
    length = options.window or window_length(sized, options)

    def form(samples: NDArray[Any], key: int) -> Chunk:
        return in_strata(sized, options, samples, n_windows=1, key=key).group(key, 0)

    return WindowPlanner(order, max(1, round(order.n_samples / length)), form)


def over_all_samples(sized: PreparedSizes, options: Options) -> Planner:
    """Plan over all samples, sorted by size once."""
    if not sized.n_samples:
        return NextFitPlanner(NaturalOrder(0), sized.sizes.__getitem__, sized.limits)
    n_windows = None if options.window is None else max(1, round(sized.n_samples / options.window))
    return in_strata(sized, options, sized.kept, n_windows)


def window_length(sized: PreparedSizes, options: Options) -> int:
    """Return how many samples of an order make a window, about."""
    if options.strategy == "bucketed":
        return BUCKETED
    if options.strategy == "packed":
        return PACKED_WINDOW
    share = (sized.sizes.mean(axis=0, dtype=np.float64) / np.maximum(sized.limits.budgets[: sized.columns], 1)).max()
    return int(np.clip(batches_of_window(sized.columns) / max(share, 1e-9), 2**10, 2**17))


def batches_of_window(columns: int) -> int:
    """Return how many batches make a window: more where strata of several columns are less alike."""
    return BATCHES * (1, 2, 8)[min(columns, 3) - 1]


def in_strata(
    sized: PreparedSizes,
    options: Options,
    samples: NDArray[Any] | None,
    n_windows: int | None = None,
    key: int | None = None,
) -> StrataPlanner:
    """Plan over some samples in strata.

    Args:
        sized: Sizes and budgets.
        options: What was asked for.
        samples: The samples, shape ``[n]``; None for all.
        n_windows: Number of windows; None for what suits the strategy.
        key: For a window that is planned only once: its key.
    """
    sizes = sized.sizes if samples is None else sized.sizes[samples]
    order, descending = sorted_by_size(sizes) if sizes.ndim == 1 else (np.zeros(0, np.int64), sizes)
    if options.strategy == "bucketed":
        n_windows = n_windows or bucketed_windows(sizes, sized.limits)
    elif options.strategy == "packed":
        n_windows = n_windows or packed_windows(descending, sized.limits)
    else:
        n_windows = n_windows or max(
            1, min(round(fewest_batches(sizes, sized.limits) / batches_of_window(sized.columns)), len(sizes))
        )
    strata = Strata(len(sizes), n_windows)
    if sizes.ndim == 1:
        largest = descending[strata.firsts()][:, None]
    else:
        by_function = len(sized.limits.budgets) < sized.columns  # one budget, for a cost of all columns together
        scale = sizes.max(axis=0).tolist() if by_function else sized.limits.budgets
        order, largest = kd_order(sizes, scale, strata, ranked=not by_function)
        descending = sizes[order]
    density = PACKED if options.strategy == "packed" else STRATIFIED
    short = full = window_plans(largest, sized.limits, options, density, key)
    if strata.n_full < strata.n_windows and strata.depth > 1:
        short = full.without_last() or window_plans(largest[:-1], sized.limits, options, density, key)
    own = None if sized.work is None else sized.work if samples is None else sized.work[samples]
    work = work_function(descending, sized.limits, None if own is None else own[order])
    return StrataPlanner(order if samples is None else samples[order].astype(order.dtype), strata, (full, short), work)


def window_plans(
    largest: NDArray[Any], limits: Limits, options: Options, density: Density, key: int | None
) -> WindowPlans:
    """Choose how a window is planned: packed at random, or cut in descending order."""
    if options.strategy != "bucketed":
        columns, budgets = largest.astype(np.int64), np.array(limits.budgets, np.int64)
        if limits.most_items < len(largest):  # one more column in which every sample counts as one
            columns = np.concatenate([columns, np.ones((len(columns), 1), np.int64)], axis=1)
            budgets = np.append(budgets, limits.most_items)
        return RandomPacking(columns, budgets, density, key)
    if limits.capacity is None or largest.shape[1] > 1:
        return Cuts(next_fit(largest.squeeze(1) if largest.shape[1] == 1 else largest, limits), equal_groups(largest))
    descending = largest[:, 0]
    counts = np.minimum(limits.capacity(descending), limits.most_items)
    if counts.min() < 1:
        raise ValueError(NOTHING_FITS.format(size=descending[int(counts.argmin())]))
    return padded_cuts(counts, limits, tight=options.window is not None)


def fewest_batches(sizes: NDArray[Any], limits: Limits) -> float:
    """Return the volume bound on the number of batches."""
    totals = np.atleast_1d(sizes.sum(axis=0, dtype=np.float64))
    filled = float((totals / np.maximum(limits.budgets, 1)).max())
    return max(filled, len(sizes) / limits.most_items)


def bucketed_windows(sizes: NDArray[Any], limits: Limits) -> int:
    """Return the number of windows of batches of neighbours in size.

    Where no shuffle inside groups varies the batches, windows are short: batch-mates meet again by chance times the
    batches of a window.
    """
    if limits.capacity is not None and sizes.ndim == 1:
        return max(1, round(len(sizes) / BUCKETED))
    if limits.capacity is None:
        return max(1, min(round(fewest_batches(sizes, limits) / SHORT), len(sizes)))
    # Neighbours in several columns need more of them to be alike in all.
    return max(1, min(round(float((1 / limits.capacity(sizes)).sum()) / (8 * SHORT)), len(sizes)))


def packed_windows(descending: NDArray[Any], limits: Limits) -> int:
    """Return the number of windows, of the shortest length that wastes little, that wastes least.

    A window wastes what its last batch leaves empty and what its samples are smaller than the strata's largest.
    """
    length = len(descending)
    if descending.ndim > 1:
        return max(1, round(length / PACKED_WINDOW))
    fewest = fewest_batches(descending, limits)
    best, least = 1, np.inf
    for window in PACKED_WINDOWS:
        middle = max(1, round(length / window))
        for count in np.unique(np.linspace(0.8 * middle, 1.25 * middle + 1, 48).astype(int)).tolist():
            if count < -(-length // PACKED_WINDOWS[-1]):
                continue
            filled = float(descending[::count].sum(dtype=np.float64)) / max(limits.budgets[0], 1)
            waste = count * np.ceil(filled * (1 + BRIM)) / max(fewest, 1e-9) - 1
            if waste < least:
                best, least = count, waste
        if least <= PACKED_WASTE or middle == 1:
            break
    return best
