"""One optimizer step whose samples come in groups that stay together: on one rank, or in one micro-step. Pure.

First the groups are packed as wholes: onto ranks, each with the room of its K micro-batches, or into micro-steps with
the room of R. Then the samples of each rank, or of each micro-step, are packed by themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.balancing import (
    PAIRS,
    ROUNDS,
    WIDTH,
    near,
    patience,
    polish,
    toward,
    toward_means,
)
from headrace.size_aware_batching.planning.micro_batches.bounds import fewest, least_value, row_targets
from headrace.size_aware_batching.planning.micro_batches.filling import packed
from headrace.size_aware_batching.planning.micro_batches.samples import Assignment, Ints, Meet, NoPlanError, Samples
from headrace.size_aware_batching.planning.micro_batches.sums import assigned, plan_sums
from headrace.size_aware_batching.planning.micro_batches.swaps import MicroBatches

GroupOn = Literal["rank", "micro_step"]

BANDS = 5  # 3: 0.4 to 3.4 % more lockstep
# Of the whole work beside those of the bands. 1, 3, 8: 1.080, 1.062, 1.046 of the lockstep without groups for lognormal
# lengths in groups of 16, and 1.060, 1.049, 1.042 for rollouts.
TOTAL_WEIGHT = 8


def plan_groups(
    samples: Samples, groups: Ints, n_ranks: int, multiple: int, meet: Meet, group_on: GroupOn
) -> Assignment:
    """Plan one step of samples, the largest first, of which those of one group (numbers from 0 on) stay together.

    Raises:
        NoPlanError: If no number of micro-batches was found for which groups and samples fit.
    """
    at_once = n_ranks * multiple
    few = -(-fewest(samples) // at_once) * multiple
    most = len(samples) // at_once * multiple
    if few > most:
        raise NoPlanError(few)
    works, total = np.zeros((n_ranks, 0), np.int64), int(samples.work.sum())
    count, step = few, multiple
    while count <= most:
        if meet == "micro_batch" and works.shape[1] < count:
            works = free_works(samples, n_ranks, multiple, count)
            count = works.shape[1]
        targets, bound = row_targets(samples, count, n_ranks)
        bound = least_value(samples, count, n_ranks, meet, bound)
        parts = n_ranks if group_on == "rank" else count
        goals = [np.full(parts, -(-total // parts))]
        if meet == "micro_batch":
            goals.insert(0, works.sum(axis=1 if group_on == "rank" else 0))
        if group_on == "rank":
            held = on_ranks(samples, groups, count, goals, targets, bound, meet)
        else:
            rows = (in_micro_steps(samples, groups, totals, n_ranks) for totals in goals)
            held = next((found for found in rows if found is not None), None)
        if held is not None:
            number = np.arange(held.n_batches)
            seats = np.divmod(number, count)
            if group_on == "rank":  # the heaviest of each rank in one micro-step
                order = np.argsort(-held.work.reshape(n_ranks, count), axis=1, kind="stable")
                row = np.empty_like(order)
                np.put_along_axis(row, order, np.arange(count)[None, :].repeat(n_ranks, axis=0), axis=1)
                seats = seats[0], row.ravel()
            else:
                seats = seated_rows(held.work.reshape(count, n_ranks))
            return assigned(held, seats, count, few, bound)
        count, step = count + step, step if count < few + 8 * multiple else 2 * step
    raise NoPlanError(few)


def together(samples: Samples, groups: Ints, room: int) -> tuple[Samples, Ints]:
    """Return each group as one sample with the room of so many micro-batches, by its heaviest member, and the order."""
    n_groups = int(groups.max()) + 1
    sizes = np.stack([np.bincount(groups, column, minlength=n_groups) for column in samples.sizes.T], axis=1)
    work = np.bincount(groups, samples.work, minlength=n_groups).astype(np.int64)
    heaviest = np.zeros(n_groups, np.int64)
    np.maximum.at(heaviest, groups, samples.work)
    order = np.lexsort((-work, -heaviest))
    return Samples(sizes.astype(np.int64)[order], samples.budgets * room, work[order]), order


def placed(samples: Samples, groups: Ints, goals: Ints, room: int) -> Ints | None:
    """Return the part of each sample: groups as wholes in parts of given work, each with the room of micro-batches."""
    wholes, order = together(samples, groups, room)
    if len(wholes) < len(goals) or (wholes.sizes > wholes.budgets).any():
        return None
    held = packed(wholes, len(goals), goals)
    if held is None:
        return None
    toward(held, goals)
    part = np.empty(len(order), np.int64)
    part[order] = held.batches
    return part[groups]


def placed_by_bands(samples: Samples, groups: Ints, n_ranks: int, room: int) -> Ints | None:
    """Return the rank of each sample: groups as wholes, with even works of the ranks as a whole and in each band.

    A second heavy sample on a rank makes a second micro-step long. So the heaviest samples, one for each rank, are a
    band, those that follow, two for each rank, another one, and so on.
    """
    wholes, order = together(samples, groups, room)
    if len(wholes) < n_ranks or (wholes.sizes > wholes.budgets).any():
        return None
    band = np.empty(len(samples), np.int64)
    heaviest_first = np.argsort(-samples.work, kind="stable")
    band[heaviest_first] = np.searchsorted(n_ranks * (2 ** np.arange(1, BANDS) - 1), np.arange(len(band)), "right")
    parts = np.zeros((len(order), BANDS + 1), np.int64)
    np.add.at(parts, (groups, band), samples.work)
    parts[:, BANDS] = TOTAL_WEIGHT * parts.sum(axis=1)
    held = packed(replace(wholes, parts=parts[order]), n_ranks, np.full(n_ranks, wholes.work.sum() // n_ranks))
    if held is None:
        return None
    toward_means(held)
    rank = np.empty(len(order), np.int64)
    rank[order] = held.batches
    return rank[groups]


def free_works(samples: Samples, n_ranks: int, multiple: int, count: int) -> Ints:
    """Return the works ``[ranks, k]`` of a plan without groups, which shows where the heaviest samples belong."""
    found = plan_sums(replace(samples, parts=None), n_ranks, multiple, "micro_batch", count)
    works = np.zeros((n_ranks, found.n_micro_batches), np.int64)
    np.add.at(works, (found.rank, found.micro_batch), samples.work)
    return works


def on_ranks(
    samples: Samples, groups: Ints, count: int, goals: list[Ints], targets: Ints, bound: int, meet: Meet
) -> MicroBatches | None:
    """Return samples in micro-batches, those of rank r being r * count and the following, or None.

    Where ranks meet at each micro-step, the better of two: the ranks' works come near to the goals, or each band of the
    heaviest samples is even, too.
    """
    n_ranks = len(goals[0])
    found = (packed_ranks(samples, placed(samples, groups, totals, count), count, targets, bound) for totals in goals)
    plans = [next((held for held in found if held is not None), None)]
    if meet == "micro_batch" and not (plans[0] and near(lockstep_on_ranks(plans[0].work, n_ranks), bound)):
        rank = placed_by_bands(samples, groups, n_ranks, count)
        plans.append(packed_ranks(samples, rank, count, targets, bound))
    fitting = [held for held in plans if held is not None]
    return min(fitting, key=lambda held: lockstep_on_ranks(held.work, n_ranks)) if fitting else None


def packed_ranks(samples: Samples, rank: Ints | None, count: int, targets: Ints, bound: int) -> MicroBatches | None:
    """Return samples whose ranks are known in micro-batches, or None where those of a rank do not fit."""
    if rank is None:
        return None
    n_ranks = int(rank.max()) + 1
    if np.bincount(rank, minlength=n_ranks).min() < count:
        return None
    batches = np.empty(len(samples), np.int64)
    goals = np.sort(targets)[::-1]
    for number in range(n_ranks):
        own = np.flatnonzero(rank == number)
        held = packed(samples.of(own), count, goals)
        if held is None:
            return None
        batches[own] = number * count + held.batches
    return polish_ranks(MicroBatches(samples, n_ranks * count, batches), n_ranks, goals, bound)


def lockstep_on_ranks(work: Ints, n_ranks: int) -> int:
    """Return the sum of the largest works, with the heaviest of each rank in one micro-step, and so on."""
    return int(np.sort(work.reshape(n_ranks, -1), axis=1).max(axis=0).sum())


def polish_ranks(held: MicroBatches, n_ranks: int, goals: Ints, bound: int) -> MicroBatches:
    """Swap towards the targets between micro-batches of one rank; the best that was seen."""
    count = held.n_batches // n_ranks
    half, ranks = count // 2, np.arange(n_ranks)[:, None] * count
    best, batches, idle = lockstep_on_ranks(held.work, n_ranks), held.batches.copy(), 0
    for turn in range(2 * ROUNDS if half else 0):
        if near(best, bound) or idle > patience(held):
            break
        work = held.work.reshape(n_ranks, count)
        order = np.argsort(-work, axis=1, kind="stable")
        over = np.empty_like(work)
        # What a rank has more than the targets is spread over its micro-batches.
        own = goals + np.maximum(0, -(-(work.sum(axis=1) - int(goals.sum()))[:, None] // count))
        np.put_along_axis(over, order, np.take_along_axis(work, order, axis=1) - own, axis=1)
        order = np.argsort(-over, axis=1, kind="stable")
        givers = (ranks + order[:, :half]).ravel()
        takers = (ranks + np.roll(order[:, ::-1][:, :half], turn // 2 % half, axis=1)).ravel()
        wish = (over.ravel()[givers] - over.ravel()[takers]) // 2
        held.swap(givers, takers, wish, width=WIDTH, pairs=PAIRS if turn % 2 else 0)
        now = lockstep_on_ranks(held.work, n_ranks)
        idle = 0 if now < best else idle + 1
        if now < best:
            best, batches = now, held.batches.copy()
    return held.moved(batches)


def in_micro_steps(samples: Samples, groups: Ints, totals: Ints, n_ranks: int) -> MicroBatches | None:
    """Return samples in micro-batches, those of micro-step k being k * n_ranks and the following, or None."""
    count = len(totals)
    row = placed(samples, groups, totals, n_ranks)
    if row is None or np.bincount(row, minlength=count).min() < n_ranks:
        return None
    batches = np.empty(len(samples), np.int64)
    for number in range(count):
        own = np.flatnonzero(row == number)
        part = samples.of(own)
        targets, bound = row_targets(part, 1, n_ranks)
        held = packed(part, n_ranks, targets.repeat(n_ranks))
        if held is None:
            return None
        batches[own] = number * n_ranks + polish(held, n_ranks, targets, bound).batches
    return MicroBatches(samples, n_ranks * count, batches)


def seated_rows(work: Ints) -> tuple[Ints, Ints]:
    """Return rank and number of micro-batches ``[k, ranks]``: a micro-step's heaviest to the rank with least so far."""
    rank, total = np.empty(work.shape, np.int64), np.zeros(work.shape[1], np.int64)
    row = np.empty(len(work), np.int64)
    row[np.argsort(-work.max(axis=1), kind="stable")] = np.arange(len(work))
    for number, works in enumerate(work):
        heaviest, lightest = np.argsort(-works, kind="stable"), np.argsort(total, kind="stable")
        rank[number, heaviest] = lightest
        total[lightest] += works[heaviest]
    return rank.ravel(), row.repeat(work.shape[1])
