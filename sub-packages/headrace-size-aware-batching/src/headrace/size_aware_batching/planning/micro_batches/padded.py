"""One optimizer step of samples that are padded in their micro-batch, or cost what a function says. Pure.

What a micro-batch costs follows from its count and its largest size, so neighbours in size go together: the samples,
largest first, are cut into K times R ranges. Cutting each as late as it may gives the fewest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.costs import Cost, Work, given_work
from headrace.size_aware_batching.planning.last_step import even_offsets, split_longest
from headrace.size_aware_batching.planning.limits import CountLimits
from headrace.size_aware_batching.planning.micro_batches.balancing import assign_ranks, objective
from headrace.size_aware_batching.planning.micro_batches.bounds import rank_bound
from headrace.size_aware_batching.planning.micro_batches.samples import (
    Assignment,
    Ints,
    Meet,
    NoPlanError,
    Samples,
    whole_work,
)

BOUNDARIES = 256  # places, at most, where a micro-step may begin


@dataclass(frozen=True)
class PaddedSamples:
    """The samples of a step, the largest first.

    ``sizes`` ``[n]`` or ``[n, k]``; ``own_work`` ``[n]`` of a sample by itself, ``work`` of lists of places;
    ``additive`` where that is the sum of ``own_work``.
    """

    sizes: NDArray[np.float64] | Ints
    limits: CountLimits
    own_work: NDArray[np.float64]
    work: Work
    additive: bool

    def __len__(self) -> int:
        return len(self.own_work)

    @property
    def cuts(self) -> Ints:
        """Where batches begin that are cut as late as they may be."""
        return (self.limits.cut if self.sizes.ndim == 1 else self.limits.next_fit)(self.sizes)


def largest_first(
    sizes: NDArray[Any], limits: CountLimits, own_work: NDArray[np.float64], cost: Cost | None
) -> tuple[Ints, PaddedSamples]:
    """Return samples sorted by size, and their order; without a cost their own work adds up."""
    largest = sizes if sizes.ndim == 1 else (sizes / np.maximum(sizes.max(axis=0), 1)).max(axis=1)
    order = np.lexsort((-own_work, -largest.astype(np.float64)))
    sizes, own = sizes[order], own_work[order]
    work = given_work(own) if cost is None else cost.work(sizes, limits)
    return order, PaddedSamples(sizes, limits, own, work, cost is None)


def plan_padded(samples: PaddedSamples, n_ranks: int, multiple: int, meet: Meet) -> Assignment:
    """Plan one step of samples, the largest first, that are padded to the longest of their micro-batch.

    Raises:
        NoPlanError: If there are fewer samples than micro-batches.
    """
    limits, length = samples.limits, len(samples)
    most = limits.counts(samples.sizes)
    fewest = len(limits.cut_by_counts(np.sort(most))) - 1
    cuts = samples.cuts
    at_once = n_ranks * multiple
    few, count = (-(-number // at_once) * multiple for number in (fewest, len(cuts) - 1))
    n_batches = count * n_ranks
    if n_batches > length:
        raise NoPlanError(count)
    found = [offsets_to_batches(split_heaviest(samples, cuts, n_batches))]
    if samples.sizes.ndim == 1 and not samples.additive:
        found.append(offsets_to_batches(even_offsets(samples.own_work, most, n_batches)))
        if (rows := even_rows(whole_work(samples.own_work), most, count, n_ranks)) is not None:
            found.append(rows)
    works = whole_work(np.concatenate([batch_works(samples, batches, n_batches) for batches in found]))
    seats = [assign_ranks(work, n_ranks) for work in works.reshape(-1, n_batches)]
    values = [
        objective(work, places, n_ranks, meet) for work, places in zip(works.reshape(-1, n_batches), seats, strict=True)
    ]
    best = values.index(min(values))
    rank, micro_batch = seats[best]
    own = Samples(np.zeros((length, 1), np.int64), np.ones(1, np.int64), whole_work(samples.own_work))
    return Assignment(rank[found[best]], micro_batch[found[best]], count, few, rank_bound(own, count, n_ranks))


def offsets_to_batches(offsets: Ints) -> Ints:
    """Return the number of the range of each sample."""
    numbers: Ints = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return numbers


def batch_works(samples: PaddedSamples, batches: Ints, n_batches: int) -> NDArray[np.float64]:
    """Return the work of each micro-batch."""
    order = np.argsort(batches, kind="stable")
    offsets = np.append(0, np.cumsum(np.bincount(batches, minlength=n_batches)))
    works: NDArray[np.float64] = samples.work(order[None], offsets)[0].astype(np.float64)
    return works


def split_heaviest(samples: PaddedSamples, cuts: Ints, n_batches: int) -> Ints:
    """Halve the ranges with most work until there are so many, as far as they hold two samples."""
    offsets = cuts
    while len(offsets) - 1 < n_batches:
        works = batch_works(samples, offsets_to_batches(offsets), len(offsets) - 1)
        counts = np.diff(offsets)
        order = np.argsort(-works, kind="stable")
        order = order[counts[order] > 1]
        # Half of the ranges at once, at most: a few turns are enough.
        order = order[: min(n_batches - len(offsets) + 1, max(1, len(counts) // 2))]
        if not len(order):
            return np.array(split_longest(offsets.tolist(), n_batches), np.int64)
        offsets = np.sort(np.append(offsets, offsets[order] + (counts[order] + 1) // 2))
    return offsets


def even_rows(own_work: Ints, most: Ints, n_rows: int, n_ranks: int) -> Ints | None:
    """Cut the samples into micro-steps in which each rank has the same count, or None where they do not fit.

    Of R neighbours in size each rank gets one: so the micro-batches of a step are alike. The sum over the steps of
    count times the largest sample's work is the least that such cuts can have, by dynamic programming.
    """
    length = len(own_work)
    units = length // n_ranks  # the last unit also has the remainder
    if units < n_rows:
        return None
    begins = np.arange(units)
    if units > BOUNDARIES:
        begins = np.unique(np.append(0, np.linspace(0, units - 1, BOUNDARIES).astype(np.int64)))
    stops = np.append(begins, units)
    counts = stops[None, :] - begins[:, None]
    counts[:, -1] += length % n_ranks > 0
    allowed = (stops[None, :] > begins[:, None]) & (counts <= most[begins * n_ranks][:, None])
    cost = np.where(allowed, counts * own_work[begins * n_ranks][:, None].astype(np.float64), np.inf)
    total = np.append(0.0, np.full(len(begins), np.inf))
    back = []
    for _ in range(n_rows):
        through = total[:-1, None] + cost
        back.append(through.argmin(axis=0))
        total = through.min(axis=0)
    if not np.isfinite(total[-1]):
        return None
    stop, row_of_unit = len(begins), np.zeros(units, np.int64)
    for row in range(n_rows - 1, -1, -1):
        begin = int(back[row][stop])
        row_of_unit[stops[begin] : stops[stop]] = row
        stop = begin
    sample = np.arange(length)
    return row_of_unit[np.minimum(sample // n_ranks, units - 1)] * n_ranks + sample % n_ranks
