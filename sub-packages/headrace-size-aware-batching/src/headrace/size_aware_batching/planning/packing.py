"""Bin packing over arrays: a lower bound and greedy (LPT) balancing, then repair by swaps. Pure."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.repair import even_out, repair
from headrace.size_aware_batching.planning.shuffles import shuffle_blocks

ROUNDS = 2048  # of greedy balancing, about: larger inputs place most samples several at a time
LEVEL = 2.0**40  # the sum of a column of levels


def lower_bound(sizes: NDArray[np.int64], budgets: NDArray[np.int64]) -> int:
    """Return a number of bins that no packing goes below: the best of some dual feasible functions.

    The functions u(t) of Fekete and Schepers, "New classes of fast lower bounds for bin packing problems" (2001): exact
    where all sizes are equal; t = 1 counts the samples above half of the budget.

    >>> lower_bound(np.full((10, 1), 34), np.array([100]))
    5
    """
    best = 1
    for column, limit in zip(sizes.T, budgets.tolist(), strict=True):
        values, counts = np.unique(column, return_counts=True)
        shares = values / max(limit, 1)
        best = max(best, math.ceil(float((shares * counts).sum()) - 1e-6))
        for t in range(1, 25):
            whole, rest = np.divmod(values * (t + 1), max(limit, 1))
            bound = np.where(rest == 0, shares, whole / t)
            best = max(best, math.ceil(float((bound * counts).sum()) - 1e-6))
    return best


def martello_toth(sizes: NDArray[np.int64], budget: int) -> int:
    """Return a lower bound of the bins for one column in any order, by volume, by counts, and L2, exactly.

    L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem" (1990): samples over
    half of the budget have bins of their own, and what these have no room for needs further bins; the best over all
    choices of which small samples are left out. By counts: of samples as large as the i-th, so many fit.

    >>> martello_toth(np.array([34] * 10), 100), martello_toth(np.array([60, 60, 45, 45, 45, 45]), 100)
    (5, 4)
    """
    ascending = np.sort(sizes[sizes > 0])
    size, length = ascending[::-1], len(ascending)
    if not length:
        return 1
    total = np.append(0, np.cumsum(size))
    best = max(-(-int(total[-1]) // budget), int((-(-np.arange(1, length + 1) // (budget // size))).max()))
    half = length - int(np.searchsorted(ascending, budget // 2, "right"))  # samples of which no two share
    least = np.append(1, size[half:])  # smaller ones are left out
    large = length - np.searchsorted(ascending, budget - least, "right")  # beside which nothing fits
    last = length - np.searchsorted(ascending, least, "left")
    over = (total[last] - total[half]) - ((half - large) * budget - (total[half] - total[large]))
    return max(best, int((half + np.maximum(0, -(-over // budget))).max()))


def first_fit(sizes: NDArray[np.int64], budgets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put samples ``[n, k]``, one by one, into the first bin with room; return the bin of each.

    >>> first_fit(np.array([[6], [5], [5], [4]]), np.array([10])).tolist()
    [0, 1, 1, 0]
    """
    room = np.empty((len(sizes), sizes.shape[1]), np.int64)
    bins = np.empty(len(sizes), np.int64)
    opened = 0
    for sample, size in enumerate(sizes):
        fits = (room[:opened] >= size).all(axis=1)
        place = int(fits.argmax()) if opened else 0
        if not opened or not fits[place]:
            place, opened = opened, opened + 1
            room[place] = budgets
        room[place] -= size
        bins[sample] = place
    return bins


