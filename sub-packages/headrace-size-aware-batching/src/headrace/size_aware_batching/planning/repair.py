"""Repair of a packing: samples change places between batches until none is over its budgets. Pure.

Greedy balancing leaves some batches over a budget by a little and others below it by as much. One turn of `repair`::

    over the budget        with room              after the swap
    A [9 7 5] = 21         B [8 6 3] = 17         A [9 7 3] = 19    B [8 6 5] = 19      (budget 20)

1. `partners`: each batch that is over (giver) gets some batches with room (takers), none of them in two pairs.
2. `best_swaps`: all swaps of a sample of the giver for a smaller one of the taker, or for nothing, are compared at
   once. The best leaves least over in both batches.
3. Each giver makes its best swap, unless that leaves as much over as before. Then the next turn begins.

Measured: batches of an epoch, 20,000 samples, stratified and packed. Atoms have 6 samples a batch, molecules 12 and
crystals 12 in two columns (the sets of the tests).

==================  ==========  ==============  ==============
turns               atoms       molecules       crystals
==================  ==========  ==============  ==============
0 (no repair)       3542, 3461  1710, 1699      1690, 1672
15, 30, 60, 120     3353, 3340  1674, 1670      1678, 1667
==================  ==========  ==============  ==============

The other constants matter less: with ``PATIENCE`` 2 or 12, ``PARTNERS`` 32, ``MEMBERS`` 32 or 128, ``FEW`` 8 or
``QUICK`` 8 all six numbers are the same. With ``PARTNERS`` 4 the packed ones of atoms and crystals are 3 more each,
with ``FEW`` 64 or ``QUICK`` 0 that of crystals is 1 less.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.shuffles import random_words

# Scores of all swaps of some pairs of batches, from a slice of the pairs and what their batches may give and take.
Score = Callable[[slice, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]

TURNS = 60  # at most; 15 are enough for the sets above
PATIENCE = 6  # turns in a row without progress, after which the packing is given up
PARTNERS = 16  # takers of one giver, at most
PAIRS = 2**11  # pairs of a turn, at most, so that many givers have fewer takers each
MEMBERS = 64  # samples of a batch that are compared in a turn; others follow in turns without progress
FEW = 16  # the same in the first turns, where nearly any swap helps
QUICK = 4  # first turns
MIXED = (
    12  # rounds of random swaps. 0, 4, 12, 36: samples of crystals share a batch again 3.6, 1.9, 1.3, 1.3 times chance
)
CANDIDATES = 2**18  # swaps that are compared at once: their excess, in float32, takes 1 MB


def repair(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], batches: NDArray[np.int64], n_batches: int, key: int
) -> bool:
    """Swap samples between batches in place until none is over the budgets; return whether that was reached.

    The swaps are those of Alvim, Ribeiro, Glover and Aloise, "A hybrid improvement heuristic for the one-dimensional
    bin packing problem" (2004). Here all batches that are over swap at once.
    """
    unit = np.maximum(budgets, 1)
    with_nothing = np.concatenate([sizes, np.zeros((1, sizes.shape[1]), np.int64)])
    loads = [np.bincount(batches, column, minlength=n_batches) for column in sizes.T]
    load = np.stack(loads, axis=1).astype(np.int64)
    table: NDArray[np.int64] | None = None
    stale, least = 0, UNLIMITED
    for turn in range(TURNS):
        over = parts_over(load - budgets, unit)
        if not over.any():
            return True
        total = int(over.sum())
        # Progress is a twentieth less over than at the last progress; less than that takes too many turns.
        stale, least = (0, total) if 20 * total < 19 * least else (stale + 1, least)
        if stale > PATIENCE:
            return False
        pairs = partners(load - budgets, over, stale)
        if not len(pairs[0]):
            return False
        if table is None or stale:
            table = members(batches, n_batches, stale)
        drawn = np.argsort(random_words(int(fold_in(key, turn)[0]), table.shape[1]))[: None if turn >= QUICK else FEW]
        some, excess = table[:, drawn], load - budgets
        slots = best_swaps(some, pairs, excess_left(with_nothing, excess, unit, pairs))
        row = some[pairs[0], slots[0]], some[pairs[1], slots[1]]
        swapped = with_nothing[row[1]] - with_nothing[row[0]]  # exactly, what was compared in short numbers
        left = parts_over(excess[pairs[0]] + swapped, unit) + parts_over(excess[pairs[1]] - swapped, unit)
        left[row[0] == len(sizes)] = UNLIMITED
        # Of the swaps with its partners, each giver makes the best.
        order = np.lexsort((left, pairs[0]))
        chosen = order[np.append(True, pairs[0][order][1:] != pairs[0][order][:-1])]
        chosen = chosen[left[chosen] < over[pairs[0][chosen]]]
        giver, taker = pairs[0][chosen], pairs[1][chosen]
        gives, takes = row[0][chosen], row[1][chosen]
        change = with_nothing[takes] - with_nothing[gives]
        load[giver] += change
        load[taker] -= change
        batches[gives] = taker
        real = takes < len(sizes)
        batches[takes[real]] = giver[real]
        table[giver, drawn[slots[0][chosen]]] = takes
        table[taker, drawn[slots[1][chosen]]] = gives
    return bool((load <= budgets).all())


def parts_over(excess: NDArray[np.int64], unit: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return by how much rows are over in all columns together, in whole millionths of a unit."""
    parts: NDArray[np.int64] = np.ceil(np.maximum(excess, 0) / unit * 1e6).astype(np.int64).sum(axis=1)
    return parts


