"""Bin packing over arrays: next-fit, cutting sorted lists, greedy (LPT) balancing, repair by swaps. Pure."""

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import Limits
from headrace.size_aware_batching._options import Capacity
from headrace.size_aware_batching._random import derive, random_words, shuffle_blocks
from headrace.size_aware_batching._validation import UNLIMITED

NOTHING_FITS = (
    "cost must not fall when the largest size grows, got more than max_total_size for one sample of a size up to "
    "{size}, and less for one of the largest size"
)
NEAR = 64  # samples beyond a batch's first place that are looked at first


def next_fit(sizes: NDArray[Any], limits: Limits, last: bool = True) -> NDArray[np.int64]:
    """Return where batches of sizes ``[n]`` or ``[n, k]`` begin, front to back, and where the last one ends.

    ``last`` says whether the order ends here; if not, a batch that is still open at the end is left out.

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

    def allowed(begin: int, stop: int) -> NDArray[np.int64]:
        if sizes.ndim == 1:
            return np.minimum.accumulate(caps[begin:stop])
        return capacity(np.maximum.accumulate(sizes[begin:stop], axis=0))  # the largest of each column

    def end(begin: int) -> int:
        # The first sample bounds the count; a larger one further on lowers it. Mostly that is near: look there first.
        stop, near = min(length, begin + int(caps[begin])), NEAR
        while True:
            counts = allowed(begin, min(stop, begin + near))
            over = counts < np.arange(1, len(counts) + 1)
            if over.any():
                return begin + int(over.argmax())
            if begin + near >= stop:
                return stop
            near *= 4

    return end


def cut_descending(descending: NDArray[Any], limits: Limits) -> NDArray[np.int64]:
    """Cut sizes, largest first, into batches: the largest of each sets how many it holds; returned as by `next_fit`.

    >>> from headrace.size_aware_batching._budget import PaddedCapacity
    >>> cut_descending(np.array([50, 40, 20, 10, 10]), Limits(capacity=PaddedCapacity(100))).tolist()
    [0, 2, 5]
    """
    if limits.capacity is None:
        return next_fit(descending, limits)
    return cut_by_counts(largest_counts(descending, limits.capacity, limits), limits)


def largest_counts(sizes: NDArray[Any], capacity: Capacity, limits: Limits) -> NDArray[np.int64]:
    """Return how many samples fit where each is the largest."""
    counts = np.minimum(capacity(sizes), limits.most_items)
    if len(counts) and counts.min() < 1:
        raise ValueError(NOTHING_FITS.format(size=sizes[int(counts.argmin())]))
    return counts


def cut_by_counts(counts: NDArray[np.int64], limits: Limits) -> NDArray[np.int64]:
    """Cut a list into batches, each of as many samples as its first allows.

    >>> cut_by_counts(np.array([2, 2, 3, 3, 3]), Limits()).tolist()
    [0, 2, 5]
    """
    caps = counts.tolist()
    cuts, begin, length = [0], 0, len(caps)
    while begin < length:
        begin = min(length, begin + limits.floor(caps[begin]))
        cuts.append(begin)
    return np.array(cuts, np.int64)


ROUNDS = 2048  # of greedy balancing, about: with more samples than that, the bulk goes by the handful
LEVEL = 2.0**40  # the sum of a column of levels
TURNS = 60  # of repairing at most
PATIENCE = 6  # turns without progress before it is given up
PARTNERS, SWAPPED = 16, 2**11  # batches that a batch over a budget may choose from, and all of them together
MEMBERS, FEW = 64, 16  # samples of a batch that are looked at in a turn; in the first turns fewer will do
QUICK = 4  # first turns
MIXED = 12  # rounds of random swaps
CANDIDATES = 2**18  # swaps that are looked at together


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
    begins = handfuls(level, at_once, block)
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


def handfuls(level: NDArray[np.int64], at_once: int, block: int) -> NDArray[np.int64]:
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


def repair(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], batches: NDArray[np.int64], n_batches: int, key: int
) -> bool:
    """Swap samples between batches in place until none is over the budgets; return whether that was reached.

    In a turn each batch that is over gives a sample to a batch that has room, for a smaller one or for none: the swap,
    of all with some partners, that leaves least over. The swaps are those of Alvim, Ribeiro, Glover and Aloise, "A
    hybrid improvement heuristic for the one-dimensional bin packing problem" (2004); here all batches that are over
    swap at once.
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
        stale, least = (0, total) if 20 * total < 19 * least else (stale + 1, least)
        if stale > PATIENCE:
            return False
        pairs = partners(load - budgets, over, stale)
        if not len(pairs[0]):
            return False
        if table is None or stale:
            table = members(batches, n_batches, stale)
        drawn = np.argsort(random_words(int(derive(key, turn)[0]), table.shape[1]))[: None if turn >= QUICK else FEW]
        left, row, slots = best_swaps(with_nothing, load - budgets, unit, table[:, drawn], pairs)
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
        each = min(max(len(room) // len(givers), 1), max(1, min(PARTNERS, SWAPPED // len(givers))))
        room = np.roll(room, -(shift * len(own) % max(1, len(room) // 2)))
        own = own[: len(room)]
        takers = room[: len(own) * each]
        pairs.append((np.tile(own, each), takers))
        free[takers] = False
    if not pairs:
        return givers[:0], givers[:0]
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def members(batches: NDArray[np.int64], n_batches: int, shift: int) -> NDArray[np.int64]:
    """Return samples of each batch, shape ``[m, width]``, some of them where it has very many; n stands for none."""
    length = len(batches)
    samples = np.append(by_batch(batches, n_batches), length)
    counts = np.bincount(batches, minlength=n_batches)
    begins = np.cumsum(counts) - counts
    width = min(MEMBERS, int(counts.max()))
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
    sizes: NDArray[np.int64],
    excess: NDArray[np.int64],
    unit: NDArray[np.int64],
    table: NDArray[np.int64],
    pairs: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], ...], tuple[NDArray[np.int64], ...]]:
    """Return what the best swap of each pair of batches leaves over, the samples that are swapped, and their slots."""
    none = len(sizes) - 1
    share, over = (sizes / unit).astype(np.float32), (excess / unit).astype(np.float32)
    slots = []
    together = max(1, CANDIDATES // table.shape[1] ** 2)
    for start in range(0, len(pairs[0]), together):
        giver, taker = pairs[0][start : start + together], pairs[1][start : start + together]
        given, taken = table[giver], table[taker]
        left = np.zeros((len(giver), table.shape[1], table.shape[1]), np.float32)
        for column in range(sizes.shape[1]):
            there = share[taken, column][:, None, :] - share[given, column][:, :, None]
            here = there + over[giver, column][:, None, None]
            np.subtract(over[taker, column][:, None, None], there, out=there)
            np.maximum(here, 0, out=here)
            np.maximum(there, 0, out=there)
            left += here
            left += there
        left[given == none] = np.inf  # nothing for something only loads the batch that is over
        slots.append(left.reshape(len(giver), -1).argmin(axis=1))
    best = np.concatenate(slots)
    slot = best // table.shape[1], best % table.shape[1]
    gives, takes = table[pairs[0], slot[0]], table[pairs[1], slot[1]]
    change = sizes[takes] - sizes[gives]  # exactly, what was compared in short numbers
    total = parts_over(excess[pairs[0]] + change, unit) + parts_over(excess[pairs[1]] - change, unit)
    total[gives == none] = UNLIMITED
    return total, (gives, takes), slot


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
        words = random_words(int(derive(key, turn, 1)[0]), n_batches + table.shape[1] + FEW**2)
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
