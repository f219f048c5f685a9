"""The batches at the end of an epoch that the world size does not divide: split, repeated or dropped."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from heapq import heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.limits import CountLimits
from headrace.size_aware_batching.planning.options import Tail
from headrace.size_aware_batching.planning.prepared import PreparedSizes

Batches = tuple[NDArray[Any], NDArray[np.int64]]  # samples batch by batch, and where each batch begins
Balance = Callable[[NDArray[Any], int], Batches | None]  # samples of a step and how many batches they make


def last_steps(
    indices: NDArray[Any], offsets: NDArray[np.int64], num_replicas: int, tail: Tail, balance: Balance | None
) -> tuple[NDArray[Any], NDArray[np.int64], int, NDArray[np.int64]]:
    """Return the rest of the list as whole steps.

    Samples, offsets, how many batches at its end are repeated, and where each sample was in the list.
    """
    planned, places = offsets, np.arange(len(indices))
    if tail == "split":
        offsets = split_steps(offsets.tolist(), num_replicas)
    count = len(offsets) - 1
    whole = count // num_replicas * num_replicas
    if balance and whole:
        indices, offsets = indices.copy(), offsets.copy()
        # Not where a step begins: a resume begins there, and has to balance the same.
        split = np.isin(offsets[1 : whole + 1], planned, invert=True).reshape(-1, num_replicas).any(axis=1)
        for first in (np.flatnonzero(split) * num_replicas).tolist():
            part = offsets[first : first + num_replicas + 1]
            span = slice(int(part[0]), int(part[-1]))
            balanced = balance(indices[span], num_replicas)
            if balanced:
                places[span] = part[0] + places_in(indices[span], balanced[0])
                indices[span] = balanced[0]
                part[:] = part[0] + balanced[1]
    if tail == "drop":
        kept = int(offsets[whole])
        return indices[:kept], offsets[: whole + 1], 0, places[:kept]
    missing = -count % num_replicas
    # What is missing is taken once more from the last step's own batches.
    again = [whole + place % (count - whole) for place in range(missing)]
    spans = [np.arange(offsets[batch], offsets[batch + 1]) for batch in again]
    order = np.concatenate([np.arange(len(indices)), *spans])
    ends = offsets[-1] + np.cumsum(np.array([len(span) for span in spans], np.int64))
    return indices[order], np.concatenate([offsets, ends]), missing, places[order]


def places_in(samples: NDArray[Any], moved: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each of the samples was before they were moved; equal ones are taken to keep their order.

    >>> places_in(np.array([7, 5, 7]), np.array([5, 7, 7])).tolist()
    [1, 0, 2]
    """
    places = np.empty(len(samples), np.int64)
    places[np.argsort(moved, kind="stable")] = np.argsort(samples, kind="stable")
    return places


