"""Planners: from sizes and options to the batches of any epoch, window by window."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.costs import Work, given_work
from headrace.size_aware_batching.planning.curriculum import (
    TOGETHER,
    Ramp,
    Stage,
    competence,
    draw_stages,
    shortest_first,
)
from headrace.size_aware_batching.planning.distribution import chunk_length, shuffle_sorted_chunks
from headrace.size_aware_batching.planning.last_step import Batches
from headrace.size_aware_batching.planning.limits import Limits
from headrace.size_aware_batching.planning.next_fit import cut_by_counts, largest_counts, next_fit
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.order import Order, ShuffledOrder, SliceOrder, natural_order
from headrace.size_aware_batching.planning.prepared import PreparedSizes, left_of
from headrace.size_aware_batching.planning.random import fold_in
from headrace.size_aware_batching.planning.strata import Strata, kd_order, sort_samples
from headrace.size_aware_batching.planning.units import round_up
from headrace.size_aware_batching.planning.windows import (
    PACKED,
    STRATIFIED,
    Packer,
    RandomPacking,
    SortedPacking,
    WindowPlan,
    equal_groups,
    padded_packing,
)

FIRST_CUT, LONGEST_CUT = 2**14, 2**18  # samples cut at a time: few at first, so that the first batch comes soon
# Measured on 1,000,000 lognormal sizes (median 360, sigma 0.8, longest 2048), budget 16384, epoch 1 of 8 ranks; the
# milliseconds are those to its first batch.
# Batches of a window, about. 128, 256, 512, 2048: fill 0.9918, 0.9961, 0.9972, 0.9976 in 4, 11, 30, 36 ms.
BATCHES = 512
# Samples that are listed together, at most, unless one window holds more. 40,000, 170,000, 700,000: the largest rank of
# a step has 1.0003, 1.0001, 1.0000 times the mean work.
LISTED = 170_000
# Samples of a window of padded batches. 2**15, 2**17, 2**19: 30,411, 30,304, 30,296 batches in 14, 11, 62 ms.
BUCKETED = 2**17
# Batches of a window in which samples do not change places. 8, 32, 128: fill 0.889, 0.969, 0.977, and two samples of a
# batch share one again 4, 16, 78 times as often as by chance.
SHORT = 32
# Samples of a window of packed batches, the shortest first. All, 2**17 alone, 2**19 alone: 29,493, 29,493, 29,492
# batches, and two samples of a batch share one again 1.2, 2.5, 4.0 times as often as by chance.
PACKED_WINDOWS = (2**15, 2**16, 2**17, 2**18, 2**19)
PACKED_WINDOW = 2**17  # of several columns, and of an order that is given
PACKED_RAMP = 0.999  # fill that the samples of a packed window of a curriculum are drawn for
# Wasted share that is small enough: fill is to be 0.9999. 0, 9.5e-5, 1e-3: 29,491, 29,493, 29,493 batches; two
# samples of a batch share one again 3.6, 1.2, 1.2 times as often as by chance; the first takes twice as long to plan.
PACKED_WASTE = 9.5e-5


class NextFitPlanner:
    """Batches in the order's own order. From any batch's first position on, they come out the same."""

    def __init__(self, order: Order, sizes: NDArray[Any], limits: Limits) -> None:
        self.order, self.sizes, self.limits = order, sizes, limits
        self.n_samples = order.n_samples
        self._offsets: tuple[int, NDArray[np.int64]] | None = None  # of the latest epoch

    def batches(self, epoch_key: int, position: int) -> Iterator[Batches]:
        """Yield the batches behind the first ``position`` samples of the epoch's list."""
        length, reach = self.n_samples, FIRST_CUT
        while position < length:
            stop = min(length, position + reach)
            samples = self.order.take(epoch_key, position, stop)
            offsets = next_fit(self.sizes[samples], self.limits, last=stop == length)
            reach = min(2 * reach, LONGEST_CUT) if len(offsets) > 1 else 2 * reach
            if len(offsets) > 1:
                yield samples[: offsets[-1]], offsets
                position += int(offsets[-1])

    def offsets(self, epoch_key: int) -> NDArray[np.int64]:
        """Return where all batches of the epoch begin; they are planned for that, once."""
        if self._offsets is None or self._offsets[0] != epoch_key:
            lengths = [np.diff(offsets) for _, offsets in self.batches(epoch_key, 0)]
            self._offsets = epoch_key, np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        return self._offsets[1]

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on."""
        offsets = self.offsets(epoch_key)
        begun = int(np.searchsorted(offsets, position))
        if offsets[begun] == position:
            return len(offsets) - 1 - begun
        return sum(len(offsets) - 1 for _, offsets in self.batches(epoch_key, position))

    def position_of(self, epoch_key: int, number: int) -> int:
        """Return where a batch begins in the epoch's list, by its number; behind the last one, where that ends."""
        return int(self.offsets(epoch_key)[number])

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        begin, end = self.offsets(epoch_key)[number : number + 2].tolist()
        return self.order.take(epoch_key, begin, end)