def partners(
    excess: NDArray[np.int64], over: NDArray[np.int64], shift: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair batches that are over, the worst first, each with some that have most room in its fullest column."""
    givers = np.flatnonzero(over)
    givers = givers[np.argsort(-over[givers], kind="stable")]
    tightest = excess[givers].argmax(axis=1)
    free = over == 0
    pairs = []
    for column in range(excess.shape[1]):
        own = givers[tightest == column]
        room = np.flatnonzero(free)
        room = room[np.argsort(excess[room, column], kind="stable")]
        if not len(own) or not len(room):
            continue
        each = min(max(len(room) // len(givers), 1), max(1, min(PARTNERS, PAIRS // len(givers))))
        room = np.roll(room, -(shift * len(own) % max(1, len(room) // 2)))
        own = own[: len(room)]
        takers = room[: len(own) * each]
        pairs.append((np.tile(own, each), takers))
        free[takers] = False
    if not pairs:
        return givers[:0], givers[:0]
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def members(batches: NDArray[np.int64], n_batches: int, shift: int, most: int = MEMBERS) -> NDArray[np.int64]:
    """Return samples of each batch, shape ``[m, width]``, some of them where it has very many; n stands for none."""
    length = len(batches)
    samples = np.append(by_batch(batches, n_batches), length)
    counts = np.bincount(batches, minlength=n_batches)
    begins = np.cumsum(counts) - counts
    width = min(most, int(counts.max()))
    many = counts > width
    slots = np.arange(width)
    at = np.where(many[:, None], (slots * counts[:, None] // width + shift) % np.maximum(counts, 1)[:, None], slots)
    at = np.where(at < counts[:, None], at + begins[:, None], length)
    return np.concatenate([samples[at], np.full((n_batches, 1), length)], axis=1)


def by_batch(batches: NDArray[np.int64], n_batches: int) -> NDArray[np.int64]:
    """Return the samples batch by batch, those of a batch in ascending order."""
    kind = np.uint16 if n_batches < 2**16 else np.uint32  # two bytes are sorted in linear time
    return np.argsort(batches.astype(kind), kind="stable")


def best_swaps(
    table: NDArray[np.int64], pairs: tuple[NDArray[np.int64], NDArray[np.int64]], score: Score
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots, in a table of members, of the samples whose swap has the lowest score in each pair of batches.

    Args:
        table: What each batch may give or take, shape ``[m, width]``.
        pairs: The two batches of each pair.
        score: Function of a slice of the pairs, and of what their batches may give and take, to the scores of all
            swaps, shape ``[pairs, width, width]``.
    """
    slots = []
    together = max(1, CANDIDATES // table.shape[1] ** 2)
    for start in range(0, len(pairs[0]), together):
        part = slice(start, start + together)
        scores = score(part, table[pairs[0][part]], table[pairs[1][part]])
        slots.append(scores.reshape(len(scores), -1).argmin(axis=1))
    best = np.concatenate(slots)
    return best // table.shape[1], best % table.shape[1]


def excess_left(
    sizes: NDArray[np.int64],
    excess: NDArray[np.int64],
    unit: NDArray[np.int64],
    pairs: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Score:
    """Return the score of swaps by what they leave over the budgets in both batches."""
    none = len(sizes) - 1
    share, over = (sizes / unit).astype(np.float32), (excess / unit).astype(np.float32)

    def score(part: slice, given: NDArray[np.int64], taken: NDArray[np.int64]) -> NDArray[np.float32]:
        giver, taker = pairs[0][part], pairs[1][part]
        left = np.zeros((len(giver), given.shape[1], taken.shape[1]), np.float32)
        for column in range(sizes.shape[1]):
            there = share[taken, column][:, None, :] - share[given, column][:, :, None]
            here = there + over[giver, column][:, None, None]
            np.subtract(over[taker, column][:, None, None], there, out=there)
            np.maximum(here, 0, out=here)
            np.maximum(there, 0, out=there)
            left += here
            left += there
        left[given == none] = np.inf  # nothing for something only loads the batch that is over
        return left

    return score


def mix(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], batches: NDArray[np.int64], n_batches: int, key: int
) -> None:
    """Swap samples of random pairs of batches at random, in place, as far as both stay inside the budgets.

    A random walk over the packings that fit: what greedy balancing of large samples always puts together comes apart.
    """
    table = members(batches, n_batches, 0)[:, :-1]
    room = budgets - np.stack([np.bincount(batches, column, minlength=n_batches) for column in sizes.T], axis=1)
    room = room.astype(np.int64)
    half = n_batches // 2
    for turn in range(MIXED if half else 0):
        words = random_words(int(fold_in(key, turn, 1)[0]), n_batches + table.shape[1] + FEW**2)
        pair = np.argsort(words[:n_batches], kind="stable")[: 2 * half].reshape(2, half)
        slots = np.argsort(words[n_batches : -(FEW**2)], kind="stable")[:FEW]
        wish = words[-(FEW**2) :].reshape(FEW, FEW)[: len(slots), : len(slots)] >> np.uint64(1)
        one, other = table[pair[0]][:, slots], table[pair[1]][:, slots]
        there = (one < len(sizes))[:, :, None] & (other < len(sizes))[:, None, :]
        one_sizes, other_sizes = sizes[np.minimum(one, len(sizes) - 1)], sizes[np.minimum(other, len(sizes) - 1)]
        change = other_sizes[:, None, :, :] - one_sizes[:, :, None, :]
        fits = there & (change <= room[pair[0]][:, None, None, :]).all(axis=3)
        fits &= (-change <= room[pair[1]][:, None, None, :]).all(axis=3)
        score = np.where(fits, wish, np.iinfo(np.uint64).max).reshape(half, -1)
        best = score.argmin(axis=1)
        rows = np.flatnonzero(fits.reshape(half, -1)[np.arange(half), best])
        a, b = best[rows] // len(slots), best[rows] % len(slots)
        first, second = one[rows, a], other[rows, b]
        moved = sizes[second] - sizes[first]
        room[pair[0][rows]] -= moved
        room[pair[1][rows]] += moved
        batches[first], batches[second] = pair[1][rows], pair[0][rows]
        table[pair[0][rows], slots[a]], table[pair[1][rows], slots[b]] = second, first
