"""Samples in micro-batches, and swaps of samples between pairs of these. Changes in place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.micro_batches.samples import Ints, Samples
from headrace.size_aware_batching.planning.repair import Score, best_swaps, members


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
