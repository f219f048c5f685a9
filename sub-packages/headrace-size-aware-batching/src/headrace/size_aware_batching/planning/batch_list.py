"""The batches of an epoch, or of a part of it, found at any position without planning those before."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching.planning.costs import Work
from headrace.size_aware_batching.planning.curriculum import TOGETHER, competence
from headrace.size_aware_batching.planning.distribution import chunk_length, shuffle_sorted_chunks
from headrace.size_aware_batching.planning.last_step import Batches
from headrace.size_aware_batching.planning.limits import Limits
from headrace.size_aware_batching.planning.order import Order, SliceOrder
from headrace.size_aware_batching.planning.strata import Strata, index_type, narrowed
from headrace.size_aware_batching.planning.windows import Packer, WindowPlan

FIRST_CUT, LONGEST_CUT = 2**14, 2**18  # samples cut at a time: few at first, so that the first batch comes soon
# Samples that are listed together, at most, unless one window holds more. 40,000, 170,000, 700,000: the largest rank of
# a step has 1.0003, 1.0001, 1.0000 times the mean work.
SAMPLES_SHUFFLED_TOGETHER = 170_000
LOOKUP_RATIO = 64  # times as many samples there are as are taken away, where these are looked up one by one


class Ascending(Protocol):
    """Numbers that do not fall: an array, or what makes them as they are looked up."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> Any: ...