def levels(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Scale columns to equal totals: what to balance by, where one budget is tighter than another."""
    totals = np.maximum(sizes.sum(axis=0), 1).astype(np.float64)
    scaled: NDArray[np.int64] = np.floor(sizes * (LEVEL / totals)).astype(np.int64)
    return scaled + 1  # samples that take nothing are spread evenly, too


def greedy_balance(sizes: NDArray[np.int64], n_batches: int, key: int, block: int) -> NDArray[np.int64]:
    """Put samples ``[n, k]``, largest first, into batches, always into the lightest; return the batch of each.

    Greedy (LPT) balancing after Graham, "Bounds on multiprocessing timing anomalies" (1969), with blocks of samples of
    like size shuffled. A round gives one sample to each of the lightest quarter of the batches. With several columns
    these are the batches whose fullest column is lowest, and in a round the sample that is heaviest in one column goes
    to the batch that is lightest in it. Batches may be over the budgets, see `repair`.
    """
    length, columns = sizes.shape
    shuffled = shuffle_blocks(key, length, block)
    level = levels(sizes)[shuffled]
    at_once = max(1, n_batches // 4)
    begins = item_starts(level, at_once, block)
    item = np.add.reduceat(level, begins) if len(begins) < length else level
    bits = max(1, (n_batches - 1).bit_length())
    numbers, mask = np.arange(n_batches), (1 << bits) - 1
    load = np.zeros((n_batches, columns), np.int64)
    batch_of_item = np.empty(len(item), np.int64)
    for start in range(0, len(item), at_once):
        part = item[start : start + at_once]
        fullest = load[:, 0] if columns == 1 else load.max(axis=1)
        marks = (fullest << bits) | numbers
        if len(part) < n_batches:
            marks = np.partition(marks, len(part) - 1)[: len(part)]
        lightest = np.sort(marks) & mask
        order = slice(None)
        if columns > 1:
            order, matched = opposed(part, load[lightest])
            lightest = lightest[matched]
        batch_of_item[start : start + at_once][order] = lightest
        load[lightest] += part[order]
    batches = np.empty(length, np.int64)
    batches[shuffled] = np.repeat(batch_of_item, np.diff(np.append(begins, length)))
    return batches


def opposed(part: NDArray[np.int64], load: NDArray[np.int64]) -> tuple[Any, NDArray[np.int64]]:
    """Order samples by how much they lean to one column, and batches by how much they lean away from it."""
    columns = part.shape[1]
    leaning = columns * part - part.sum(axis=1)[:, None]
    column = int((leaning.max(axis=0) - leaning.min(axis=0)).argmax())
    loaded = columns * load[:, column] - load.sum(axis=1)
    return np.argsort(leaning[:, column], kind="stable"), np.argsort(-loaded, kind="stable")


def item_starts(level: NDArray[np.int64], at_once: int, block: int) -> NDArray[np.int64]:
    """Return where each item begins that goes to one batch: a sample, or a handful where there are very many."""
    length = len(level)
    handful = length // (at_once * ROUNDS)
    if handful < 2:
        return np.arange(length)
    # Large samples come first, one by one, and so do the smallest, which even out what the handfuls leave.
    large = int((level > level.sum(axis=0) // (4 * at_once * handful)).any(axis=1).sum())
    first = min(length, -(-large // block) * block)
    last = max(first, length - at_once * ROUNDS // 4)
    return np.concatenate([np.arange(first), np.arange(first, last, handful), np.arange(last, length)])


def pack(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], n_batches: int, key: int, block: int
) -> NDArray[np.int64] | None:
    """Pack samples ``[n, k]``, largest first, into so many batches at random; return the batch of each, or None.

    Greedy balancing, then repair. A larger ``block`` of samples of like size that are shuffled is more random, a
    smaller one fits more easily. None where they do not fit, or not with a sample in each batch.

    >>> pack(np.array([[6], [5], [5], [4]]), np.array([10]), 2, key=0, block=1).tolist() in ([0, 1, 1, 0], [1, 0, 0, 1])
    True
    """
    batches = greedy_balance(sizes, n_batches, key, block)
    fits = repair(sizes, budgets, batches, n_batches, key)
    return batches if fits and np.bincount(batches, minlength=n_batches).min() > 0 else None


def pack_evenly(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], n_batches: int, key: int, block: int
) -> NDArray[np.int64] | None:
    """Pack as `pack` does, where few large samples fill a batch, by the first column; others count samples."""
    batches = greedy_balance(sizes[:, :1], n_batches, key, block)
    fits = even_out(sizes[:, 0], int(budgets[0]), batches, n_batches, key)
    counts = np.bincount(batches, minlength=n_batches)
    return batches if fits and counts.min() > 0 and counts.max() <= budgets[1:].min(initial=len(sizes)) else None
