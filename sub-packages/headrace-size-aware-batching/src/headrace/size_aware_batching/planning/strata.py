"""Samples sorted by size, in strata, so that all windows have the same spread of sizes."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import fold_in, splitmix64

SORTED_AT_ONCE = 2**15  # samples, at most 2**16, so that size and place fit a word of 32 bits
COUNTED = 2**16  # sizes below this are sorted by counting
# Threads that sort, and samples that are worth one. On two cores that others use, too, 2 threads take 0.4 to 1.2 times
# as long as 1.
THREADS, WORTH_A_THREAD = 4, 2**22


def index_type(n_samples: int) -> type[np.signedinteger[Any]]:
    """Return the smallest integer type that holds the indices of so many samples."""
    return np.int32 if n_samples < 2**31 else np.int64


def sorted_by_size(sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of the samples by size, largest first, equal sizes in their order, and the sorted sizes.

    Small integers are sorted by counting, a chunk at a time, with 4 bytes a sample and a few chunks' worth beside them;
    the sorted ones have two bytes each.

    >>> order, descending = sorted_by_size(np.array([3, 7, 3, 9]))
    >>> order.tolist(), descending.tolist(), descending.dtype
    ([3, 1, 0, 2], [9, 7, 3, 3], dtype('uint16'))
    """
    kind = index_type(len(sizes))
    largest = int(sizes.max()) if len(sizes) and sizes.dtype.kind in "iu" else COUNTED
    if largest >= COUNTED:
        negated = -sizes.astype(np.float64 if sizes.dtype.kind == "f" else np.int64)
        order = np.argsort(negated, kind="stable").astype(kind)
        return order, sizes[order]
    order = np.empty(len(sizes), kind)
    n_parts = max(1, min(THREADS, os.cpu_count() or 1, len(sizes) // WORTH_A_THREAD))
    bounds = [len(sizes) * part // n_parts for part in range(n_parts + 1)]
    with ThreadPoolExecutor(n_parts) as threads:
        run: Any = threads.map if n_parts > 1 else map
        parts = [slice(*pair) for pair in pairwise(bounds)]
        counts = np.array(list(run(lambda part: counted_sizes(sizes[part], largest), parts)))
        total = counts.sum(axis=0)
        # Where the first sample of each size goes, and of each part after those of the parts before.
        begins = places_before(total) + np.cumsum(counts, axis=0) - counts
        list(run(lambda part, begin: sort_part(sizes, part, largest, begin, order), parts, begins))
    return order, np.repeat(np.arange(len(total), dtype=np.uint16)[::-1], total[::-1])


def counted_sizes(sizes: NDArray[Any], largest: int) -> NDArray[np.int64]:
    """Return how many samples there are of each size up to the largest."""
    counts = np.zeros(largest + 1, np.int64)
    for start in range(0, len(sizes), 2**18):
        counts += np.bincount(sizes[start : start + 2**18], minlength=len(counts))
    return counts


def sort_part(
    sizes: NDArray[Any], part: slice, largest: int, following: NDArray[np.int64], order: NDArray[Any]
) -> None:
    """Write the samples of a part to their places; ``following``: where the next sample of each size goes."""
    inside = np.arange(min(SORTED_AT_ONCE, part.stop - part.start), dtype=np.uint32)
    for start in range(part.start, part.stop, SORTED_AT_ONCE):
        chunk = sizes[start : min(start + SORTED_AT_ONCE, part.stop)]
        # Size and place in one word: sorting words is faster than sorting places by sizes.
        words = (largest - chunk).astype(np.uint32)
        words <<= np.uint32(16)
        words |= inside[: len(chunk)]
        words.sort()
        rank = words >> np.uint32(16)  # 0 for the largest size
        present = np.bincount(rank, minlength=largest + 1)
        places = (following[::-1] - (np.cumsum(present) - present))[rank]
        places += np.arange(len(chunk))
        words &= np.uint32(2**16 - 1)
        samples = words.astype(order.dtype)
        samples += start
        order[places] = samples
        following += present[::-1]


def sort_samples(sizes: NDArray[Any], samples: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return some samples, or all, by size, largest first, and their sizes; samples in ascending order, of one column.

    >>> sort_samples(np.array([3, 7, 3, 9]), np.array([0, 1, 2]))[0].tolist()
    [1, 0, 2]
    """
    if samples is None:
        return sorted_by_size(sizes)
    order, descending = sorted_by_size(sizes[samples])
    return samples[order].astype(index_type(len(sizes))), descending


def narrowed(descending: NDArray[Any]) -> NDArray[Any]:
    """Return sorted sizes in the type that `sorted_by_size` gives them."""
    small = len(descending) and descending.dtype.kind in "iu" and descending[0] < COUNTED
    return descending.astype(np.uint16) if small else descending


def places_before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many samples of larger sizes there are, from the count of each size."""
    return np.concatenate([[0], np.cumsum(counts[::-1])[:-1]])[::-1].copy()


@dataclass(frozen=True)
class Strata:
    """Samples sorted by size in strata, one sample of each stratum for every window.

    Stratum j is ``n_windows`` neighbours in the sorted order. So all windows have the same spread of sizes, each can be
    planned alone, and none of its samples is larger than the largest of the sample's stratum.
    """

    n_samples: int
    n_windows: int

    @property
    def depth(self) -> int:
        """Number of strata, the samples in a full window."""
        return -(-self.n_samples // self.n_windows)

    @property
    def n_full(self) -> int:
        """Number of windows that have a sample of the last stratum: the first ones."""
        return self.n_samples - (self.depth - 1) * self.n_windows

    def start(self, window: int) -> int:
        """Return the number of samples in the windows before this one."""
        return window * (self.depth - 1) + min(window, self.n_full)

    def window_of(self, position: int) -> int:
        """Return the window that holds the sample at a position of the epoch."""
        full = self.n_full * self.depth
        if position < full or self.depth == 1:
            return position // self.depth
        return self.n_full + (position - full) // (self.depth - 1)

    def firsts(self) -> NDArray[np.int64]:
        """Return the place, in the sorted order, of each stratum's first sample, shape ``[depth]``."""
        return np.arange(self.depth, dtype=np.int64) * self.n_windows

    def shifts(self, key: int) -> NDArray[np.int64]:
        """Return each stratum's keyed rotation, shape ``[depth]``; the last stratum, which may be short, has none."""
        words = splitmix64(np.arange(self.depth, dtype=np.uint64) ^ fold_in(key)) >> np.uint64(32)
        shifts = ((words * np.uint64(self.n_windows)) >> np.uint64(32)).astype(np.int64)
        shifts[-1] = 0
        return shifts

    def places(
        self, first: int, stop: int, shifts: NDArray[np.int64], sequence: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return the places in the sorted order of the samples of some windows, shape ``[windows, strata]``.

        ``sequence`` lists the strata that are asked for, None for all. Windows from ``n_full`` on have no sample of the
        last stratum; the place given for it is valid, but not theirs.
        """
        firsts = self.firsts()
        if sequence is not None:
            shifts, firsts = shifts[sequence], firsts[sequence]
        places = np.arange(first, stop, dtype=np.int64)[:, None] + shifts
        places -= (places >= self.n_windows) * np.int64(self.n_windows)
        places += firsts
        np.minimum(places, self.n_samples - 1, out=places)
        return places


UNITS = 2**19  # of a budget, in which columns are compared


def kd_order(
    sizes: NDArray[Any], budgets: Sequence[float], strata: Strata, ranked: bool = True
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Order samples ``[n, k]`` so that those of a stratum are alike in all columns; return each stratum's maximum, too.

    As in a k-d tree (Bentley, "Multidimensional binary search trees used for associative searching", 1975): the list is
    halved again and again, at a multiple of the stratum, each part by the column in which its shares of the budget
    spread most. ``ranked`` strata follow by how much they take; else neighbours in the tree stay neighbours.
    """
    n_samples, leaf = strata.n_samples, strata.n_windows
    shares = np.empty(sizes.shape, np.int32)
    for column, budget in enumerate(budgets):
        shares[:, column] = np.minimum(np.ceil(sizes[:, column] * (UNITS / max(budget, 1))), UNITS)
    order = np.arange(n_samples, dtype=index_type(n_samples))
    offsets = np.array([0, n_samples])
    while (lengths := np.diff(offsets)).max() > leaf:
        sorted_shares = shares[order]
        lowest = np.minimum.reduceat(sorted_shares, offsets[:-1], axis=0)
        spread = np.maximum.reduceat(sorted_shares, offsets[:-1], axis=0) - lowest
        part = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
        chosen = spread.argmax(axis=1)[part]
        key = (part << 20) | (UNITS - np.take_along_axis(sorted_shares, chosen[:, None], axis=1)[:, 0])
        order = order[np.argsort(key, kind="stable")]
        halves = offsets[:-1] + np.minimum(-(-lengths // leaf) // 2 * leaf, lengths)
        offsets = np.unique(np.concatenate([offsets, halves]))
    begins = strata.firsts()
    largest = np.maximum.reduceat(sizes[order], begins, axis=0)
    if largest.dtype.kind != "f":
        largest = largest.astype(np.int64)
    if not ranked:
        return order, largest
    # Strata that take most come first, as greedy balancing wants them; the last, which may be short, stays the last.
    totals = np.maximum(largest.sum(axis=0, dtype=np.float64), 1)
    rank = np.argsort(-(largest / totals).max(axis=1)[:-1], kind="stable")
    whole = len(rank) * leaf
    order[:whole] = order[:whole].reshape(-1, leaf)[rank].ravel()
    return order, largest[np.append(rank, len(rank))]