class BatchList(ABC):
    """Batches by position; nothing of it changes, and what was planned last is kept."""

    n_samples: int

    @abstractmethod
    def batches(self, position: int = 0) -> Iterator[Batches]:
        """Yield the batches from a position on; the first may be the rest of a batch."""

    @abstractmethod
    def count(self, position: int = 0) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""

    @abstractmethod
    def position_of(self, number: int) -> int:
        """Return where a batch begins, by its number; after the last one, where the list ends."""

    @abstractmethod
    def batch(self, number: int) -> NDArray[Any]:
        """Return the samples of one batch, by its number."""

    def span(self, first: int, stop: int) -> Batches:
        """Return some batches, by their numbers."""
        parts, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        missing = stop - first
        for samples, offsets in self.batches(self.position_of(first)) if missing else ():
            taken = offsets[: missing + 1]
            parts.append(samples[: taken[-1]])
            counts.append(np.diff(taken))
            missing -= len(taken) - 1
            if not missing:
                break
        return np.concatenate(parts), np.cumsum([0, *np.concatenate(counts)])

    def labels_of_batches(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Return the label of each batch, by those of the samples: batches hold samples of one label."""
        parts = [labels[samples[offsets[:-1]]] for samples, offsets in self.batches()]
        return np.concatenate([labels[:0], *parts])

    def samples(self, stop: int) -> NDArray[Any]:
        """Return the samples up to a position, in the order of the list; only their windows are planned."""
        missing, parts = stop, [np.zeros(0, np.int64)]
        for indices, _ in self.batches() if missing else ():
            parts.append(indices[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        return np.concatenate(parts)

    def joined(self, n_samples: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return all batches as indices below ``n_samples`` and offsets, written in place as they are planned."""
        indices = np.empty(self.n_samples, index_type(n_samples))
        counts, filled = [np.zeros(0, np.int32)], 0
        for part, offsets in self.batches():
            indices[filled : filled + len(part)] = part
            counts.append(np.diff(offsets).astype(np.int32))
            filled += len(part)
        return indices[:filled], np.concatenate([[0], np.cumsum(np.concatenate(counts), dtype=np.int64)])

    def sorted_without(
        self, _samples: NDArray[Any], _sizes: NDArray[Any], _n_left: int
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return the samples that are left without some and their sizes, largest first, if the list has sorted them.

        None if it has not. ``sizes`` are those of all samples of the dataset, ``n_left`` is how many are left.
        """
        return None

    # What only lists of a user's order are asked.

    @property
    def order(self) -> SliceOrder:
        """The order that the list was made of."""
        raise TypeError(f"a list with an order must be asked for it, got a {type(self).__name__}")

    def begun(self, position: int) -> tuple[NDArray[Any], int]:
        """Return the remaining samples of the window that holds a position, and the end of that window."""
        return np.zeros(0, np.int64), position

    def position_of_draw(self, draw: int) -> int:
        """Return the first position that may hold a draw of the order: where its window begins."""
        return self.order.place_of(draw)

    def first_unread(self, position: int) -> int:
        """Return the first draw of the order that was not read for what comes before a position."""
        behind = self.window_end(position)
        return self.order.draw(behind - 1) + 1 if behind else self.order.read

    def window_end(self, position: int) -> int:
        """Return where the windows end that have begun before a position."""
        return position

    def rest_of_order(self, position: int) -> SliceOrder:
        """Return the remaining order: the rest of the current window, then the following windows."""
        order, (begun, behind) = self.order, self.begun(position)
        left, read = len(begun), self.first_unread(position)

        def give(start: int, stop: int) -> NDArray[Any]:
            own = begun[start:stop]
            if stop <= left:
                return own
            taken = order.take(behind + max(start - left, 0), behind + stop - left)
            return np.concatenate([own, taken]) if len(own) else taken

        def draw(place: int) -> int:
            return read - 1 if place < left else order.draw(behind + place - left)

        return SliceOrder(left + order.n_samples - behind, give, draw=draw, read=read)


class OrderedList(BatchList):
    """Batches in the order's own order. From any batch's first position on, they come out the same."""

    def __init__(self, order: Order, sizes: NDArray[Any], limits: Limits) -> None:
        self._order, self.sizes, self.limits = order, sizes, limits
        self.n_samples = order.n_samples

    @property
    def order(self) -> SliceOrder:
        """The order that is cut into batches."""
        return self._order  # type: ignore[return-value]  # asked only where a user's order was given

    def batches(self, position: int = 0) -> Iterator[Batches]:
        """Yield the batches after the first ``position`` samples."""
        length, reach = self.n_samples, FIRST_CUT
        while position < length:
            stop = min(length, position + reach)
            samples = self._order.take(position, stop)
            offsets = self.limits.next_fit(self.sizes[samples], last=stop == length)
            reach = min(2 * reach, LONGEST_CUT) if len(offsets) > 1 else 2 * reach
            if len(offsets) > 1:
                yield samples[: offsets[-1]], offsets
                position += int(offsets[-1])

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where all batches begin; they are planned for that, once."""
        lengths = [np.diff(offsets) for _, offsets in self.batches()]
        return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))

    def count(self, position: int = 0) -> int:
        """Return the number of batches from a position on."""
        begun = int(np.searchsorted(self.offsets, position))
        if self.offsets[begun] == position:
            return len(self.offsets) - 1 - begun
        return sum(len(offsets) - 1 for _, offsets in self.batches(position))

    def position_of(self, number: int) -> int:
        """Return where a batch begins."""
        return int(self.offsets[number])

    def batch(self, number: int) -> NDArray[Any]:
        """Return the samples of one batch."""
        return self._order.take(*self.offsets[number : number + 2].tolist())


