"""One window planned for the largest samples it can get: it fits every window of every epoch.

A window takes one sample of each stratum, none larger than the stratum's first. So batches that hold the firsts
hold whatever a window takes instead, and their number is known without looking at the windows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.planning.keyed import derive
from headrace.size_aware_batching.strategies.bucketed import cut
from headrace.size_aware_batching.strategies.packed import best_fit
from headrace.size_aware_batching.strategies.stratified import MAX_BATCHES, deal

BLOCK = 64  # neighbours in size among which samples change places


@dataclass(frozen=True)
class Template:
    """Which stratum goes to which batch.

    Args:
        batches: The batch of each stratum's sample, shape ``[depth]``.
        n_batches: Number of batches, none of them empty.
        work: Cost of each batch, shape ``[n_batches]``.
        block: Strata among which samples may change places, a power of two.
        free: Which blocks may, shape ``[ceil(depth / block)]``; None for all.
    """

    batches: NDArray[np.uint32]
    n_batches: int
    work: NDArray[np.float64]
    block: int = 1
    free: NDArray[np.bool_] | None = None


def from_cuts(places: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Turn lists of places into the batch of each place."""
    batches = np.empty(len(places), np.uint32)
    batches[places] = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint32), np.diff(offsets))
    return batches


def even_blocks(values: NDArray[Any], block: int) -> NDArray[np.bool_]:
    """Return which blocks of neighbours hold one value only, shape ``[ceil(n / block)]``."""
    firsts = values[np.arange(len(values)) // block * block]
    even = np.ones(-(-len(values) // block), bool)
    even[np.flatnonzero(values != firsts) // block] = False
    return even


def bucketed(falling: NDArray[Any], limits: Limits) -> Template:
    """Plan for padded cost: neighbours in size share a batch.

    Samples change places where that costs nothing: where as many fit a batch whichever of them is its largest.
    """
    offsets = cut(falling, limits)
    batches = from_cuts(np.arange(len(falling)), offsets)
    alike = falling if limits.capacity is None else np.minimum(limits.capacity(falling), limits.most_items)
    work = np.diff(offsets).astype(np.float64) * limits.work(falling[offsets[:-1]])
    return Template(batches, len(offsets) - 1, work, BLOCK, even_blocks(alike, BLOCK))


def packed(falling: NDArray[np.int64], limits: Limits) -> Template:
    """Plan for bins filled to the brim; samples change places only where the sizes are equal."""
    places, offsets = split_long(*best_fit(falling, limits.budgets[0]), limits.most_items)
    work: NDArray[Any] = np.add.reduceat(limits.work(falling[places]), offsets[:-1])
    return Template(from_cuts(places, offsets), len(offsets) - 1, work, BLOCK, even_blocks(falling, BLOCK))


def stratified(units: NDArray[Any], limits: Limits, n_batches: int) -> Template:
    """Plan for equal sums, in at least ``n_batches`` batches (as far as there are samples)."""
    budget = limits.budgets[0]
    n_batches = min(n_batches, len(units))
    dealt, fits = deal(units[None, :], min(n_batches, MAX_BATCHES), budget, derive(0), 1)
    counts = np.bincount(dealt[0], minlength=n_batches)
    if n_batches <= MAX_BATCHES and fits[0] and counts.min() > 0 and counts.max() <= limits.most_items:
        batches, found = dealt[0].astype(np.uint32), n_batches
    else:
        places, offsets = split_long(*best_fit(units.astype(np.int64), budget), limits.most_items)
        if n_batches <= MAX_BATCHES:  # else nothing is dealt, and what fits is what there is
            places, offsets = split_to(places, offsets, n_batches)
        batches, found = from_cuts(places, offsets), len(offsets) - 1
    work: NDArray[Any] = np.bincount(batches, limits.work(units), minlength=found)
    return Template(batches, found, work)


def split_long(
    places: NDArray[np.int64], offsets: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split batches with more than ``most`` samples."""
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= most:
        return places, offsets
    starts = [np.arange(a, b, most) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return places, np.concatenate([*starts, offsets[-1:]])


def split_to(
    places: NDArray[np.int64], offsets: NDArray[np.int64], n_batches: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Halve the longest batches until there are ``n_batches`` (at most as many as samples)."""
    cuts = offsets.tolist()
    while len(cuts) - 1 < n_batches:
        lengths = np.diff(cuts)
        longest = int(lengths.argmax())
        if lengths[longest] < 2:
            break
        cuts.insert(longest + 1, cuts[longest] + int(lengths[longest]) // 2)
    return places, np.array(cuts, np.int64)