class GroupPlanner(ABC):
    """Batches formed inside groups of neighbouring positions, each group by itself; the latest one is kept.

    ``starts`` is the first position of each group and, last, the number of samples.
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self.starts = starts
        self.n_samples = int(starts[-1])
        self._latest: tuple[tuple[int, int], Batches] | None = None

    @abstractmethod
    def before(self, epoch_key: int) -> NDArray[np.int64]:
        """Return how many batches come before each group and, last, how many there are, shape ``[groups + 1]``."""

    @abstractmethod
    def plan_group(self, epoch_key: int, group: int) -> Batches:
        """Plan the batches of a group."""

    def group(self, epoch_key: int, group: int) -> Batches:
        """Return the batches of a group."""
        if self._latest is None or self._latest[0] != (epoch_key, group):
            self._latest = (epoch_key, group), self.plan_group(epoch_key, group)
        return self._latest[1]

    def batches(self, epoch_key: int, position: int) -> Iterator[Batches]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        if position >= self.n_samples:
            return
        first = last_below(self.starts, position)
        skip = position - int(self.starts[first])
        indices, offsets = self.group(epoch_key, first)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        for group in range(first + 1, len(self.starts) - 1):
            yield self.group(epoch_key, group)

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        if position >= self.n_samples:
            return 0
        before = self.before(epoch_key)
        if position == 0:
            return int(before[-1])
        group = last_below(self.starts, position)
        _, offsets = self.group(epoch_key, group)
        return int(before[-1] - before[group + 1] + (offsets > position - self.starts[group]).sum())

    def position_of(self, epoch_key: int, number: int) -> int:
        """Return where a batch begins in the epoch's list, by its number; behind the last one, where that ends."""
        before = self.before(epoch_key)
        if number >= before[-1]:
            return self.n_samples
        group = last_below(before, number)
        return int(self.starts[group] + self.group(epoch_key, group)[1][number - int(before[group])])

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        before = self.before(epoch_key)
        group = last_below(before, number)
        indices, offsets = self.group(epoch_key, group)
        inside = number - int(before[group])
        return indices[offsets[inside] : offsets[inside + 1]]


def last_below(ascending: NDArray[np.int64], value: int) -> int:
    """Return the last place whose number is not greater than a value."""
    return int(np.searchsorted(ascending, value, side="right")) - 1


# Samples by size, and their sizes: arrays, or what is read like arrays from a file.
Presorted: TypeAlias = Callable[[], tuple[Any, Any] | None]
Form: TypeAlias = Callable[[NDArray[Any], int], Batches]  # samples of a window, and its key -> their batches


class WindowPlanner(GroupPlanner):
    """Batches of an order, in windows that begin at ``starts``: ``form(samples, key)`` plans one."""

    def __init__(self, order: Order, starts: NDArray[np.int64], form: Form) -> None:
        super().__init__(starts)
        self.order, self.form = order, form
        self._before: tuple[int, NDArray[np.int64]] | None = None  # of the latest epoch

    def before(self, epoch_key: int) -> NDArray[np.int64]:
        """Return how many batches come before each window; all are planned for that, once."""
        if self._before is None or self._before[0] != epoch_key:
            counts = [len(self.group(epoch_key, window)[1]) - 1 for window in range(len(self.starts) - 1)]
            self._before = epoch_key, np.cumsum([0, *counts])
        return self._before[1]

    def plan_group(self, epoch_key: int, group: int) -> Batches:
        """Plan one window."""
        samples = self.order.take(epoch_key, *self.starts[group : group + 2].tolist())
        return self.form(samples, int(fold_in(epoch_key, group)[0]))