class GroupedList(BatchList):
    """Batches formed inside groups of neighbouring positions, each group by itself; the latest one is kept.

    ``starts`` is the first position of each group and, last, the number of samples.
    """

    def __init__(self, starts: Ascending) -> None:
        self.starts, self.n_samples = starts, int(starts[-1])
        self._latest: tuple[int, Batches] | None = None

    @property
    @abstractmethod
    def before(self) -> NDArray[np.int64]:
        """Number of batches before each group and, last, of all, shape ``[groups + 1]``."""

    @abstractmethod
    def plan_group(self, group: int) -> Batches:
        """Plan the batches of a group."""

    def group(self, group: int) -> Batches:
        """Return the batches of a group."""
        if self._latest is None or self._latest[0] != group:
            self._latest = group, self.plan_group(group)
        return self._latest[1]

    def batches(self, position: int = 0) -> Iterator[Batches]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        if position >= self.n_samples:
            return
        first = index_at(self.starts, position)
        skip = position - int(self.starts[first])
        indices, offsets = self.group(first)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        for group in range(first + 1, len(self.starts) - 1):
            yield self.group(group)

    def count(self, position: int = 0) -> int:
        """Return the number of batches from a position on, a batch that is begun counted as one."""
        if position >= self.n_samples:
            return 0
        if position == 0:
            return int(self.before[-1])
        group = index_at(self.starts, position)
        _, offsets = self.group(group)
        return int(self.before[-1] - self.before[group + 1] + (offsets > position - self.starts[group]).sum())

    def position_of(self, number: int) -> int:
        """Return where a batch begins; after the last one, where the list ends."""
        if number >= self.before[-1]:
            return self.n_samples
        group = index_at(self.before, number)
        return int(self.starts[group] + self.group(group)[1][number - int(self.before[group])])

    def batch(self, number: int) -> NDArray[Any]:
        """Return the samples of one batch."""
        group = index_at(self.before, number)
        indices, offsets = self.group(group)
        inside = number - int(self.before[group])
        return indices[offsets[inside] : offsets[inside + 1]]


def index_at(ascending: Ascending, value: int) -> int:
    """Return the last place whose number is not greater than a value."""
    return bisect_right(ascending, value) - 1


PlanWindow: TypeAlias = Callable[[NDArray[Any], int], Batches]  # samples of a window, and its key -> their batches


class WindowedList(GroupedList):
    """Batches of an order, in windows that begin at ``starts``; ``plan_window(samples, key)`` plans one."""

    def __init__(self, order: Order, starts: NDArray[np.int64], plan_window: PlanWindow, key: int) -> None:
        super().__init__(starts)
        self._order, self.plan_window, self.key = order, plan_window, key
        self.starts: NDArray[np.int64] = starts

    @property
    def order(self) -> SliceOrder:
        """The order of the windows."""
        return self._order  # type: ignore[return-value]  # asked only where a user's order was given

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """Number of batches before each window; all are planned for that, once."""
        return np.cumsum([0, *(len(self.group(window)[1]) - 1 for window in range(len(self.starts) - 1))])

    def plan_group(self, group: int) -> Batches:
        """Plan one window."""
        samples = self._order.take(*self.starts[group : group + 2].tolist())
        return self.plan_window(samples, int(fold_in(self.key, group)[0]))

    def window_end(self, position: int) -> int:
        """Return where the windows end that have begun before a position."""
        return int(self.starts[np.searchsorted(self.starts, position)])

    def begun(self, position: int) -> tuple[NDArray[Any], int]:
        """Return the remaining samples of the window that holds a position, and the end of that window."""
        behind = self.window_end(position)
        if behind == position:
            return super().begun(position)
        indices, _ = self.group(int(np.searchsorted(self.starts, position)) - 1)
        return indices[len(indices) - (behind - position) :], behind

    def position_of_draw(self, draw: int) -> int:
        """Return where the window of a draw begins."""
        place = self.order.place_of(draw)
        return int(self.starts[index_at(self.starts, place)]) if place < self.n_samples else place


