"""One optimizer step in which several ranks share a sample that is too large for one (context parallelism). Pure.

A group is a power of two of consecutive ranks, the first a multiple of their number. It holds so many budgets, and each
of its ranks has its part of the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.balancing import level, toward
from headrace.size_aware_batching.planning.micro_batches.bounds import fewest
from headrace.size_aware_batching.planning.micro_batches.filling import packed
from headrace.size_aware_batching.planning.micro_batches.samples import Assignment, Ints, Meet, NoPlanError, Samples
from headrace.size_aware_batching.planning.micro_batches.swaps import MicroBatches


def plan_contexts(
    samples: Samples, width: Ints, n_ranks: int, multiple: int, most_items: int, meet: Meet
) -> Assignment:
    """Plan one step of samples, the largest first, each of which needs a group of ``width`` ranks.

    ``samples.sizes`` may exceed a budget, not ``width`` of them. Samples of groups of one width share micro-batches of
    at most ``most_items`` samples.

    Raises:
        NoPlanError: If there are too few samples that one rank can run for what the groups leave over.
    """
    alone, wide = np.flatnonzero(width == 1), np.flatnonzero(width > 1)
    batches = shared(samples, width, most_items)
    small = samples.of(alone)
    used, least = int(batches.width.sum()), fewest(small) if len(alone) else 0
    at_once = n_ranks * multiple
    columns = zip(samples.sizes.T, samples.budgets.tolist(), strict=True)
    volume = max(-(-int(column.sum()) // budget) for column, budget in columns)
    few = -(-max(volume, 1) // at_once) * multiple
    count = -(-max(used + least, 1) // at_once) * multiple
    around = packed_around
    if meet == "step":
        around, most = nested_around, (len(alone) + used) // n_ranks
        count = max(count, min(-(-even_count(batches, small, n_ranks) // multiple), most // multiple) * multiple)
    while True:
        if count * n_ranks - used > len(alone):
            raise NoPlanError(count)
        if (found := around(batches, small, count, n_ranks)) is not None:
            break
        count += multiple
    (shared_rank, shared_row), (small_rank, small_row) = found
    rank, row = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
    rank[wide], row[wide] = shared_rank[batches.of_sample], shared_row[batches.of_sample]
    rank[alone], row[alone] = small_rank, small_row
    return Assignment(rank, row, count, few, -(-int(samples.work.sum()) // n_ranks), width.copy())


@dataclass(frozen=True)
class Shared:
    """Micro-batches of several ranks: ranks and work a rank of each, and the number of that of each wide sample."""

    width: Ints
    work: Ints
    of_sample: Ints


Seats = tuple[Ints, Ints]  # rank and micro-step


def packed_around(batches: Shared, small: Samples, count: int, n_ranks: int) -> tuple[Seats, Seats] | None:
    """Return the seats of shared micro-batches and of samples of one rank; ranks meet at each micro-step."""
    if (slots := places(batches.width, batches.work, count, n_ranks)) is None:
        return None
    row, rank = slots
    highest = np.zeros(count, np.int64)
    np.maximum.at(highest, row, batches.work)
    taken = np.zeros((count, n_ranks), bool)
    for first, ranks, step in zip(rank.tolist(), batches.width.tolist(), row.tolist(), strict=True):
        taken[step, first : first + ranks] = True
    if not len(small):
        return (rank, row), (row[:0], row[:0])
    free = (~taken).sum(axis=1)
    goals = filled(highest, free, int(small.work.sum()))
    open_rows = np.repeat(np.arange(count), free)
    held = packed(small, len(open_rows), goals[open_rows])
    if held is None:
        return None
    toward(held, goals[open_rows])
    small_row, small_rank = seated(held.work, taken, goals)
    return (rank, row), (small_rank[held.batches], small_row[held.batches])


@dataclass(frozen=True)
class Nested:
    """Rank and micro-step of shared micro-batches, and the work and the number of them that each rank has."""

    seats: Seats
    total: Ints
    taken: Ints


def nested(batches: Shared, count: int, n_ranks: int) -> Nested | None:
    """Place the widest first, each on the ranks with least work; None where a rank would have more than ``count``.

    So each rank runs its widest groups first, and none waits before the end of the step: the ranks of a group come from
    one larger group, or from the beginning of the step, and are ready together.
    """
    rank, row = np.zeros(len(batches.width), np.int64), np.zeros(len(batches.width), np.int64)
    total, taken = np.zeros(n_ranks, np.int64), np.zeros(n_ranks, np.int64)
    for number in np.lexsort((-batches.work, -batches.width)).tolist():
        ranks = int(batches.width[number])
        firsts = np.arange(0, n_ranks - ranks + 1, ranks)
        firsts = firsts[taken[firsts] < count]
        if not len(firsts):
            return None
        rank[number] = first = int(firsts[total[firsts].argmin()])
        row[number] = taken[first]
        total[first : first + ranks] += batches.work[number]
        taken[first : first + ranks] += 1
    return Nested((rank, row), total, taken)


def even_count(batches: Shared, small: Samples, n_ranks: int) -> int:
    """Return how many micro-batches let the ranks with the least work of groups reach the level of all.

    As many as they fill with samples of one rank: these have less work in a budget than long ones.
    """
    shared_work = nested(batches, len(batches.width), n_ranks)
    if shared_work is None or not len(small):
        return 1
    total = int(shared_work.total.sum() + small.work.sum())
    highest = filled(shared_work.total, np.ones(n_ranks, np.int64), total)
    tokens = zip(small.sizes.sum(axis=0).tolist(), small.budgets.tolist(), strict=True)
    full = min(int(small.work.sum()) * budget // max(size, 1) for size, budget in tokens)
    return int((shared_work.taken - (shared_work.total - highest) // max(full, 1)).max())


def nested_around(batches: Shared, small: Samples, count: int, n_ranks: int) -> tuple[Seats, Seats] | None:
    """Return the seats of shared micro-batches and of samples of one rank; ranks meet at the end of the step."""
    if (place := nested(batches, count, n_ranks)) is None:
        return None
    if not len(small):
        return place.seats, (small.work[:0], small.work[:0])
    taken, n_small = place.taken, count * n_ranks - int(place.taken.sum())
    held = packed(small, n_small, np.full(n_small, -(-int(small.work.sum()) // n_small)))
    if held is None:
        return None
    slot = lightest_first(held.work, place, count)
    batch_of = evened(small, slot[held.batches], place, count)
    work = np.bincount(batch_of, small.work, minlength=n_ranks * count).astype(np.int64).reshape(n_ranks, count)
    work[np.arange(count) < taken[:, None]] = np.iinfo(np.int64).max  # before those of one rank
    order = np.argsort(-work, axis=1, kind="stable")
    row = np.empty_like(order)
    np.put_along_axis(row, order, np.arange(count)[None].repeat(n_ranks, axis=0), axis=1)
    return place.seats, (batch_of // count, row.ravel()[batch_of])


def lightest_first(work: Ints, place: Nested, count: int) -> Ints:
    """Return the slot, rank * count + micro-step, of each micro-batch: the heaviest to the rank with least work."""
    ranks = [(total, rank) for rank, total in enumerate(place.total.tolist()) if place.taken[rank] < count]
    heapify(ranks)
    taken, slot = place.taken.tolist(), np.empty(len(work), np.int64)
    for number in np.argsort(-work, kind="stable").tolist():
        total, rank = heappop(ranks)
        slot[number] = rank * count + taken[rank]
        taken[rank] += 1
        if taken[rank] < count:
            heappush(ranks, (total + int(work[number]), rank))
    return slot


def evened(small: Samples, batch_of: Ints, place: Nested, count: int) -> Ints:
    """Return the micro-batches of samples of one rank after swaps between ranks, which have work of groups, too.

    For that work stand samples that are over each budget by themselves, so that none of them moves.
    """
    n_ranks = len(place.total)
    stand_ins = np.flatnonzero(np.arange(count) < place.taken[:, None])
    work = np.where(stand_ins % count == 0, place.total[stand_ins // count], 0)
    sizes = np.repeat(small.budgets[None] + 1, len(stand_ins), axis=0)
    both = Samples(np.concatenate([small.sizes, sizes]), small.budgets, np.append(small.work, work))
    held = MicroBatches(both, n_ranks * count, np.append(batch_of, stand_ins))
    seats = np.divmod(np.arange(n_ranks * count), count)
    return level(held, seats, n_ranks, -(-int(both.work.sum()) // n_ranks)).batches[: len(small)]


def shared(samples: Samples, width: Ints, most_items: int) -> Shared:
    """Return the micro-batches of samples that need several ranks, the widest first."""
    widths: list[int] = []
    counts: list[int] = []
    rooms: list[Ints] = []
    works: list[int] = []
    wide = np.flatnonzero(width > 1)
    batch = np.empty(len(wide), np.int64)
    for place in np.lexsort((wide, -width[wide])).tolist():
        sample = wide[place]
        size, ranks = samples.sizes[sample], int(width[sample])
        alike = (number for number, other in enumerate(widths) if other == ranks and counts[number] < most_items)
        fits = (number for number in alike if (rooms[number] >= size).all())
        number = next(fits, len(widths))
        if number == len(widths):
            widths.append(ranks)
            rooms.append(samples.budgets * ranks)
            works.append(0)
            counts.append(0)
        counts[number] += 1
        rooms[number] = rooms[number] - size
        works[number] += int(samples.work[sample])
        batch[place] = number
    table = np.array(widths, np.int64)
    return Shared(table, -(-np.array(works, np.int64) // np.maximum(table, 1)), batch)


def places(width: Ints, work: Ints, count: int, n_ranks: int) -> tuple[Ints, Ints] | None:
    """Return micro-step and first rank of each shared micro-batch, None where there is no room; widest first.

    Those of like work go into one micro-step.
    """
    row, rank = np.zeros(len(width), np.int64), np.zeros(len(width), np.int64)
    taken = np.zeros((count, n_ranks), bool)
    for number in np.lexsort((-work, -width)).tolist():
        ranks = int(width[number])
        starts = np.arange(0, n_ranks - ranks + 1, ranks)
        blocks = taken[:, : n_ranks // ranks * ranks].reshape(count, -1, ranks).any(axis=2)
        free = np.argwhere(~blocks)
        if not len(free):
            return None
        row[number], rank[number] = free[0][0], starts[free[0][1]]
        taken[row[number], rank[number] : rank[number] + ranks] = True
    return row, rank


def filled(highest: Ints, slots: Ints, work: int) -> Ints:
    """Return the work that each micro-batch of one rank should have: up to a level, or to that of its micro-step."""
    low, high = 0, max(work, int(highest.max(initial=0)), 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if int((np.maximum(highest, middle) * slots).sum()) >= work else (middle, high)
    return np.maximum(highest, low)


def seated(work: Ints, taken: np.ndarray[tuple[int, int], np.dtype[np.bool_]], goals: Ints) -> tuple[Ints, Ints]:
    """Return micro-step and rank of micro-batches of one rank: the heaviest where most is aimed at."""
    row, rank = np.nonzero(~taken)
    order = np.argsort(-goals[row], kind="stable")
    of_row, of_rank = np.empty(len(work), np.int64), np.empty(len(work), np.int64)
    heaviest = np.argsort(-work, kind="stable")
    of_row[heaviest], of_rank[heaviest] = row[order], rank[order]
    return of_row, of_rank
