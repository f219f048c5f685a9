"""Repair of a packing: samples change places between batches until none is over its budgets. Pure.

**Swaps.** Greedy balancing leaves some batches over a budget by a little and others below it by as much. One turn of
`repair`::

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

**Reassignment**, where few large samples fill a batch and swaps of two do not suffice. In each turn every batch gives
away one of its samples and gets one back. Two sorts decide that for all batches at once, so that a few turns replace
thousands of swaps.

- `even_out`: the fuller a batch is without the sample that it gave, the smaller the one that it gets. Of all ways to
  give the samples back this one leaves the batches most alike.
- `rematch`: each batch gets a random one of those that it has room for, the fullest batch first. What fits there fits
  all later ones, too, so that all samples are given back whatever is drawn.

A batch of one sample gives nothing in every other turn, so that it may get a second one.
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
# Rounds of random swaps. 0, 4, 12, 36: samples of crystals share a batch again 3.6, 1.9, 1.3, 1.3 times chance.
MIXED = 12
HALF = np.uint64(32)  # bits of a word
CANDIDATES = 2**18  # swaps that are compared at once: their excess, in float32, takes 1 MB
# Turns of random reassignment. 4, 8, 24: of 1,000 pairs that fill a batch 7, 6, 7 come again in the next epoch, of
# lognormal sizes with two or three samples a batch 6, 3, 4.
RANDOM_TURNS = 8

Ints = NDArray[np.int64]
# What is left in each batch, the sizes of the samples that they gave, and random numbers of 32 bits -> which of these
# samples each batch gets.
Reassign = Callable[[Ints, Ints, NDArray[np.uint64]], Ints]


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


class Slots:
    """Samples batch by batch; a batch of one sample has a second slot with none in it, which is number n of size 0."""

    def __init__(self, sizes: Ints, batches: Ints, n_batches: int) -> None:
        none, alone = len(sizes), np.flatnonzero(np.bincount(batches, minlength=n_batches) == 1)
        batch_of = np.append(batches, alone)
        order = by_batch(batch_of, n_batches)
        self._sizes = np.append(sizes, 0)
        self._batch = batch_of[order]
        self._samples = np.append(np.arange(none), np.full(len(alone), none))[order]
        self._counts = np.bincount(batch_of, minlength=n_batches)
        self._begins = np.cumsum(self._counts) - self._counts
        self.loads: Ints = np.add.reduceat(self._sizes[self._samples], self._begins)

    def turn(self, key: int, number: int, reassign: Reassign) -> None:
        """Let each batch give one sample, or none, and get one back."""
        words = random_words(int(fold_in(key, number, 2)[0]), 2 * len(self._counts)) >> HALF
        drawn, further = np.split(words, 2)
        slots = self._begins + (drawn * self._counts.astype(np.uint64) >> HALF).astype(np.int64)
        none = np.flatnonzero(self._samples == len(self._sizes) - 1)  # at most one a batch
        if number % 2:
            slots[self._batch[none]] = none
        else:  # never: a batch that gives its only sample gets a sample back
            others = self._batch[none[slots[self._batch[none]] == none]]
            slots[others] = self._begins[others] + (slots[others] + 1 - self._begins[others]) % self._counts[others]
        given = self._samples[slots]
        rest = self.loads - self._sizes[given]
        reassigned = given[reassign(rest, self._sizes[given], further)]
        self._samples[slots] = reassigned
        self.loads = rest + self._sizes[reassigned]

    def write(self, batches: Ints) -> None:
        """Write the batch of each sample."""
        some = self._samples < len(batches)
        batches[self._samples[some]] = self._batch[some]


def even_out(sizes: Ints, budget: int, batches: Ints, n_batches: int, key: int) -> bool:
    """Reassign samples, in place, until no batch exceeds the budget; return whether that was reached."""

    def reassign(rest: Ints, sizes: Ints, _words: NDArray[np.uint64]) -> Ints:
        reassigned = np.empty(n_batches, np.int64)
        reassigned[np.argsort(rest, kind="stable")] = np.argsort(-sizes, kind="stable")
        return reassigned

    slots = Slots(sizes, batches, n_batches)
    stale, least = 0, np.inf
    for turn in range(TURNS):
        over = float(np.maximum(slots.loads - budget, 0).sum())
        if not over or stale > PATIENCE:
            break
        stale, least = (0, over) if over < 0.95 * least else (stale + 1, least)
        slots.turn(key, turn, reassign)
    slots.write(batches)
    return bool((slots.loads <= budget).all())


def rematch(sizes: Ints, budget: int, batches: Ints, n_batches: int, key: int) -> None:
    """Reassign samples at random, in place; no batch exceeds the budget before or after."""

    def reassign(rest: Ints, sizes: Ints, words: NDArray[np.uint64]) -> Ints:
        fullest, smallest = np.argsort(-rest, kind="stable"), np.argsort(sizes, kind="stable")
        fitting = np.searchsorted(sizes[smallest], budget - rest[fullest], side="right").tolist()
        pool, reassigned, waiting = list[int](), list[int](), smallest.tolist()
        for fits, word in zip(fitting, words.tolist(), strict=True):
            pool += waiting[len(pool) + len(reassigned) : fits]
            place = word * len(pool) >> 32
            pool[place], pool[-1] = pool[-1], pool[place]
            reassigned.append(pool.pop())
        found = np.empty(n_batches, np.int64)
        found[fullest] = reassigned
        return found

    slots = Slots(sizes, batches, n_batches)
    for turn in range(RANDOM_TURNS):
        slots.turn(key, TURNS + turn, reassign)
    slots.write(batches)