class SortedStrata:
    """Samples sorted into strata, which the lists of all epochs share: every window takes one sample of each stratum.

    Args:
        by_size: Samples by size, stratum by stratum, shape ``[n]``.
        strata: Which sample belongs to which window.
        full: Plans of a window with a sample of every stratum.
        short: Plans of one without a sample of the last; None where those are ``full`` without that sample.
        work: ``work(places, offsets)`` gives the work of batches: places in ``by_size`` of shape ``[c, depth]``, batch
            by batch, with the same offsets in each row; returns shape ``[c, batches]``.
        ramp: Number of batches of a curriculum, 0 for none.
        batches_before: Number of batches of the epoch that come before, of another list.
        descending: Their sizes, where they are one number each.
    """

    def __init__(
        self,
        by_size: NDArray[Any],
        strata: Strata,
        full: Packer,
        short: Packer | None,
        work: Work,
        ramp: int,
        batches_before: int,
        descending: Any,
    ) -> None:
        self.by_size, self.strata, self.full, self.short, self.work = by_size, strata, full, short, work
        self.ramp, self.batches_before, self.descending = ramp, batches_before, descending
        together = max(1, SAMPLES_SHUFFLED_TOGETHER // strata.depth)
        first = min(strata.n_windows, -(-TOGETHER * ramp // max(1, full.n_batches)))  # that the ramp needs together
        parts = [np.arange(first, strata.n_full, together)]
        parts += [np.arange(max(first, strata.n_full), strata.n_windows, together)]
        # The first window of each group: all full, or all short, but for those of a ramp.
        self.windows = np.concatenate([[0] * (first > 0), *parts, [strata.n_windows]]).astype(np.int64)
        self.starts = np.array([strata.start(window) for window in self.windows.tolist()])
        n_short = np.maximum(self.windows - strata.n_full, 0)
        self.before: NDArray[np.int64] = (self.windows - n_short) * full.n_batches + n_short * (short or full).n_batches

    @property
    def n_batches(self) -> int:
        """Number of batches of every epoch."""
        return int(self.before[-1])

    def without(
        self, gone: NDArray[Any], sizes: NDArray[Any], n_samples: int
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Reuse the sorted order without some samples, in any order; None if other samples are missing.

        ``sizes`` are those of all samples of the dataset, ``n_samples`` how many are left.
        """
        if (descending := self.descending) is None:
            return None
        by_size = np.asarray(self.by_size)
        if isinstance(descending, np.ndarray) and LOOKUP_RATIO * len(gone) < len(descending):
            there = np.ones(len(descending), bool)
            there[_places_by_size(by_size, descending, gone, sizes[gone])] = False
        else:
            known = np.ones(len(sizes), bool)
            known[gone] = False
            there = known[by_size]
        found: NDArray[Any] = by_size[there]
        if len(found) != n_samples:
            return None
        # Those of a file are not in one array.
        return found, narrowed(descending[there] if isinstance(descending, np.ndarray) else sizes[found])


class StrataList(GroupedList):
    """The batches of an epoch over sorted strata.

    Args:
        sorted_strata: What all epochs share.
        key: Of the epoch.
        balanced_ranks: Number of ranks for which steps are balanced.
        passed: Number of batches of the epochs before, for a curriculum.
    """

    def __init__(self, sorted_strata: SortedStrata, key: int, balanced_ranks: int, passed: int = 0) -> None:
        super().__init__(sorted_strata.starts)
        self.sorted_strata, self.key, self.balanced_ranks, self.passed = sorted_strata, key, balanced_ranks, passed
        self._plans: dict[bool, WindowPlan] = {}

    @property
    def before(self) -> NDArray[np.int64]:
        """Number of batches before each group; known before any is planned."""
        return self.sorted_strata.before

    def plan(self, full: bool) -> WindowPlan:
        """Return the plan of the epoch's full or short windows."""
        if full not in self._plans:
            if full:
                self._plans[full] = self.sorted_strata.full.plan(self.key)
            else:
                short = self.sorted_strata.short
                self._plans[full] = short.plan(self.key) if short else self.plan(True).without_last()
        return self._plans[full]

    def sorted_without(
        self, samples: NDArray[Any], sizes: NDArray[Any], n_left: int
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return the samples that are left without some and their sizes, largest first."""
        return self.sorted_strata.without(samples, sizes, n_left)

    def _share(self, before: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of the batches that may come after so many of the epoch."""
        return competence(self.passed + before, self.sorted_strata.ramp)

    def plan_group(self, group: int) -> Batches:
        """Plan some windows together and shuffle their batches."""
        in_order, strata = self.sorted_strata, self.sorted_strata.strata
        first, stop = in_order.windows[group : group + 2].tolist()
        middle = min(max(first, strata.n_full), stop)
        taken, works, counts = [], [], []
        for begin, end in ((first, middle), (middle, stop)):
            if begin < end:
                plan = self.plan(begin < strata.n_full)
                places = strata.places(begin, end, strata.shifts(self.key), plan.sequence)
                taken.append(places.ravel())
                works.append(in_order.work(places, plan.offsets).ravel())
                counts.append(np.tile(np.diff(plan.offsets), end - begin))
        places, work, lengths = np.concatenate(taken), np.concatenate(works), np.concatenate(counts)
        begins = np.cumsum(lengths) - lengths
        key, before = int(fold_in(self.key, first, 1)[0]), int(self.before[group])
        share = self._share if self.passed + before < in_order.ramp else None
        length = chunk_length(work.size, self.balanced_ranks)
        goes_to = shuffle_sorted_chunks(work, key, in_order.batches_before + before, length, share)
        comes_from = np.empty_like(goes_to)
        comes_from[goes_to] = np.arange(len(goes_to))
        inside, offsets = in_sequence(begins[comes_from], lengths[comes_from])
        return in_order.by_size[places[inside]], offsets


def in_sequence(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of batches that begin at these places of a list, one after the other, and their offsets.

    >>> in_sequence(np.array([3, 0]), np.array([2, 3]))[0].tolist()
    [3, 4, 0, 1, 2]
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths), offsets


class ChainedList(BatchList):
    """One list after another, which is made when it is needed."""

    def __init__(self, first: BatchList, n_samples: int, behind: Callable[[], BatchList]) -> None:
        self.first, self.n_samples, self._behind = first, n_samples, behind

    @cached_property
    def _second(self) -> BatchList:
        return self._behind()

    def _lists(self) -> Iterator[BatchList]:
        yield self.first
        if self.first.n_samples < self.n_samples:
            yield self._second

    def batches(self, position: int = 0) -> Iterator[Batches]:
        """Yield the batches from a position on."""
        for each in self._lists():
            yield from each.batches(position)
            position = max(0, position - each.n_samples)

    def count(self, position: int = 0) -> int:
        """Return the number of batches from a position on."""
        found = 0
        for each in self._lists():
            found += each.count(position)
            position = max(0, position - each.n_samples)
        return found

    def batch(self, number: int) -> NDArray[Any]:
        """Return the samples of one batch."""
        for each in self._lists():
            if number < (count := each.count()):
                return each.batch(number)
            number -= count
        raise IndexError("number must be one of the epoch's batches")

    def position_of(self, number: int) -> int:
        """Return where a batch begins; after the last one, where the list ends."""
        before = 0
        for each in self._lists():
            if number < (count := each.count()):
                return before + each.position_of(number)
            number, before = number - count, before + each.n_samples
        return before


def _places_by_size(
    by_size: NDArray[Any], descending: NDArray[Any], samples: NDArray[Any], sizes: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the places of those samples that are there, by halving: largest first, equal ones in their order."""
    low, high = np.zeros(len(samples), np.int64), np.full(len(samples), len(by_size), np.int64)
    for _ in range(len(by_size).bit_length()):
        middle = np.minimum((low + high) // 2, len(by_size) - 1)
        before = descending[middle] > sizes
        before |= (descending[middle] == sizes) & (by_size[middle] < samples)
        before &= low < high
        low, high = np.where(before, middle + 1, low), np.where(before, high, np.minimum(middle, high))
    inside = low < len(by_size)
    places: NDArray[np.int64] = low[inside][by_size[low[inside]] == samples[inside]]
    return places
