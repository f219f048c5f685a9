"""Bin packing over arrays: next-fit, best-fit decreasing, and greedy (LPT) balancing. Pure."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import Capacity, Limits
from headrace.size_aware_batching._random import Words, shuffle_blocks

NOTHING_FITS = (
    "cost: f(1, {size}) exceeds max_total_size, but f(1, n) of the largest size does not; f(n, largest) must not fall "
    "when the largest size grows"
)
NEAR = 64  # samples beyond a batch's first place that are looked at first


def next_fit(sizes: NDArray[Any], limits: Limits, last: bool = True) -> NDArray[np.int64]:
    """Cut a list of sizes into batches, front to back.

    Args:
        sizes: Sizes in order, shape ``[n]`` or, for several budgets, ``[n, k]``; each fits a batch of its own.
        limits: The budgets.
        last: Whether the order ends here. If not, a batch that is still open at the end is left out.

    Returns:
        Where each batch begins and, last, where the last one ends; shape ``[batches + 1]``, beginning with 0.

    >>> next_fit(np.array([2, 2, 3, 4, 1]), Limits(budgets=(5,))).tolist()
    [0, 2, 3, 5]
    """
    if not len(sizes):
        return np.zeros(1, np.int64)
    if limits.capacity is None and limits.plain and sizes.ndim == 1:
        return one_sum(sizes, limits.budgets[0], last)
    end_of = counted_end(sizes, limits.capacity) if limits.capacity else summed_end(sizes, limits.budgets)
    cuts, begin, length = [0], 0, len(sizes)
    while begin < length:
        end = min(end_of(begin), begin + limits.most_items)
        if end >= length:
            if not last:
                break
            end = length
        else:
            end = begin + limits.floor(end - begin)
        if end <= begin:
            raise ValueError(NOTHING_FITS.format(size=sizes[begin]))
        cuts.append(end)
        begin = end
    return np.array(cuts, np.int64)


def one_sum(sizes: NDArray[Any], budget: int, last: bool) -> NDArray[np.int64]:
    """Do the same for one sum alone, with nothing in the loop but one search for each batch."""
    total = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    running: memoryview[int] = total.data
    length = len(sizes)
    cuts, begin, reach = [0], 0, NEAR
    while begin < length:
        target = running[begin] + budget
        stop = begin + reach
        while stop < length and running[stop] <= target:
            stop += reach
        end = bisect_right(running, target, begin + 1, stop if stop < length else length + 1) - 1
        if end == length and not last:
            break
        cuts.append(end)
        reach = 2 * (end - begin)
        begin = end
    return np.array(cuts, np.int64)


def summed_end(sizes: NDArray[Any], budgets: tuple[int, ...]) -> Callable[[int], int]:
    """Return a function from a batch's first place to one past the last that fits all sums."""
    columns = sizes[:, None].T if sizes.ndim == 1 else sizes.T
    sums: list[memoryview[int]] = [np.cumsum(column, dtype=np.int64).data for column in columns]
    length = len(sizes)

    def end(begin: int) -> int:
        nearest = length
        for running, budget in zip(sums, budgets, strict=True):
            target = (running[begin - 1] if begin else 0) + budget
            near = begin + NEAR
            while near < nearest and running[near] <= target:
                near = begin + 2 * (near - begin)
            nearest = bisect_right(running, target, begin, min(near, nearest))
        return nearest

    return end


def counted_end(sizes: NDArray[Any], capacity: Capacity) -> Callable[[int], int]:
    """Return a function from a batch's first place to one past the last that fits the count of its largest."""
    caps = capacity(sizes)
    length = len(sizes)

    def end(begin: int) -> int:
        # The first sample bounds the count; a larger one further on lowers it. Mostly that is near: look there first.
        stop, near = min(length, begin + int(caps[begin])), NEAR
        while True:
            allowed = np.minimum.accumulate(caps[begin : min(stop, begin + near)])
            over = allowed < np.arange(1, len(allowed) + 1)
            if over.any():
                return begin + int(over.argmax())
            if begin + near >= stop:
                return stop
            near *= 4

    return end


