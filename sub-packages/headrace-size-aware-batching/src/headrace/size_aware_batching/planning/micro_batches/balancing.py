"""The objectives of one optimizer step, and the swaps that make them smaller. Pure."""

from __future__ import annotations

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.samples import Ints, Meet
from headrace.size_aware_batching.planning.micro_batches.swaps import MicroBatches

ROUNDS = 24  # of swaps
IDLE = 8  # of these in a row without progress, at most; fewer where there are few samples
PARTS_ROUNDS = 64  # the same for several kinds of work
MEAN_ROUNDS = 40  # towards the means of several kinds
PARTS_IDLE = 10  # 16, and finer progress: both kinds together up to 1 % better, in up to 1.8 times the time
WIDE = 32  # pairs of micro-batches whose samples may go by twos in a round; 64: 1 % better, twice the time
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


def toward_means(held: MicroBatches) -> None:
    """Swap towards the mean of each kind of work, in place."""
    half, n_kinds = held.n_batches // 2, held.works.shape[1]
    means, idle = held.works.sum(axis=0) // held.n_batches, 0
    for turn in range(MEAN_ROUNDS if half else 0):
        over = held.works - means
        order = np.argsort(-over[:, turn // 2 % n_kinds], kind="stable")
        givers, takers = order[:half], np.roll(order[::-1][:half], turn // (2 * n_kinds))
        wide = PAIRS if turn % 2 else 0
        swaps = held.swap(givers, takers, (over[givers] - over[takers]) // 2, width=WIDTH, pairs=wide)
        idle = 0 if swaps else idle + 1
        if idle == 2 * n_kinds:
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
        if idle > PARTS_IDLE:
            break
        kind, wide = turn // 2 % held.works.shape[1], PAIRS if turn % 2 else 0
        works = held.works[place]  # [ranks, rows, kinds]
        if meet == "step":
            works = works.sum(axis=1, keepdims=True)
        order = np.argsort(-works[:, :, kind], axis=0, kind="stable")
        # The most loaded half with the other one, in each micro-step or as a whole; few where samples go by twos.
        most = min(half, max(1, WIDE // n_rows)) if wide else half
        from_rank, to_rank = order[:most], np.roll(order[::-1][:half], turn // 4 % half, axis=0)[:most]
        rows = np.arange(works.shape[1])
        wish = (works[from_rank, rows] - works[to_rank, rows]) // 2
        if meet == "step":
            givers, takers = place[from_rank[:, 0]], np.roll(place[to_rank[:, 0]], turn, axis=1)
            wish = wish.repeat(n_rows, axis=1)
        else:
            givers, takers = place[from_rank, rows], place[to_rank, rows]
        held.swap(
            givers.ravel(),
            takers.ravel(),
            wish.reshape(-1, wish.shape[2]),
            group=n_rows if meet == "step" else 1,
            width=WIDTH,
            pairs=wide,
        )
        now = parts_objective(held.works, seats, n_ranks, meet)
        idle = 0 if now < best - (best >> PROGRESS) else idle + 1
        if now < best:
            best, batches = now, held.batches.copy()
    return held.moved(batches)


def parts_objective(works: Ints, seats: tuple[Ints, Ints], n_ranks: int, meet: Meet) -> int:
    """Return the sum of the objectives of all kinds of work."""
    return sum(objective(column, seats, n_ranks, meet) for column in works.T)
