"""Reassignment of samples to batches where few large ones fill a batch, and swaps of two do not suffice. Pure.

In each turn every batch gives away one of its samples and gets one back. Two sorts decide that for all batches at once,
so that a few turns replace thousands of swaps.

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
from headrace.size_aware_batching.planning.repair import PATIENCE, TURNS, by_batch
from headrace.size_aware_batching.planning.shuffles import random_words

# Turns of random dealing. 4, 8, 24: of 1,000 pairs that fill a batch 7, 6, 7 come again in the next epoch, of lognormal
# sizes with two or three samples a batch 6, 3, 4.
RANDOM_TURNS = 8
HALF = np.uint64(32)  # bits of a word

Ints = NDArray[np.int64]
# What is left in each batch, the sizes of the samples that they gave, and random numbers of 32 bits -> which of these
# samples each batch gets.
Dealing = Callable[[Ints, Ints, NDArray[np.uint64]], Ints]


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

    def turn(self, key: int, number: int, deal: Dealing) -> None:
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
        dealt = given[deal(rest, self._sizes[given], further)]
        self._samples[slots] = dealt
        self.loads = rest + self._sizes[dealt]

    def write(self, batches: Ints) -> None:
        """Write the batch of each sample."""
        some = self._samples < len(batches)
        batches[self._samples[some]] = self._batch[some]


def even_out(sizes: Ints, budget: int, batches: Ints, n_batches: int, key: int) -> bool:
    """Reassign samples, in place, until no batch exceeds the budget; return whether that was reached."""

    def deal(rest: Ints, sizes: Ints, _words: NDArray[np.uint64]) -> Ints:
        dealt = np.empty(n_batches, np.int64)
        dealt[np.argsort(rest, kind="stable")] = np.argsort(-sizes, kind="stable")
        return dealt

    slots = Slots(sizes, batches, n_batches)
    stale, least = 0, np.inf
    for turn in range(TURNS):
        over = float(np.maximum(slots.loads - budget, 0).sum())
        if not over or stale > PATIENCE:
            break
        stale, least = (0, over) if over < 0.95 * least else (stale + 1, least)
        slots.turn(key, turn, deal)
    slots.write(batches)
    return bool((slots.loads <= budget).all())


def rematch(sizes: Ints, budget: int, batches: Ints, n_batches: int, key: int) -> None:
    """Reassign samples at random, in place; no batch exceeds the budget before or after."""

    def deal(rest: Ints, sizes: Ints, words: NDArray[np.uint64]) -> Ints:
        fullest, smallest = np.argsort(-rest, kind="stable"), np.argsort(sizes, kind="stable")
        fitting = np.searchsorted(sizes[smallest], budget - rest[fullest], side="right").tolist()
        pool, dealt, waiting = list[int](), list[int](), smallest.tolist()
        for fits, word in zip(fitting, words.tolist(), strict=True):
            pool += waiting[len(pool) + len(dealt) : fits]
            place = word * len(pool) >> 32
            pool[place], pool[-1] = pool[-1], pool[place]
            dealt.append(pool.pop())
        found = np.empty(n_batches, np.int64)
        found[fullest] = dealt
        return found

    slots = Slots(sizes, batches, n_batches)
    for turn in range(RANDOM_TURNS):
        slots.turn(key, TURNS + turn, deal)
    slots.write(batches)