def cut_descending(falling: NDArray[Any], limits: Limits) -> NDArray[np.int64]:
    """Cut sizes that fall into batches; the first of a batch is its largest and sets how many it holds.

    Args:
        falling: Sizes, largest first, shape ``[n]``; each fits a batch of its own.
        limits: The budgets.

    Returns:
        Where each batch begins and, last, where the last one ends; shape ``[batches + 1]``.

    >>> from headrace.size_aware_batching._budget import PaddedCapacity
    >>> cut_descending(np.array([50, 40, 20, 10, 10]), Limits(capacity=PaddedCapacity(100))).tolist()
    [0, 2, 5]
    """
    if limits.capacity is None:
        return next_fit(falling, limits)
    caps = np.minimum(limits.capacity(falling), limits.most_items).tolist()
    cuts, begin, length = [0], 0, len(caps)
    while begin < length:
        if caps[begin] < 1:
            raise ValueError(NOTHING_FITS.format(size=falling[begin]))
        begin = min(length, begin + limits.floor(caps[begin]))
        cuts.append(begin)
    return np.array(cuts, np.int64)


Contents = list[tuple[int, int]]  # (size, how many of it), in the order they were laid


def best_fit_decreasing(falling: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack sizes into bins, each into the fullest bin that still takes it.

    Works on whole groups: bins that hold the same sizes are one entry, and all samples of one size are laid at
    once, so that the effort depends on the number of distinct sizes, not of samples (after Krell et al.,
    "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027).

    Args:
        falling: Sizes, largest first, shape ``[n]``; none above the budget.
        budget: Largest sum of a bin.

    Returns:
        The places in ``falling`` bin by bin, shape ``[n]``, and where each bin begins, shape ``[bins + 1]``.

    >>> places, offsets = best_fit_decreasing(np.array([6, 5, 5, 4]), 10)
    >>> [places[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])]
    [[1, 2], [0, 3]]
    """
    if not len(falling):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    edges = np.flatnonzero(np.diff(falling)) + 1
    firsts = np.concatenate([[0], edges])
    sizes = falling[firsts].tolist()
    counts = np.diff(np.concatenate([firsts, [len(falling)]])).tolist()
    return bins_to_arrays(pack_histogram(sizes, counts, budget), dict(zip(sizes, firsts.tolist(), strict=True)))


def pack_histogram(sizes: list[int], counts: list[int], budget: int) -> list[tuple[int, Contents]]:
    """Pack ``counts[i]`` samples of ``sizes[i]``, falling; return (how many bins, what each of them holds)."""
    room: list[int] = []  # the residuals that some bins have, rising
    groups: dict[int, list[tuple[int, Contents]]] = {}

    def put(residual: int, bins: int, steps: Contents) -> None:
        if residual not in groups:
            insort(room, residual)
            groups[residual] = []
        groups[residual].append((bins, steps))

    for size, count in zip(sizes, counts, strict=True):
        while count:
            steps: Contents = []
            at = bisect_left(room, size)
            if at == len(room):
                residual, bins = budget, count
            else:
                residual = room[at]
                bins, steps = groups[residual].pop()
                if not groups[residual]:
                    del groups[residual]
                    del room[at]
            each = residual // size if size else count
            full = min(bins, count // each)
            if full:
                put(residual - each * size, full, [*steps, (size, each)])
            rest = count - full * each if full < bins else 0
            if rest:
                put(residual - rest * size, 1, [*steps, (size, rest)])
            unused = bins - full - (1 if rest else 0)
            if unused and steps:  # bins that nothing was laid into yet do not exist
                put(residual, unused, steps)
            count -= full * each + rest
    return [group for residual in sorted(groups) for group in groups[residual]]


def bins_to_arrays(
    groups: list[tuple[int, Contents]], firsts: dict[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give every bin its samples: those of one size are handed out in their order."""
    taken = dict(firsts)
    parts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for bins, steps in groups:
        columns = []
        for size, each in steps:
            begin = taken[size]
            columns.append(np.arange(begin, begin + bins * each).reshape(bins, each))
            taken[size] += bins * each
        table = np.concatenate(columns, axis=1)
        parts.append(table.ravel())
        lengths.append(np.full(bins, table.shape[1]))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return np.concatenate(parts), offsets.astype(np.int64)


GRID = 2**19  # a budget, in the units that dealing counts in: sums and batch numbers share 31 bits
MAX_BATCHES = 1024
ROUNDS = 2048  # of dealing sample by sample; about a hundred are usual


def greedy_balance(
    units: NDArray[Any], n_batches: int, capacity: int, keys: Words, block: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Deal the samples of several windows to batches, largest first, always to the lightest.

    A round gives as many samples as a quarter of the batches, one to each of the lightest. All windows advance in
    lock-step: a round is one sort of the running sums, whose low bits hold the batch's number.

    Args:
        units: Sizes, shape ``[c, n]``, every row falling; at most ``capacity``.
        n_batches: Batches of each window, at most 1,024.
        capacity: Budget of a batch, at most 2**19; at most 2**40 with units of 64 bits.
        keys: One key a window, shape ``[c]``.
        block: Samples among which the order is shuffled before dealing, a power of two; 1 for none.

    Returns:
        The batch of each sample, shape ``[c, n]``, and whether all batches of a window are inside the budget,
        shape ``[c]``.
    """
    n_windows, length = units.shape
    places = shuffle_blocks(keys, length, block)
    shuffled = np.take_along_axis(units, places, axis=1)
    kind = units.dtype.type  # 32 bits where they suffice: sorting them is several times faster
    bits = kind(max(1, (n_batches - 1).bit_length()))
    shuffled <<= bits
    running = np.tile(np.arange(n_batches, dtype=kind), (n_windows, 1))
    dealt = np.empty((n_windows, length), np.uint16)
    at_once = max(1, n_batches // 4)
    mask = kind((1 << int(bits)) - 1)
    # Where a few batches hold very many samples, these go by the handful until the last rounds.
    handful = max(1, length // (at_once * ROUNDS))
    # Large samples come first, and one by one.
    large = int((units > capacity // handful).any(axis=0).sum())
    first = -(-large // block) * block if handful > 1 else 0
    bulk = first + max(0, length - at_once * ROUNDS // 4 - first) // (handful * at_once) * handful * at_once
    bulk = bulk if handful > 1 else 0
    for start in range(0, first, at_once):
        running.sort(axis=1)
        stop = min(start + at_once, first, length)
        lightest = running[:, : stop - start]
        dealt[:, start:stop] = lightest & mask
        lightest += shuffled[:, start:stop]
    for start in range(first, bulk, at_once * handful):
        running.sort(axis=1)
        lightest = running[:, :at_once]
        dealt[:, start : start + at_once * handful] = np.repeat(lightest & mask, handful, axis=1)
        lightest += shuffled[:, start : start + at_once * handful].reshape(n_windows, at_once, handful).sum(axis=2)
    for start in range(max(first, bulk), length, at_once):
        running.sort(axis=1)
        stop = min(start + at_once, length)
        lightest = running[:, : stop - start]
        dealt[:, start:stop] = lightest & mask
        lightest += shuffled[:, start:stop]
    fits: NDArray[np.bool_] = np.asarray(((running >> bits) <= capacity).all(axis=1))
    batches = np.empty_like(dealt)
    np.put_along_axis(batches, places.astype(np.int64), dealt, axis=1)
    return batches, fits


def split_long(
    places: NDArray[np.int64], offsets: NDArray[np.int64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split batches with more than ``most`` samples."""
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= most:
        return places, offsets
    starts = [np.arange(a, b, most) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    return places, np.concatenate([*starts, offsets[-1:]])


def split_until(
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