class StrataPlanner(GroupPlanner):
    """Batches over samples in strata: every window takes one sample of each, and follows the epoch's plan.

    Args:
        order: Samples by size, stratum by stratum, shape ``[n]``.
        strata: Which sample belongs to which window.
        full: Plans of a window with a sample of every stratum.
        short: Plans of one without a sample of the last; None where those are ``full`` without that sample.
        work: ``work(places, offsets)`` gives the work of batches: places in ``order`` of shape ``[c, depth]``, batch by
            batch, with the same offsets in each row; returns shape ``[c, batches]``.
        ramp: Number of batches of a curriculum, 0 for none.
        listed: Number of batches of the epoch that come before, of another planner.
        descending: Their sizes, where they are one number each.
        balanced_ranks: Number of ranks for which steps are balanced.
    """

    def __init__(
        self,
        order: NDArray[Any],
        strata: Strata,
        full: Packer,
        short: Packer | None,
        work: Work,
        ramp: int = 0,
        listed: int = 0,
        descending: Any = None,
        balanced_ranks: int = 64,
    ) -> None:
        self.descending, self.balanced_ranks = descending, balanced_ranks
        self.by_size, self.strata, self.full, self.short, self.work = order, strata, full, short, work
        self.ramp, self.passed, self.listed = ramp, 0, listed  # passed: batches of the epochs before
        together = max(1, LISTED // strata.depth)
        first = min(strata.n_windows, -(-TOGETHER * ramp // max(1, full.n_batches)))  # that the ramp needs together
        parts = [np.arange(first, strata.n_full, together)]
        parts += [np.arange(max(first, strata.n_full), strata.n_windows, together)]
        # The first window of each group: all full, or all short, but for those of a ramp.
        self.windows = np.concatenate([[0] * (first > 0), *parts, [strata.n_windows]]).astype(np.int64)
        super().__init__(np.array([strata.start(window) for window in self.windows.tolist()]))
        n_short = np.maximum(self.windows - strata.n_full, 0)
        self._before: NDArray[np.int64] = (self.windows - n_short) * full.n_batches + n_short * (
            short or full
        ).n_batches
        self._plans: tuple[int, dict[bool, WindowPlan]] = (-1, {})  # of the latest epoch

    def before(self, epoch_key: int) -> NDArray[np.int64]:  # noqa: ARG002  # the same in all epochs
        """Return how many batches come before each group; known before any group is planned."""
        return self._before

    def plan(self, epoch_key: int, full: bool) -> WindowPlan:
        """Return the plan of the epoch's full or short windows."""
        if self._plans[0] != epoch_key:
            self._plans = epoch_key, {}
        known = self._plans[1]
        if full not in known:
            if full:
                known[full] = self.full.plan(epoch_key)
            else:
                known[full] = self.short.plan(epoch_key) if self.short else self.plan(epoch_key, True).without_last()
        return known[full]

    def at_epoch(self, epoch: int) -> "StrataPlanner":
        """Return the planner of an epoch: where a curriculum stands depends on the epochs before."""
        passed = epoch * int(self._before[-1])
        if min(passed, self.ramp) == min(self.passed, self.ramp):
            return self
        other = copy(self)
        other.passed, other._latest = passed, None
        return other

    def _share(self, before: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of the batches that may come after so many of the epoch."""
        return competence(self.passed + before, self.ramp)

    def plan_group(self, epoch_key: int, group: int) -> Batches:
        """Plan some windows together and shuffle their batches."""
        first, stop = self.windows[group : group + 2].tolist()
        middle = min(max(first, self.strata.n_full), stop)
        taken, works, counts = [], [], []
        for begin, end in ((first, middle), (middle, stop)):
            if begin < end:
                plan = self.plan(epoch_key, begin < self.strata.n_full)
                places = self.strata.places(begin, end, self.strata.shifts(epoch_key), plan.sequence)
                taken.append(places.ravel())
                works.append(self.work(places, plan.offsets).ravel())
                counts.append(np.tile(np.diff(plan.offsets), end - begin))
        listed, work, lengths = np.concatenate(taken), np.concatenate(works), np.concatenate(counts)
        begins = np.cumsum(lengths) - lengths
        key, before = int(fold_in(epoch_key, first, 1)[0]), int(self._before[group])
        share = self._share if self.passed + before < self.ramp else None
        length = chunk_length(work.size, self.balanced_ranks)
        goes_to = shuffle_sorted_chunks(work, key, self.listed + before, length, share)
        comes_from = np.empty_like(goes_to)
        comes_from[goes_to] = np.arange(len(goes_to))
        begins, lengths = begins[comes_from], lengths[comes_from]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        inside = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
        return self.by_size[listed[inside]], offsets


class CurriculumPlanner:
    """Batches of epochs that begin with short samples: windows of those that may come, then the rest in strata.

    A window of the ramp takes samples for a whole number of batches, and is planned like any other. So its batches are
    as full, and the number of them is known once the window is planned.

    Args:
        sized: Sizes ready for planning.
        options: Of the sampler.
        ramp: Steps of the curriculum.
    """

    def __init__(self, sized: PreparedSizes, options: Options, ramp: Ramp) -> None:
        self.sized, self.options, self.ramp = sized, options, ramp
        self.n_samples, self.passed = sized.n_samples, 0  # passed: batches of the epochs before, about
        self._head: tuple[int, WindowPlanner] | None = None  # of the latest epoch
        self._rest: tuple[int, StrataPlanner] | None = None

    @cached_property
    def plain(self) -> StrataPlanner:
        """Plans the epochs behind the curriculum."""
        return in_strata(self.sized, self.options, self.sized.kept, given_windows(self.options, self.n_samples))

    def at_epoch(self, epoch: int) -> "CurriculumPlanner":
        """Return the planner of an epoch: where a curriculum stands depends on the epochs before."""
        passed = epoch * self.plain.count(0, 0) if epoch else 0
        if min(passed, self.ramp.batches) == min(self.passed, self.ramp.batches):
            return self
        other = copy(self)
        other.passed, other._head, other._rest = passed, None, None
        return other

    def batches(self, epoch_key: int, position: int) -> Iterator[Batches]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        for planner in self._planners(epoch_key):
            yield from planner.batches(epoch_key, position)
            position = max(0, position - planner.n_samples)

    def count(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        found = 0
        for planner in self._planners(epoch_key):
            found += planner.count(epoch_key, position)
            position = max(0, position - planner.n_samples)
        return found

    def batch(self, epoch_key: int, number: int) -> NDArray[Any]:
        """Return the samples of one batch of the epoch, by its number."""
        for planner in self._planners(epoch_key):
            if number < (count := planner.count(epoch_key, 0)):
                return planner.batch(epoch_key, number)
            number -= count
        raise IndexError("number must be one of the epoch's batches")

    def position_of(self, epoch_key: int, number: int) -> int:
        """Return where a batch begins in the epoch's list, by its number; behind the last one, where that ends."""
        before = 0
        for planner in self._planners(epoch_key):
            if number < (count := planner.count(epoch_key, 0)):
                return before + planner.position_of(epoch_key, number)
            number, before = number - count, before + planner.n_samples
        return before

    def _planners(self, epoch_key: int) -> Iterator[WindowPlanner | StrataPlanner]:
        """Yield what plans the epoch's list, one part after the other; each is made when it is needed."""
        if self.passed >= self.ramp.batches:
            yield self.plain
            return
        if self._head is None or self._head[0] != epoch_key:
            self._head = epoch_key, self._plan_head(epoch_key)
        head = self._head[1]
        yield head
        if head.n_samples < self.n_samples:
            if self._rest is None or self._rest[0] != epoch_key:
                self._rest = epoch_key, self._plan_rest(head)
            yield self._rest[1]

    def _plan_head(self, epoch_key: int) -> WindowPlanner:
        """Draw the samples of the windows of the ramp."""
        columns, budgets = self._columns()
        density = PACKED_RAMP if self.options.strategy == "packed" else STRATIFIED.full
        stages = (
            Stage(share, np.minimum(density * np.multiply.outer(counts, budgets), UNLIMITED))
            for share, counts in self.ramp.stages(self.passed)
        )

        def amounts(samples: NDArray[Any]) -> NDArray[np.int64]:
            sizes = self.sized.sizes[samples].astype(np.int64).reshape(len(samples), -1)
            return sizes if columns == sizes.shape[1] else np.append(sizes, np.ones((len(sizes), 1), np.int64), axis=1)

        parts = list(draw_stages(shortest_first(self.sized), stages, amounts, epoch_key))
        samples, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])
        order = SliceOrder(len(samples), lambda start, stop: samples[start:stop])
        return WindowPlanner(order, starts, whole_window(self.sized, self.options))

    def _plan_rest(self, head: WindowPlanner) -> StrataPlanner:
        """Return the planner of the samples that the ramp does not take."""
        rest = left_of(self.sized, head.order.take(0, 0, head.n_samples))
        n_windows = given_windows(self.options, len(rest))
        return in_strata(self.sized, self.options, rest, n_windows, listed=self.ramp.batches - self.passed)

    def _columns(self) -> tuple[int, NDArray[np.int64]]:
        """Return how many limits samples count against, and the limits."""
        budgets = np.array(self.sized.limits.budgets, np.int64)
        if self.sized.limits.most_items < self.n_samples:
            budgets = np.append(budgets, self.sized.limits.most_items)
        return len(budgets), budgets


# The batches of every epoch, none of them planned beforehand.
Planner: TypeAlias = NextFitPlanner | GroupPlanner | CurriculumPlanner


def make_planner(
    sized: PreparedSizes,
    options: Options,
    order: Order | None = None,
    ramp: Ramp | None = None,
    presorted: Presorted | None = None,
) -> Planner:
    """Choose how batches are planned; ``order`` is that of a user's sampler, None for one of our own.

    ``presorted`` returns the samples as `sort_samples` would, where somebody has sorted them, else None.
    """
    n_samples = sized.n_samples if order is None else order.n_samples
    if n_samples and order is None and options.shuffle and options.strategy != "sequential":
        if ramp is None or options.strategy == "bucketed":  # whose batches come in another order
            n_windows = given_windows(options, n_samples)
            return in_strata(sized, options, sized.kept, n_windows, ramp=ramp, presorted=presorted)
        return CurriculumPlanner(sized, options, ramp)
    if order is None:
        order = (ShuffledOrder if options.shuffle else natural_order)(n_samples, sized.kept)
    if options.strategy == "sequential" or not n_samples:
        return NextFitPlanner(order, sized.sizes, sized.limits)
    n_windows = max(1, round(n_samples / (options.window or window_length(sized, options))))
    return WindowPlanner(order, np.arange(n_windows + 1) * n_samples // n_windows, whole_window(sized, options))


def whole_window(sized: PreparedSizes, options: Options) -> Form:
    """Return a function that plans the samples of a window by themselves."""

    def form(samples: NDArray[Any], key: int) -> Batches:
        return in_strata(sized, options, samples, n_windows=1, key=key).group(key, 0)

    return form


def given_windows(options: Options, n_samples: int) -> int | None:
    """Return the number of windows where their length is given."""
    return None if options.window is None else max(1, round(n_samples / options.window))


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
    n_windows: int | None,
    key: int | None = None,
    ramp: Ramp | None = None,
    listed: int = 0,
    presorted: Presorted | None = None,
) -> StrataPlanner:
    """Plan over some samples in strata, or over all; ``key`` is that of a window that is planned only once.

    ``presorted`` returns the samples as `sort_samples` would, where somebody has sorted them, else None.
    """
    found: tuple[Any, Any] | None = None if presorted is None else presorted()
    if found is None and sized.sizes.ndim == 1:
        found = sort_samples(sized.sizes, samples)
    if found is not None:
        order, descending = found
        strata = Strata(len(order), n_windows or usual_windows(descending, sized.limits, options.strategy))
        largest = descending[strata.firsts()][:, None]
    else:
        sizes = sized.sizes if samples is None else sized.sizes[samples]
        strata = Strata(len(sizes), n_windows or usual_windows(sizes, sized.limits, options.strategy))
        by_function = len(sized.limits.budgets) < sized.columns  # one budget, for a cost of all columns together
        scale = sizes.max(axis=0).tolist() if by_function else sized.limits.budgets
        order, largest = kd_order(sizes, scale, strata, ranked=not by_function)
        descending = sizes[order]
        order = order if samples is None else samples[order].astype(order.dtype)
    full = choose_packer(largest, sized.limits, options, key)
    short: Packer | None = full
    if isinstance(full, RandomPacking) and full.last_shares:
        short = None
    elif strata.n_full < strata.n_windows and strata.depth > 1:
        if isinstance(full, SortedPacking):
            short = full.without_last()
        else:
            short = choose_packer(largest[:-1], sized.limits, options, key)
    if sized.work is None:
        work = sized.cost.work(descending, sized.limits)
    elif isinstance(order, np.ndarray):
        work = given_work(sized.work[order])
    else:  # in a file that all processes share: a list of their work would be each one's own
        work = work_of_stored(sized.work, order)
    kept = descending if sized.sizes.ndim == 1 else None
    ramp_batches = ramp.batches if ramp else 0
    return StrataPlanner(order, strata, full, short, work, ramp_batches, listed, kept, options.balanced_ranks)


def work_of_stored(work: NDArray[np.float64], samples: NDArray[Any]) -> Work:
    """Return a function to the work of batches of places in a list of samples, by the work of each sample."""
    return lambda places, offsets: np.add.reduceat(work[samples[places]], offsets[:-1], axis=1)


def choose_packer(largest: NDArray[Any], limits: Limits, options: Options, key: int | None) -> Packer:
    """Choose how a window is planned: packed at random, or cut in descending order."""
    if options.strategy != "bucketed":
        columns, budgets = largest.astype(np.int64), np.array(limits.budgets, np.int64)
        if limits.most_items < len(largest):  # one more column in which every sample counts as one
            columns = np.concatenate([columns, np.ones((len(columns), 1), np.int64)], axis=1)
            budgets = np.append(budgets, limits.most_items)
        return RandomPacking(columns, budgets, PACKED if options.strategy == "packed" else STRATIFIED, key)
    if options.shapes is not None and limits.capacity is not None:  # a group for each
        return SortedPacking(cut_by_counts(limits.capacity(largest[:, 0]), limits), equal_groups(largest))
    if limits.capacity is None or largest.shape[1] > 1:
        column = largest[:, 0] if largest.shape[1] == 1 else largest
        return SortedPacking(next_fit(column, limits), equal_groups(largest))
    counts = largest_counts(largest[:, 0], limits.capacity, replace(limits, most_items=UNLIMITED))
    longest = round_up(largest[:, 0], options.length_multiple)
    return padded_packing(counts, longest, limits, tight=options.window is not None)


def fewest_batches(sizes: NDArray[Any], limits: Limits) -> float:
    """Return the volume bound on the number of batches."""
    totals = np.atleast_1d(sizes.sum(axis=0, dtype=np.float64))
    filled = float((totals / np.maximum(limits.budgets, 1)).max())
    return max(filled, len(sizes) / limits.most_items)


def usual_windows(sizes: NDArray[Any], limits: Limits, strategy: str) -> int:
    """Return the number of windows that suits a strategy, for sizes in descending order.

    Where no shuffle inside groups varies bucketed batches, windows are short: two samples of a batch share
    one again as often as by chance, times the batches of a window.
    """
    if strategy == "packed":
        return packed_windows(sizes, limits)
    columns = 1 if sizes.ndim == 1 else sizes.shape[1]
    if strategy != "bucketed":
        windows = fewest_batches(sizes, limits) / batches_of_window(columns)
    elif limits.capacity is None:
        windows = fewest_batches(sizes, limits) / SHORT
    elif columns == 1:
        windows = len(sizes) / BUCKETED
    else:  # neighbours in several columns need more of them to be alike in all
        windows = float((1 / limits.capacity(sizes)).sum()) / (8 * SHORT)
    return max(1, min(round(windows), len(sizes)))


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
            waste = count * np.ceil(filled) / max(fewest, 1e-9) - 1
            if waste < least or (waste == least and best > 1):  # of equal ones the shorter window
                best, least = count, waste
        if least <= PACKED_WASTE or middle == 1:
            break
    return best