def split_steps(offsets: list[int], num_replicas: int) -> NDArray[np.int64]:
    """Split batches so that they make whole steps, as far as there are samples; return where each begins."""
    pieces, end, count = [0], offsets[-1], len(offsets) - 1
    start, following = 0, 1  # where the rest begins, and the number of the first offset after that
    while following <= count:
        steps_left = -(-(count - following + 1) // num_replicas)
        stop = offsets[min(following + num_replicas - 1, count)]
        if end - start >= steps_left * num_replicas:
            # Leave one sample a rank for each of the steps that follow.
            stop = min(stop, end - (steps_left - 1) * num_replicas)
        behind = bisect_left(offsets, stop, following)
        pieces += split_longest([start, *offsets[following:behind], stop], num_replicas)[1:]
        start, following = stop, bisect_right(offsets, stop, behind)
    return np.array(pieces, np.int64)


def split_longest(offsets: list[int], n_batches: int) -> list[int]:
    """Halve the longest batches until there are ``n_batches``, as far as there are samples.

    >>> split_longest([0, 4, 5], 4)
    [0, 1, 2, 4, 5]
    """
    pieces = list(offsets)
    while len(pieces) - 1 < n_batches:
        lengths = [b - a for a, b in pairwise(pieces)]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] < 2:
            break
        pieces.insert(longest + 1, pieces[longest] + (lengths[longest] + 1) // 2)
    return pieces


def balance_evenly(sized: PreparedSizes, samples: NDArray[Any], n_batches: int) -> Batches | None:
    """Make batches of like work from samples that fit into fewer; None where the limits do not let them.

    Sums go to the batch with the least work so far, the largest first (LPT, Graham 1969); batches that are padded are
    neighbours in size, and None where those have several columns or work of their own. None, too, for samples of
    several labels.

    >>> from headrace.size_aware_batching.planning.costs import SumCost
    >>> from headrace.size_aware_batching.planning.limits import SumLimits
    >>> sized = PreparedSizes(np.array([5, 1, 4, 2]), SumLimits((8,)), SumCost(), None, np.zeros(0, np.int64))
    >>> samples, offsets = balance_evenly(sized, np.array([0, 1, 2, 3]), 2)
    >>> samples.tolist(), offsets.tolist()
    ([0, 1, 2, 3], [0, 2, 4])
    """
    limits, sizes = sized.limits, sized.sizes[samples]
    if limits.multiple > 1 or (sized.labels is not None and np.ptp(sized.labels[samples])):
        return None
    if isinstance(limits, CountLimits):
        if sizes.ndim > 1 or sized.work is not None:
            return None
        work = sized.cost.sample_work(sizes, limits)
        order = np.argsort(sizes, kind="stable")[::-1]
        return samples[order], even_offsets(work[order], limits.counts(sizes[order]), n_batches)
    work = sized.cost.sample_work(sizes, limits) if sized.work is None else sized.work[samples]
    descending = np.argsort(-work, kind="stable")
    owner = np.empty(len(samples), np.int64)
    owner[descending] = lightest_first(work[descending].tolist(), n_batches)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=n_batches)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    sums = np.add.reduceat(sizes[order], offsets[:-1], axis=0, dtype=np.int64)
    if counts.max() > limits.most_items or (sums > np.array(limits.budgets)).any():
        return None
    return samples[order], offsets


def lightest_first(descending: list[float], n_batches: int) -> NDArray[np.int64]:
    """Give each sample to the batch that has the least work so far; return the batch of each.

    >>> lightest_first([5, 4, 2, 1], 2).tolist()
    [0, 1, 1, 0]
    """
    heap: list[tuple[float, int, int]] = [(0, 0, batch) for batch in range(n_batches)]
    owner = np.zeros(len(descending), np.int64)
    for place, work in enumerate(descending):
        load, count, batch = heap[0]
        owner[place] = batch
        heapreplace(heap, (load + work, count + 1, batch))
    return owner


def even_offsets(descending: NDArray[np.float64], most: NDArray[np.int64], n_batches: int) -> NDArray[np.int64]:
    """Cut padded samples into batches whose largest work is least; return where each begins.

    Args:
        descending: Work of each sample, that of a batch being the count times its first.
        most: How many samples a batch may hold that begins with this one.
        n_batches: How many there will be, as far as there are samples.

    >>> even_offsets(np.array([4.0, 2.0, 2.0, 1.0]), np.array([9, 9, 9, 9]), 2).tolist()
    [0, 1, 4]
    """

    def offsets_below(largest: float) -> list[int]:
        found = [0]
        while found[-1] < len(descending):
            work, left = float(descending[found[-1]]), len(descending) - found[-1]
            fit = left if work * left <= largest else int(largest / work)  # a quotient by almost nothing is infinite
            found.append(found[-1] + min(left, max(1, min(int(most[found[-1]]), fit))))
        return found

    low, high = 0.0, float(descending[0]) * len(descending)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(offsets_below(middle)) <= n_batches + 1 else (middle, high)
    return np.array(split_longest(offsets_below(high), n_batches), np.int64)
