"""One optimizer step: samples into R ranks times K micro-batches, all budgets kept, the work balanced. Pure.

Everything that is compared is an integer, so that ranks on different processors plan alike.

1. `fewest`           a lower bound on the micro-batches gives K.
2. `row_targets`      the highest work of each micro-step, from a linear program with K unknowns. Its optimum is a lower
                      bound, and its solution is what the next step aims at: nearly the whole quality is here.
3. `fill_to_targets`  samples, largest first, to the micro-batch that lacks most of its target and has room.
4. `repair`           only if that left some over a budget: the swaps of the epoch's planner; then its packing; then
                      first fit; then the next K.
5. `polish`           swaps and exchanges of two samples for two between pairs of micro-batches, while that pays.
6. `assign_ranks`     the micro-batches of a micro-step onto ranks, so that their totals are even, too.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import ge
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.costs import columns_of
from headrace.size_aware_batching.planning.limits import Limits
from headrace.size_aware_batching.planning.packing import first_fit, levels, lower_bound, martello_toth, pack
from headrace.size_aware_batching.planning.repair import Score, best_swaps, members, repair
from headrace.size_aware_batching.planning.units import FINE

Meet = Literal["micro_batch", "step"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """The samples of a step, the largest first, in whole units.

    ``sizes`` ``[n, d]`` are bounded by ``budgets`` ``[d]`` in a micro-batch; ``work`` ``[n]`` is what is balanced, the
    sum of its ``parts`` ``[n, c]`` where there are several kinds.
    """

    sizes: Ints
    budgets: Ints
    work: Ints
    parts: Ints | None = None

    def __len__(self) -> int:
        return len(self.work)

    def of(self, chosen: Ints) -> Samples:
        """Return some of the samples, in this order."""
        parts = None if self.parts is None else self.parts[chosen]
        return Samples(self.sizes[chosen], self.budgets, self.work[chosen], parts)


@dataclass(frozen=True)
class Assignment:
    """Rank and micro-batch of each sample, how many micro-batches a rank has, and bounds of this and the objective."""

    rank: Ints
    micro_batch: Ints
    n_micro_batches: int
    fewest: int
    bound: int  # in units of `whole_work`
    width: Ints | None = None  # ranks that run a sample together, from ``rank`` on


def binding_columns(sizes: Ints, budgets: Ints) -> tuple[Ints, Ints]:
    """Return the columns whose budget all samples together exceed, in units so large that sums are exact in float64.

    What fits by itself does so in these units, too.
    """
    totals = np.array([int(column.sum()) for column in sizes.T])
    binding = totals > budgets
    if not binding.any():
        return np.zeros((len(sizes), 1), np.int64), np.ones(1, np.int64)
    sizes, budgets = sizes[:, binding], budgets[binding]
    unit = np.maximum(-(-budgets // FINE), 1)
    fit, budgets = sizes <= budgets, np.maximum(budgets // unit, 1)
    sizes = -(-sizes // unit)
    return np.where(fit, np.minimum(sizes, budgets), sizes), budgets


def largest_first(sizes: Ints, limits: Limits, work: Ints, parts: Ints | None = None) -> tuple[Ints, Samples]:
    """Return samples sorted by the largest share of a budget that each takes, and their order."""
    columns, budgets = limits.with_counts(columns_of(sizes).astype(np.int64), len(sizes))
    columns, budgets = binding_columns(columns, budgets)
    order = np.lexsort((-work, -(columns / budgets).max(axis=1)))
    return order, Samples(columns, budgets, work, parts).of(order)


def whole_work(work: NDArray[np.float64]) -> Ints:
    """Scale works by a power of two to integers."""
    whole: Ints = np.rint(np.ldexp(work, work_exponent(work))).astype(np.int64)
    return whole


def work_exponent(work: NDArray[np.float64]) -> int:
    """Return the power of two to scale works by, so that no sum of sums of the integers leaves 62 bits."""
    return 61 - 2 * max(len(work).bit_length(), 9) - int(np.frexp(work.max(initial=0.0))[1])


def fewest(samples: Samples) -> int:
    """Return a number of micro-batches that no packing goes below: volume, counts and L2 of each column."""
    columns = zip(samples.sizes.T, samples.budgets.tolist(), strict=True)
    return max(martello_toth(column, budget) for column, budget in columns)


# Targets and bounds.

ASKED = 2**20  # pairs of samples that a bound looks at, at most
FINENESS = 14  # targets are found to one part of the whole work in 2**14


@dataclass(frozen=True)
class Column:
    """One column of sizes, the largest first and none of them 0, with the work of its samples."""

    size: Ints
    work: Ints
    budget: int

    @classmethod
    def from_sizes(cls, sizes: Ints, work: Ints, budget: int) -> Column:
        """Sort a column; where a size is 0, give each sample a share of a finer unit, which changes nothing."""
        budget = min(budget, max(1, int(sizes.sum())))
        if not len(sizes) or sizes.min() == 0:
            finer = len(sizes) + 1
            sizes, budget = sizes * finer + 1, budget * finer + len(sizes)
        order = np.lexsort((-work, -sizes))
        return cls(sizes[order], work[order], budget)


def row_targets(samples: Samples, n_rows: int, n_ranks: int) -> tuple[Ints, int]:
    """Return the highest work that each micro-step should have, descending, and the least sum that they can have.

    Number all micro-batches by work, v[0] >= v[1] >= ...; micro-steps of R neighbours are best, so that the objective
    is the sum of M[k] = v[kR].

    - From below: the i + 1 largest samples fill more than j = ceil((i + 1) / (budget // size[i])) - 1 micro-batches, so
      v[j] is at least the least work among them. None is empty, so v[j] is at least the (m - j)th smallest work.
    - From above: a micro-batch with a sample over half of the budget has room for the rest of the budget, at the
      highest density of work. Any other micro-batch holds at most one budget, at the highest density of the samples up
      to half of it. The first j micro-steps hold no more work than these bounds together. They also hold no more than
      the densest samples that fill as many budgets.
    - The whole work is at most the sum over k and i of min(M[k], up[kR + i]). The least sum of M that allows this
      raises first what counts for most micro-batches of its row: it is concave, so greedy is optimal.
    """
    n_batches, total = n_rows * n_ranks, int(samples.work.sum())
    low = np.zeros(n_batches, np.int64)
    ordered = np.sort(samples.work)
    if len(samples) >= n_batches:
        low = ordered[:n_batches][::-1].copy()
    up = np.full(n_batches, total, np.int64)
    filled = np.full(n_rows + 1, total, np.int64)
    for sizes, budget in zip(samples.sizes.T, samples.budgets.tolist(), strict=True):
        column = Column.from_sizes(sizes, samples.work, budget)
        low, (highest, together) = np.maximum(low, at_least(column, n_batches)), at_most(column, n_batches)
        up = np.minimum(up, highest)
        filled = np.minimum(filled, together[::n_ranks])
    up = np.minimum(up, total)
    filled[1:] = np.minimum(filled[1:], np.cumsum(up.reshape(n_rows, n_ranks).sum(axis=1)))
    filled[0] = 0
    rows = up.reshape(n_rows, n_ranks)
    least = np.maximum.accumulate(low[::-1])[::-1][::n_ranks].copy()
    below = np.append(np.cumsum(np.minimum(least[:, None], rows).sum(axis=1)[::-1])[::-1], 0)
    missing = max(0, total - int((filled + below).min()))
    bound = int(least.sum()) + -(-missing // n_ranks)

    def raised(at_once: int) -> Ints:
        """Return the highest works when all is raised that counts for so many micro-batches of its row."""
        return np.maximum(least, rows[:, at_once - 1]) if at_once <= n_ranks else least

    def held(highest: Ints) -> int:
        return int(np.minimum(highest[:, None], rows).sum())

    few, many = 1, n_ranks + 1  # the largest number for which all work is held; with ``many`` it is not
    if held(raised(many)) >= total:
        return least, max(bound, int(least.sum()))
    while many - few > 1:
        middle = (few + many) // 2
        if held(raised(middle)) >= total:
            few = middle
        else:
            many = middle
    before, after = raised(few + 1), raised(few)
    bound = max(bound, int(before.sum()) + -(-(total - held(before)) // few))
    below_level, level = int(before.min()), int(after.max())
    while level - below_level > 1 + (total >> FINENESS):
        middle = (below_level + level) // 2
        if held(np.clip(middle, before, after)) >= total:
            level = middle
        else:
            below_level = middle
    return np.clip(level, before, after), bound


def at_least(column: Column, n_batches: int) -> Ints:
    """Return what the j-th heaviest micro-batch has at least: the largest samples need several."""
    low = np.zeros(n_batches, np.int64)
    beyond = needed_by_largest(column, 2 * n_batches) - 1
    inside = beyond < n_batches
    np.maximum.at(low, beyond[inside], np.minimum.accumulate(column.work[: len(beyond)])[inside])
    return low


def needed_by_largest(column: Column, most: int) -> Ints:
    """Return how many micro-batches the i + 1 largest samples need at least, for the first so many i.

    Those over half of the budget have one each. Beside these, and elsewhere, fit only so many that are not smaller than
    the i-th; nor more than there is room for.
    """
    size, budget = column.size[:most], column.budget
    needed = np.arange(1, len(size) + 1)
    n_large = int(np.searchsorted(-column.size, -(budget // 2), "left"))
    needed[n_large:] = min(n_large, len(size))
    if n_large < len(size):
        large = size[:n_large]
        asked = np.linspace(n_large, len(size) - 1, min(len(size) - n_large, 1 + ASKED // (n_large + 1))).astype(
            np.int64
        )
        least = size[asked]
        beside = (budget - large)[None, :] // least[:, None]
        others = asked + 1 - n_large - beside.sum(axis=1)
        room = np.where(beside > 0, budget - large, 0).sum(axis=1)
        left = np.cumsum(size[n_large:])[asked - n_large] - room
        further = np.maximum(-(-others // (budget // least)), -(-left // budget))
        needed[asked] = n_large + np.maximum(0, further)
    return np.maximum.accumulate(needed)


def at_most(column: Column, n_batches: int) -> tuple[Ints, Ints]:
    """Return what the j-th heaviest micro-batch has at most, shape ``[m]``, and the first j together, ``[m + 1]``."""
    size, work, budget = column.size, column.work, column.budget
    n_large = int(np.searchsorted(-size, -(budget // 2), "left"))  # samples of which no two share
    density = np.append(np.maximum.accumulate((work / size)[::-1])[::-1], 0.0)  # the best from here on
    with_large = min(n_large, n_batches)
    # Rounding is to the nearest, and a density is used once: two units more are on the safe side.
    most = min(float(budget * density[n_large]) * (1 + 2.0**-50) + 2, 2.0**61)
    up = np.full(n_batches, int(most), np.int64)
    room = budget - size[:with_large]
    beside = room * density[np.searchsorted(-size, -room, "left")]
    large = work[:with_large] + np.ceil(beside * (1 + 2.0**-50) + 2).astype(np.int64)
    up[:with_large] = large
    together = densest(column, np.arange(n_batches + 1) * budget)
    if n_large < len(size):  # without a large one they hold the densest of the others
        others = Column(size[n_large:], work[n_large:], budget)
        each = np.diff(densest(others, np.arange(n_batches + 1) * budget)) + 3
        merged = np.sort(np.concatenate([large, each]))[::-1][:n_batches]
        together = np.minimum(together, np.append(0, np.cumsum(merged)))
    return np.sort(up)[::-1], together


def densest(column: Column, room: Ints) -> Ints:
    """Return the work that fits at most into so much room: the densest samples, the last one in part."""
    order = np.argsort(-(column.work / column.size), kind="stable")
    return interpolated(column.size[order], column.work[order], room, up=True)


def interpolated(size: Ints, work: Ints, room: Ints, *, up: bool) -> Ints:
    """Return the work of the first samples that fill so much room, rounded up or down by at most 2 units."""
    sizes, works = np.append(0, np.cumsum(size)), np.append(0, np.cumsum(work))
    last = np.minimum(np.searchsorted(sizes, room, "right") - 1, len(size))
    part = np.minimum(last, len(size) - 1)
    share = (room - sizes[last]) * (work[part] / size[part])
    share = np.where(last < len(size), share, 0.0)
    rounded = np.ceil(share * (1 + 2.0**-50)) + 1 if up else np.maximum(np.floor(share * (1 - 2.0**-50)) - 1, 0)
    found: Ints = works[last] + rounded.astype(np.int64)
    return found


def rank_bound(samples: Samples, n_micro_batches: int, n_ranks: int) -> int:
    """Return what the rank with most work has at least, over the whole step; the other objective is not less.

    The mean. Of the qR + 1 heaviest samples some rank gets q + 1, at least the lightest of these. The rank of the
    heaviest also holds K - 1 others, and what the micro-batches of the other ranks cannot hold.
    """
    work = samples.work
    descending = np.append(0, np.cumsum(np.sort(work)[::-1]))
    total = int(descending[-1])
    times = np.arange((len(work) - 1) // n_ranks + 1)
    together = int((descending[times * n_ranks + 1] - descending[times * n_ranks - times]).max())
    heaviest = int(work.argmax())
    others = n_micro_batches - 1
    beside = total - int(descending[len(work) - others]) if others <= len(work) - 1 else 0
    for sizes, budget in zip(samples.sizes.T, samples.budgets.tolist(), strict=True):
        left = int(sizes.sum()) - (n_ranks - 1) * n_micro_batches * budget - int(sizes[heaviest])
        rest = np.delete(np.arange(len(work)), heaviest)
        rest = rest[sizes[rest] > 0]
        if left > 0 and len(rest):
            order = rest[np.argsort(work[rest] / sizes[rest], kind="stable")]
            beside = max(beside, int(interpolated(sizes[order], work[order], np.array([left]), up=False)[0]))
    return max(-(-total // n_ranks), together, int(work[heaviest]) + beside)


def least_value(samples: Samples, n_rows: int, n_ranks: int, meet: Meet, of_rows: int | None = None) -> int:
    """Return the lower bound of the objective; ``of_rows``: that of `row_targets`, where it is known."""
    least = rank_bound(samples, n_rows, n_ranks)
    if meet == "step":
        return least
    return max(least, row_targets(samples, n_rows, n_ranks)[1] if of_rows is None else of_rows)


# From targets to micro-batches.


def fill_to_targets(samples: Samples, gaps: list[int]) -> Ints:
    """Give samples, one by one, to the micro-batch that lacks most of its target and has room; some may be over.

    As many samples as there are empty micro-batches are kept for these.
    """
    n_batches, left = len(gaps), len(samples)
    order = sorted((-gap, number) for number, gap in enumerate(gaps))
    full: list[tuple[int, int, int]] = []  # without room for a sample as large as the last
    rooms, filled, empty = Rooms(samples.budgets.tolist(), n_batches), [False] * n_batches, n_batches
    batches = np.empty(left, np.int64)
    for sample, (size, work) in enumerate(zip(samples.sizes.tolist(), samples.work.tolist(), strict=True)):
        while full and -full[0][0] >= size[0]:
            _, lack, number = heappop(full)
            insort(order, (lack, number))
        place = 0
        while place < len(order):
            lack, number = order[place]
            if empty >= left and filled[number]:
                place += 1
            elif rooms.fit(number, size):
                break
            elif rooms.of[number][0] < size[0]:
                del order[place]
                heappush(full, (-rooms.of[number][0], lack, number))
            else:
                place += 1
        if place == len(order):  # the emptiest
            order += [(lack, number) for _, lack, number in full]
            order.sort()
            full = []
            place = max(range(n_batches), key=lambda place: (min(rooms.of[order[place][1]]), -place))
        lack, number = order.pop(place)
        insort(order, (lack + work, number))
        rooms.take(number, size)
        empty -= not filled[number]
        filled[number] = True
        left -= 1
        batches[sample] = number
    return batches


class Rooms:
    """What each micro-batch has left of its budgets."""

    def __init__(self, budgets: list[int], n_batches: int) -> None:
        self.of = [list(budgets) for _ in range(n_batches)]
        self._one = len(budgets) == 1

    def fit(self, number: int, size: list[int]) -> bool:
        """Whether a sample fits."""
        room = self.of[number]
        return room[0] >= size[0] and (self._one or all(map(ge, room, size)))

    def take(self, number: int, size: list[int]) -> None:
        """Add a sample."""
        if self._one:
            self.of[number][0] -= size[0]
        else:
            self.of[number] = [room - each for room, each in zip(self.of[number], size, strict=True)]


class MicroBatches:
    """Samples in micro-batches, with what each holds, and swaps between pairs of them."""

    def __init__(self, samples: Samples, n_batches: int, batches: Ints) -> None:
        self.samples, self.n_batches, self.batches = samples, n_batches, batches
        self._sizes = np.concatenate([samples.sizes, np.zeros((1, samples.sizes.shape[1]), np.int64)])
        works = samples.work[:, None] if samples.parts is None else samples.parts
        self._works = np.concatenate([works, np.zeros((1, works.shape[1]), np.int64)])
        self._turn = 0
        self.load = np.stack(
            [np.bincount(batches, column, minlength=n_batches) for column in samples.sizes.T], axis=1
        ).astype(np.int64)
        self.works = np.stack([np.bincount(batches, column, minlength=n_batches) for column in works.T], axis=1).astype(
            np.int64
        )
        self.count = np.bincount(batches, minlength=n_batches)

    def moved(self, batches: Ints) -> MicroBatches:
        """Return the same samples in other micro-batches."""
        return MicroBatches(self.samples, self.n_batches, batches)

    @property
    def work(self) -> Ints:
        """Work of each micro-batch, all kinds together."""
        works: Ints = self.works[:, 0] if self.works.shape[1] == 1 else self.works.sum(axis=1)
        return works

    def fits(self) -> bool:
        """Return whether none is over a budget, and none is empty."""
        return bool((self.load <= self.samples.budgets).all() and self.count.min() > 0)

    def swap(self, givers: Ints, takers: Ints, half: Ints, group: int = 1, width: int = 12, pairs: int = 0) -> int:
        """Make in each pair of micro-batches the swap that moves nearest to ``half`` of work from giver to taker.

        Only swaps that keep the budgets and leave something in both. Of each ``group`` neighbouring pairs only the best
        is made. All micro-batches of a call differ. With ``pairs`` two of so many samples may go together. ``half`` has
        a column for each kind of work, shape ``[pairs, c]``, or none: then it is of all kinds together. Returns how
        many were made.
        """
        table = members(self.batches, self.n_batches, 7 * self._turn, width)
        self._turn += 1
        none = len(self.samples)
        sizes, works, parts = self._sizes, self._works, None
        if half.ndim == 1:
            half = half[:, None]
            works = works if works.shape[1] == 1 else works.sum(axis=1, keepdims=True)
        if pairs:
            rows = np.concatenate([givers, takers])
            first, second = (table[rows][:, slots] for slots in np.triu_indices(min(pairs, table.shape[1] - 1), 1))
            parts = np.stack([first.ravel(), second.ravel()])
            both = np.arange(parts.shape[1]).reshape(first.shape) + none + 1
            both[(first == none) | (second == none)] = none
            wide = np.full((self.n_batches, table.shape[1] + first.shape[1]), none)
            wide[rows, : table.shape[1]] = table[rows]
            wide[rows, table.shape[1] :] = both
            table = wide
            sizes = np.concatenate([sizes, sizes[parts[0]] + sizes[parts[1]]])
            works = np.concatenate([works, works[parts[0]] + works[parts[1]]])
        slots = best_swaps(table, (givers, takers), self._nearest(sizes, works, givers, takers, half))
        gives, takes = table[givers, slots[0]], table[takers, slots[1]]
        # Exactly, what was compared in short numbers.
        size, moved = sizes[gives] - sizes[takes], works[gives] - works[takes]
        left, before = np.abs(moved - half).sum(axis=1), np.abs(half).sum(axis=1)
        count = self._counts(gives) - self._counts(takes)
        fits = (self.load[takers] + size <= self.samples.budgets).all(axis=1)
        fits &= (self.load[givers] - size <= self.samples.budgets).all(axis=1)
        fits &= (self.count[givers] - count > 0) & (self.count[takers] + count > 0)
        fits &= left < before - (before >> 13)
        chosen = np.flatnonzero(fits)
        if group > 1 and len(chosen):
            rated = np.where(fits, left, np.iinfo(np.int64).max).reshape(-1, group)
            chosen = (np.arange(len(rated)) * group + rated.argmin(axis=1))[fits.reshape(-1, group).any(axis=1)]
        givers, takers, gives, takes = givers[chosen], takers[chosen], gives[chosen], takes[chosen]
        change = (self._works_of(gives, parts) - self._works_of(takes, parts)) if len(chosen) else moved[chosen]
        for batch, sign in ((givers, -1), (takers, 1)):
            self.load[batch] += sign * size[chosen]
            self.works[batch] += sign * change
            self.count[batch] += sign * count[chosen]
        for item, batch in ((gives, takers), (takes, givers)):
            alone = item < none
            self.batches[item[alone]] = batch[alone]
            if parts is not None:
                double = item > none
                self.batches[parts[:, item[double] - none - 1]] = batch[double]
        return len(chosen)

    def _works_of(self, items: Ints, parts: Ints | None) -> Ints:
        """Return the works of samples, of nothing, and of two samples."""
        none = len(self.samples)
        works = self._works[np.minimum(items, none)]
        if parts is not None and len(double := np.flatnonzero(items > none)):
            works[double] = self._works[parts[:, items[double] - none - 1]].sum(axis=0)
        return works

    def _counts(self, items: Ints) -> Ints:
        none = len(self.samples)
        counts: Ints = (items != none).astype(np.int64) + (items > none)
        return counts

    def _nearest(self, sizes: Ints, works: Ints, givers: Ints, takers: Ints, half: Ints) -> Score:
        """Return the score of swaps by how far the work that they move is from ``half``."""
        size, work = sizes.T.astype(np.float32), works.T.astype(np.float32)
        # float32 is faster and only ranks the swaps; whether one fits is checked exactly afterwards.
        rooms = [(self.samples.budgets - self.load[batch]).T.astype(np.float32) for batch in (takers, givers)]
        halves, few = half.T.astype(np.float32), int(self.count.min()) < 3

        def score(part: slice, given: Ints, taken: Ints) -> NDArray[np.float32]:
            far = []
            for column, wish in zip(work, halves, strict=True):
                moved = (column[given] - wish[part, None])[:, :, None] - column[taken][:, None, :]
                far.append(np.abs(moved, out=moved))
            found: NDArray[np.float32] = far[0]
            for other in far[1:]:
                found += other
            for column, there, here in zip(size, *rooms, strict=True):
                change = column[given][:, :, None] - column[taken][:, None, :]
                over = change > there[part, None, None]
                over |= change < -here[part, None, None]
                np.putmask(found, over, np.inf)
            if few:
                counts = self._counts(given)[:, :, None] - self._counts(taken)[:, None, :]
                left = (self.count[givers[part], None, None] - counts, self.count[takers[part], None, None] + counts)
                found[(left[0] < 1) | (left[1] < 1)] = np.inf
            return found

        return score


# The objectives, and what makes them smaller.

ROUNDS = 24  # of swaps
IDLE = 8  # of these in a row without progress, at most; fewer where there are few samples
PARTS_ROUNDS = 64  # the same for several kinds of work
GOOD = 2**9  # a gap to the bound of one part in so many ends the search
WIDTH = 12  # samples of a micro-batch that a swap looks at
PROGRESS = 11  # of the lockstep: less than one part in 2**11 is none
PAIRS = 8  # of these, those that may go by twos
# The same between ranks, in every round: more are looked at in fewer rounds. 512 samples on 8 ranks, 8 in every second
# round, 5, 6 and 7 in each: 5.8, 4.7, 4.3, 4.4 rounds in 5.7, 4.7, 4.7, 5.2 ms; 4,096 on 64: 26, 28, 29, 36 ms. The
# totals' gap to the bound is at most 0.0019 with all of them.
RANK_PAIRS = 5
WORST = 24  # pairs of micro-batches that exchange two samples for two in a round


def lockstep(work: Ints, n_ranks: int) -> int:
    """Return the sum over the micro-steps of the largest work, with neighbours by work in one micro-step."""
    return int(np.sort(work)[::-1][::n_ranks].sum())


def objective(work: Ints, seats: tuple[Ints, Ints], n_ranks: int, meet: Meet) -> int:
    """Return what a plan is measured by, from the work, and the rank and the number of each micro-batch."""
    table = np.zeros((n_ranks, len(work) // n_ranks), np.int64)
    table[seats] = work
    return int(table.max(axis=0).sum() if meet == "micro_batch" else table.sum(axis=1).max())


def near(value: int, bound: int) -> bool:
    """Whether a value is so near to its bound that the search ends."""
    return (value - bound) * GOOD <= bound


def patience(held: MicroBatches) -> int:
    """Return how many rounds in a row may bring nothing."""
    return min(IDLE, 2 + len(held.samples) // 16)


def polish(held: MicroBatches, n_ranks: int, targets: Ints, bound: int) -> MicroBatches:
    """Swap towards the targets across all micro-batches, then inside micro-steps; the best that was seen."""
    n_batches, half = held.n_batches, held.n_batches // 2
    best, batches, idle = lockstep(held.work, n_ranks), held.batches.copy(), 0
    goal = np.sort(targets)[::-1].repeat(n_ranks)
    for turn in range(ROUNDS if half else 0):
        if near(best, bound) or idle > patience(held) // 2:
            break
        order = np.argsort(-held.work, kind="stable")
        over = np.zeros(n_batches, np.int64)
        if turn % 3 == 1 and n_ranks > 1:  # the heaviest of each micro-step with its lightest
            rows, each = order.reshape(-1, n_ranks), n_ranks // 2
            givers = rows[:, :each].ravel()
            takers = np.roll(rows[:, ::-1][:, :each], turn // 3 % each, axis=1).ravel()
            over = held.work
        else:  # the furthest above its target with the furthest below
            over[order] = held.work[order] - goal
            order = np.argsort(-over, kind="stable")
            givers, takers = order[:half], np.roll(order[::-1][:half], turn // 3)
        if turn % 3 == 2:
            givers, takers = givers[:WORST], takers[:WORST]
        held.swap(givers, takers, (over[givers] - over[takers]) // 2, width=WIDTH, pairs=PAIRS if turn % 3 == 2 else 0)
        now = lockstep(held.work, n_ranks)
        idle = 0 if now < best - (best >> PROGRESS) else idle + 1
        if now < best:
            best, batches = now, held.batches.copy()
    return held.moved(batches)


def toward(held: MicroBatches, goals: Ints) -> None:
    """Swap towards a target for each micro-batch, in place."""
    half = held.n_batches // 2
    for turn in range(ROUNDS if half else 0):
        over = held.work - goals
        order = np.argsort(-over, kind="stable")
        givers, takers = order[:half], np.roll(order[::-1][:half], turn // 2)
        wide = PAIRS if turn % 2 else 0
        if not held.swap(givers, takers, (over[givers] - over[takers]) // 2, width=WIDTH, pairs=wide) and wide:
            break


def assign_ranks(work: Ints, n_ranks: int) -> tuple[Ints, Ints]:
    """Return rank and micro-batch of each: neighbours by work in a micro-step, its heaviest to the rank with least.

    The widest micro-steps come first. This changes nothing for the sum of the largest, and evens out the totals.
    """
    rows = np.argsort(-work, kind="stable").reshape(-1, n_ranks)
    works = work[rows]
    total = np.zeros(n_ranks, np.int64)
    rank, micro_batch = np.empty(len(work), np.int64), np.empty(len(work), np.int64)
    for row in np.argsort(-(works[:, 0] - works[:, -1]), kind="stable").tolist():
        order = np.argsort(total, kind="stable")
        rank[rows[row]] = order
        micro_batch[rows[row]] = row
        total[order] += works[row]
    return rank, micro_batch


def level(held: MicroBatches, seats: tuple[Ints, Ints], n_ranks: int, bound: int) -> MicroBatches:
    """Swap between micro-batches of the ranks with most and least work; the best that was seen."""
    n_rows = held.n_batches // n_ranks
    place = np.empty((n_ranks, n_rows), np.int64)
    place[seats] = np.arange(held.n_batches)
    totals = held.work[place].sum(axis=1)
    best, batches, idle, half = int(totals.max()), held.batches.copy(), 0, n_ranks // 2
    for turn in range(2 * ROUNDS if half else 0):
        if near(best, bound) or idle > patience(held):
            break
        order = np.argsort(-totals, kind="stable")
        from_rank, to_rank = order[:half], np.roll(order[::-1][:half], turn // 4 % half)
        if turn % 2:
            from_rank, to_rank = from_rank[:8], to_rank[:8]
        givers = place[from_rank].ravel()
        takers = np.roll(place[to_rank], turn, axis=1).ravel()
        wish = ((totals[from_rank] - totals[to_rank]) // 2).repeat(n_rows)
        held.swap(givers, takers, wish, group=n_rows, width=WIDTH, pairs=RANK_PAIRS)
        totals = held.work[place].sum(axis=1)
        now = int(totals.max())
        idle = 0 if now < best else idle + 1
        if now < best:
            best, batches = now, held.batches.copy()
    return held.moved(batches)


def even_parts(held: MicroBatches, seats: tuple[Ints, Ints], n_ranks: int, meet: Meet) -> MicroBatches:
    """Swap so that each kind of work is even, inside micro-steps or between the totals of ranks; the best seen."""
    n_rows, half = held.n_batches // n_ranks, n_ranks // 2
    place = np.empty((n_ranks, n_rows), np.int64)
    place[seats] = np.arange(held.n_batches)
    best, batches, idle = parts_objective(held.works, seats, n_ranks, meet), held.batches.copy(), 0
    for turn in range(PARTS_ROUNDS if half else 0):
        if idle > PARTS_ROUNDS // 4:
            break
        wide = PAIRS if turn % 2 else 0
        if meet == "micro_batch":  # in each micro-step, in the order of one kind
            kind = turn // 2 % held.works.shape[1]
            order = np.argsort(-held.works[place, kind], axis=0, kind="stable")
            rows = np.take_along_axis(place, order, axis=0)
            givers, takers = rows[:half].ravel(), np.roll(rows[::-1][:half], turn // 4 % half, axis=0).ravel()
            held.swap(givers, takers, (held.works[givers] - held.works[takers]) // 2, width=WIDTH, pairs=wide)
        else:
            totals = held.works[place].sum(axis=1)
            order = np.argsort(-totals[:, turn // 2 % totals.shape[1]], kind="stable")
            from_rank, to_rank = order[:half], np.roll(order[::-1][:half], turn // 4 % half)
            givers, takers = place[from_rank].ravel(), np.roll(place[to_rank], turn, axis=1).ravel()
            wish = ((totals[from_rank] - totals[to_rank]) // 2).repeat(n_rows, axis=0)
            held.swap(givers, takers, wish, group=n_rows, width=WIDTH, pairs=wide)
        now = parts_objective(held.works, seats, n_ranks, meet)
        idle = 0 if now < best else idle + 1
        if now < best:
            best, batches = now, held.batches.copy()
    return held.moved(batches)


def parts_objective(works: Ints, seats: tuple[Ints, Ints], n_ranks: int, meet: Meet) -> int:
    """Return the sum of the objectives of all kinds of work."""
    return sum(objective(column, seats, n_ranks, meet) for column in works.T)


# Small steps: all ways, breadth first.

SMALL = 12  # samples, at most, of a step that is searched
KEPT = 2048  # partial plans that are kept


def search(samples: Samples, n_rows: int, n_ranks: int, meet: Meet) -> Ints | None:
    """Return the best micro-batches of a beam search, numbered rank by rank for ``meet="step"``, None if none fits.

    Samples are placed one by one, the largest first; of all partial plans those are kept whose least possible value is
    smallest, evenly loaded ones first. Of micro-batches, or ranks, that are equal as yet only the first is tried.
    """
    length, n_batches, budgets = len(samples), n_rows * n_ranks, samples.budgets
    load = np.zeros((1, n_batches, len(budgets)), np.int64)
    work = np.zeros((1, n_batches), np.int64)
    count = np.zeros((1, n_batches), np.int64)
    at = np.zeros((1, 0), np.int64)
    left = int(samples.work.sum())
    short = max(0, left.bit_length() - 28)  # bits to leave out, so that squares are exact
    number = np.arange(n_batches)
    for sample in range(length):
        size, weight = samples.sizes[sample], int(samples.work[sample])
        left -= weight
        allowed = (load + size <= budgets).all(axis=2)
        empty = count == 0
        if meet == "micro_batch":  # of the empty ones the first
            allowed &= ~empty | (empty.argmax(axis=1)[:, None] == number)
        else:  # of the empty ones of a rank the first; of the empty ranks the first
            of_rank = empty.reshape(-1, n_ranks, n_rows)
            allowed &= ~empty | (of_rank.argmax(axis=2)[:, :, None] == np.arange(n_rows)).reshape(empty.shape)
            unused = of_rank.all(axis=2)
            first = ~unused | (unused.argmax(axis=1)[:, None] == np.arange(n_ranks))
            allowed &= first.repeat(n_rows, axis=1)
        # The samples that are left have to fill what is empty.
        allowed &= (empty.sum(axis=1)[:, None] - empty) <= length - 1 - sample
        state, batch = np.nonzero(allowed)
        if not len(state):
            return None
        new = np.arange(len(state))
        work = work[state]
        work[new, batch] += weight
        if meet == "micro_batch":
            rows = np.sort(work, axis=1)[:, ::-1].reshape(len(work), n_rows, n_ranks)
            highest = rows[:, :, 0].sum(axis=1)
            room = n_ranks * highest - work.sum(axis=1)
            value = highest + np.maximum(0, -(-(left - room) // n_ranks))
            even = (rows[:, :, 0] - rows[:, :, -1]).sum(axis=1)
        else:
            totals = work.reshape(len(work), n_ranks, n_rows).sum(axis=2)
            value = np.maximum(totals.max(axis=1), -(-(work.sum(axis=1) + left) // n_ranks))
            even = ((totals >> short) ** 2).sum(axis=1)
        kept = np.lexsort((even, value))[:KEPT] if len(state) > KEPT or sample == length - 1 else new
        state, batch, work = state[kept], batch[kept], work[kept]
        load, count, at = load[state], count[state], np.concatenate([at[state], batch[:, None]], axis=1)
        new = new[: len(kept)]
        load[new, batch] += size
        count[new, batch] += 1
    found: Ints = at[0]
    return found


# The whole.


class NoPlanError(ValueError):
    """There are too few samples for so many micro-batches on each rank."""

    def __init__(self, n_micro_batches: int) -> None:
        super().__init__(n_micro_batches)
        self.n_micro_batches = n_micro_batches


def packed(samples: Samples, n_batches: int, gaps: Ints | None) -> MicroBatches | None:
    """Return samples in so many micro-batches that keep the budgets, near to their targets if possible, or None."""
    if gaps is not None:
        batches = fill_to_targets(samples, gaps.tolist())
        if repair(samples.sizes, samples.budgets, batches, n_batches, 0):
            held = MicroBatches(samples, n_batches, batches)
            if held.fits():
                return held
    found = pack(samples.sizes, samples.budgets, n_batches, 0, 1)
    if found is not None:
        held = MicroBatches(samples, n_batches, found)
        if held.fits():
            return held
    held = dealt_in_rows(samples, n_batches)
    return held if held.fits() else None


def spread(batches: Ints, n_batches: int) -> Ints:
    """Give each empty micro-batch a sample that is not the first of its own; in place."""
    empty = np.flatnonzero(np.bincount(batches, minlength=n_batches) == 0)
    first = np.unique(batches, return_index=True)[1]
    others = np.setdiff1d(np.arange(len(batches)), first)
    batches[others[len(others) - len(empty) :]] = empty
    return batches


def plan_sums(samples: Samples, n_ranks: int, multiple: int, meet: Meet, least: int = 1) -> Assignment:
    """Plan one step of samples, the largest first, whose sizes add up in a micro-batch; ``least`` so many on a rank.

    Raises:
        NoPlanError: If there are fewer samples than micro-batches.
    """
    at_once = n_ranks * multiple
    few = max(least, -(-fewest(samples) // at_once) * multiple)
    most = len(samples) // at_once * multiple
    if few > most:
        raise NoPlanError(few)
    aims: dict[int, tuple[Ints, int]] = {}

    def attempt(count: int) -> MicroBatches | None:
        aims[count] = row_targets(samples, count, n_ranks)
        return packed(samples, count * n_ranks, aims[count][0].repeat(n_ranks))

    count, held = few, attempt(few)
    if held is None:  # a slower bound may be a better one
        better = max(few, -(-lower_bound(samples.sizes, samples.budgets) // at_once) * multiple)
        if better > few:
            few = better
            if few > most:
                raise NoPlanError(few)
            count, held = few, attempt(few)
    if held is None:
        bins = first_fit(samples.sizes, samples.budgets)
        last = -(-(int(bins.max()) + 1) // at_once) * multiple
        low, count = few, min(last, most)
        if last <= most:
            held = MicroBatches(samples, last * n_ranks, spread(bins, last * n_ranks))
            aims[last] = row_targets(samples, last, n_ranks)
            held = attempt(last) or held
        else:
            held = attempt(most)
        if held is None:
            raise NoPlanError(last)
        while count - low > multiple:
            middle = (low + count) // (2 * multiple) * multiple
            middle = max(low + multiple, middle)
            if found := attempt(middle):
                count, held = middle, found
            else:
                low = middle
    return balanced(held, n_ranks, few, aims[count], meet)


def plan_exactly(samples: Samples, n_ranks: int, count: int) -> Assignment:
    """Plan so many micro-batches on each rank, which meet at each; there are samples for all of them.

    Raises:
        NoPlanError: If no packing is found.
    """
    held = fitted(samples, n_ranks, count)
    if held is None:
        raise NoPlanError(count)
    return balanced(held, n_ranks, count, row_targets(samples, count, n_ranks), "micro_batch")


def fitted(samples: Samples, n_ranks: int, count: int) -> MicroBatches | None:
    """Return samples in so many micro-batches on each rank, or None where no packing is found.

    One is sure to be found where first fit needs no more, and where this found one for a smaller count.
    """
    n_batches, least = count * n_ranks, fewest(samples)

    def attempt(rows: int) -> MicroBatches | None:
        return packed(samples, rows * n_ranks, row_targets(samples, rows, n_ranks)[0].repeat(n_ranks))

    if least > n_batches:
        return None
    if (held := attempt(count)) is not None:
        return held
    bins = first_fit(samples.sizes, samples.budgets)
    if bins.max() < n_batches:
        return MicroBatches(samples, n_batches, spread(bins, n_batches))
    fewer = (attempt(rows) for rows in range(count - 1, -(-least // n_ranks) - 1, -1))
    batches = next((found.batches for found in fewer if found is not None), None)
    return None if batches is None else MicroBatches(samples, n_batches, spread(batches, n_batches))


def dealt_in_rows(samples: Samples, n_batches: int) -> MicroBatches:
    """Return samples dealt in rows, one to each micro-batch, the largest of a row to the lightest; some may be over.

    Fast, and as many samples in each, to within one; much room is needed only where samples are large.
    """
    level = levels(samples.sizes).sum(axis=1)
    descending = np.argsort(-level, kind="stable")
    load, batches = np.zeros(n_batches, np.int64), np.empty(len(samples), np.int64)
    for start in range(0, len(samples), n_batches):
        row = descending[start : start + n_batches]
        lightest = np.argsort(load, kind="stable")[: len(row)]
        load[lightest] += level[row]
        batches[row] = lightest
    return MicroBatches(samples, n_batches, batches)


def balanced(held: MicroBatches, n_ranks: int, few: int, aims: tuple[Ints, int], meet: Meet) -> Assignment:
    """Return the assignment of samples that fit, their work balanced; ``aims`` are those of `row_targets`."""
    samples, count = held.samples, held.n_batches // n_ranks
    targets, bound = aims[0], least_value(samples, count, n_ranks, meet, aims[1])
    seats = assign_ranks(held.work, n_ranks)
    if samples.parts is None and near(objective(held.work, seats, n_ranks, meet), bound):
        return assigned(held, seats, count, few, bound)
    if meet == "micro_batch":
        held = polish(held, n_ranks, targets, bound)
        seats = assign_ranks(held.work, n_ranks)
    else:
        held = level(held, seats, n_ranks, bound)
    if samples.parts is not None:
        held = even_parts(held, seats, n_ranks, meet)
        return assigned(held, seats, count, few, bound)
    value = objective(held.work, seats, n_ranks, meet)
    small = len(samples) <= SMALL and not near(value, bound)
    if small and (batches := search(samples, count, n_ranks, meet)) is not None:
        other = held.moved(batches)
        places = np.divmod(np.arange(other.n_batches), count)
        if meet == "micro_batch":
            places = assign_ranks(other.work, n_ranks)
        if objective(other.work, places, n_ranks, meet) < value:
            held, seats = other, places
    return assigned(held, seats, count, few, bound)


def assigned(held: MicroBatches, seats: tuple[Ints, Ints], count: int, few: int, bound: int) -> Assignment:
    """Return the assignment of samples from that of their micro-batches."""
    return Assignment(seats[0][held.batches], seats[1][held.batches], count, few, bound)
