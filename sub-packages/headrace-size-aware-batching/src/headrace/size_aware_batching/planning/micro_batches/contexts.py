"""One optimizer step in which several ranks share a sample that is too large for one (context parallelism). Pure.

A group is a power of two of consecutive ranks, the first a multiple of their number. It holds so many budgets, and each
of its ranks has its part of the work.
"""

from __future__ import annotations

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.balancing import toward
from headrace.size_aware_batching.planning.micro_batches.bounds import fewest
from headrace.size_aware_batching.planning.micro_batches.filling import packed
from headrace.size_aware_batching.planning.micro_batches.samples import Assignment, Ints, NoPlanError, Samples


def plan_contexts(samples: Samples, width: Ints, n_ranks: int, multiple: int, most_items: int) -> Assignment:
    """Plan one step of samples, the largest first, each of which needs a group of ``width`` ranks.

    ``samples.sizes`` may exceed a budget, not ``width`` of them. Samples of groups of one width share micro-batches of
    at most ``most_items`` samples.

    Raises:
        NoPlanError: If there are too few samples that one rank can run for what the groups leave over.
    """
    length = len(samples)
    alone = np.flatnonzero(width == 1)
    batch_width, batch_work, batch_of = shared(samples, width, most_items)
    n_shared, used = len(batch_width), int(batch_width.sum())
    small = samples.of(alone)
    least = fewest(small) if len(alone) else 0
    at_once = n_ranks * multiple
    columns = zip(samples.sizes.T, samples.budgets.tolist(), strict=True)
    volume = max(-(-int(column.sum()) // budget) for column, budget in columns)
    few = -(-max(volume, 1) // at_once) * multiple
    count = -(-max(used + least, 1) // at_once) * multiple
    while True:
        slots = places(batch_width, batch_work, count, n_ranks)
        free = count * n_ranks - used
        if free > len(alone):
            raise NoPlanError(count)
        if slots is not None:
            row, rank = slots
            highest = np.zeros(count, np.int64)
            np.maximum.at(highest, row, batch_work)
            taken = np.zeros((count, n_ranks), bool)
            for number in range(n_shared):
                taken[row[number], rank[number] : rank[number] + batch_width[number]] = True
            if not free:
                held = None
                break
            goals = filled(highest, (~taken).sum(axis=1), int(small.work.sum()))
            open_rows = np.repeat(np.arange(count), (~taken).sum(axis=1))
            held = packed(small, free, goals[open_rows])
            if held is not None:
                toward(held, goals[open_rows])
                break
        count += multiple
    of_rank, of_row, of_width = np.empty(length, np.int64), np.empty(length, np.int64), width.copy()
    wide = np.flatnonzero(width > 1)
    of_rank[wide], of_row[wide] = rank[batch_of], row[batch_of]
    if held is not None:
        seat_row, seat_rank = seated(held.work, taken, goals)
        of_rank[alone], of_row[alone] = seat_rank[held.batches], seat_row[held.batches]
    bound = -(-int(samples.work.sum()) // n_ranks)
    return Assignment(of_rank, of_row, count, few, bound, of_width)


def shared(samples: Samples, width: Ints, most_items: int) -> tuple[Ints, Ints, Ints]:
    """Return width and work a rank of micro-batches of several ranks, widest first, and that of each such sample."""
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
    return table, -(-np.array(works, np.int64) // np.maximum(table, 1)), batch


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
