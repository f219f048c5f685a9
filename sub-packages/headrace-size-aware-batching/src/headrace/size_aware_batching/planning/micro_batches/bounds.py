"""What no plan of an optimizer step goes below, and the work that its micro-steps aim at. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.size_aware_batching.planning.micro_batches.samples import Ints, Meet, Samples
from headrace.size_aware_batching.planning.packing import martello_toth

ASKED = 2**20  # pairs of samples that a bound looks at, at most
FINENESS = 14  # targets are found to one part of the whole work in 2**14


def fewest(samples: Samples) -> int:
    """Return a number of micro-batches that no packing goes below: volume, counts and L2 of each column."""
    columns = zip(samples.sizes.T, samples.budgets.tolist(), strict=True)
    return max(martello_toth(column, budget) for column, budget in columns)


@dataclass(frozen=True)
class Column:
    """One column of sizes, the largest first and none of them 0, with the work of its samples."""

    size: Ints
    work: Ints
    budget: int

    @classmethod
    def from_sizes(cls, sizes: Ints, work: Ints, budget: int) -> Column:
        """Sort a column; where a size is 0, give each sample a share of a finer unit, which changes nothing."""
        budget = min(budget, max(1, int(sizes.sum())))
        if not len(sizes) or sizes.min() == 0:
            finer = len(sizes) + 1
            sizes, budget = sizes * finer + 1, budget * finer + len(sizes)
        order = np.lexsort((-work, -sizes))
        return cls(sizes[order], work[order], budget)


def row_targets(samples: Samples, n_rows: int, n_ranks: int) -> tuple[Ints, int]:
    """Return the highest work that each micro-step should have, descending, and the least sum that they can have.

    Number all micro-batches by work, v[0] >= v[1] >= ...; micro-steps of R neighbours are best, so that the objective
    is the sum of M[k] = v[kR].

    - From below: the i + 1 largest samples fill more than j = ceil((i + 1) / (budget // size[i])) - 1 micro-batches, so
      v[j] is at least the least work among them. None is empty, so v[j] is at least the (m - j)th smallest work.
    - From above: a micro-batch with a sample over half of the budget has room for the rest of the budget, at the
      highest density of work. Any other micro-batch holds at most one budget, at the highest density of the samples up
      to half of it. The first j micro-steps hold no more work than these bounds together. They also hold no more than
      the densest samples that fill as many budgets.
    - The whole work is at most the sum over k and i of min(M[k], up[kR + i]). The least sum of M that allows this
      raises first what counts for most micro-batches of its row: it is concave, so greedy is optimal.
    """
    n_batches, total = n_rows * n_ranks, int(samples.work.sum())
    low = np.zeros(n_batches, np.int64)
    ordered = np.sort(samples.work)
    if len(samples) >= n_batches:
        low = ordered[:n_batches][::-1].copy()
    up = np.full(n_batches, total, np.int64)
    filled = np.full(n_rows + 1, total, np.int64)
    for sizes, budget in zip(samples.sizes.T, samples.budgets.tolist(), strict=True):
        column = Column.from_sizes(sizes, samples.work, budget)
        low, (highest, together) = np.maximum(low, at_least(column, n_batches)), at_most(column, n_batches)
        up = np.minimum(up, highest)
        filled = np.minimum(filled, together[::n_ranks])
    up = np.minimum(up, total)
    filled[1:] = np.minimum(filled[1:], np.cumsum(up.reshape(n_rows, n_ranks).sum(axis=1)))
    filled[0] = 0
    rows = up.reshape(n_rows, n_ranks)
    least = np.maximum.accumulate(low[::-1])[::-1][::n_ranks].copy()
    below = np.append(np.cumsum(np.minimum(least[:, None], rows).sum(axis=1)[::-1])[::-1], 0)
    missing = max(0, total - int((filled + below).min()))
    bound = int(least.sum()) + -(-missing // n_ranks)

    def raised(at_once: int) -> Ints:
        """Return the highest works when all is raised that counts for so many micro-batches of its row."""
        return np.maximum(least, rows[:, at_once - 1]) if at_once <= n_ranks else least

    def held(highest: Ints) -> int:
        return int(np.minimum(highest[:, None], rows).sum())

    few, many = 1, n_ranks + 1  # the largest number for which all work is held; with ``many`` it is not
    if held(raised(many)) >= total:
        return least, max(bound, int(least.sum()))
    while many - few > 1:
        middle = (few + many) // 2
        if held(raised(middle)) >= total:
            few = middle
        else:
            many = middle
    before, after = raised(few + 1), raised(few)
    bound = max(bound, int(before.sum()) + -(-(total - held(before)) // few))
    below_level, level = int(before.min()), int(after.max())
    while level - below_level > 1 + (total >> FINENESS):
        middle = (below_level + level) // 2
        if held(np.clip(middle, before, after)) >= total:
            level = middle
        else:
            below_level = middle
    return np.clip(level, before, after), bound


def at_least(column: Column, n_batches: int) -> Ints:
    """Return what the j-th heaviest micro-batch has at least: the largest samples need several."""
    low = np.zeros(n_batches, np.int64)
    beyond = needed_by_largest(column, 2 * n_batches) - 1
    inside = beyond < n_batches
    np.maximum.at(low, beyond[inside], np.minimum.accumulate(column.work[: len(beyond)])[inside])
    return low


def needed_by_largest(column: Column, most: int) -> Ints:
    """Return how many micro-batches the i + 1 largest samples need at least, for the first so many i.

    Those over half of the budget have one each. Beside these, and elsewhere, fit only so many that are not smaller than
    the i-th; nor more than there is room for.
    """
    size, budget = column.size[:most], column.budget
    needed = np.arange(1, len(size) + 1)
    n_large = int(np.searchsorted(-column.size, -(budget // 2), "left"))
    needed[n_large:] = min(n_large, len(size))
    if n_large < len(size):
        large = size[:n_large]
        asked = np.linspace(n_large, len(size) - 1, min(len(size) - n_large, 1 + ASKED // (n_large + 1))).astype(
            np.int64
        )
        least = size[asked]
        beside = (budget - large)[None, :] // least[:, None]
        others = asked + 1 - n_large - beside.sum(axis=1)
        room = np.where(beside > 0, budget - large, 0).sum(axis=1)
        left = np.cumsum(size[n_large:])[asked - n_large] - room
        further = np.maximum(-(-others // (budget // least)), -(-left // budget))
        needed[asked] = n_large + np.maximum(0, further)
    return np.maximum.accumulate(needed)


def at_most(column: Column, n_batches: int) -> tuple[Ints, Ints]:
    """Return what the j-th heaviest micro-batch has at most, shape ``[m]``, and the first j together, ``[m + 1]``."""
    size, work, budget = column.size, column.work, column.budget
    n_large = int(np.searchsorted(-size, -(budget // 2), "left"))  # samples of which no two share
    density = np.append(np.maximum.accumulate((work / size)[::-1])[::-1], 0.0)  # the best from here on
    with_large = min(n_large, n_batches)
    # Rounding is to the nearest, and a density is used once: two units more are on the safe side.
    most = min(float(budget * density[n_large]) * (1 + 2.0**-50) + 2, 2.0**61)
    up = np.full(n_batches, int(most), np.int64)
    room = budget - size[:with_large]
    beside = room * density[np.searchsorted(-size, -room, "left")]
    large = work[:with_large] + np.ceil(beside * (1 + 2.0**-50) + 2).astype(np.int64)
    up[:with_large] = large
    together = densest(column, np.arange(n_batches + 1) * budget)
    if n_large < len(size):  # without a large one they hold the densest of the others
        others = Column(size[n_large:], work[n_large:], budget)
        each = np.diff(densest(others, np.arange(n_batches + 1) * budget)) + 3
        merged = np.sort(np.concatenate([large, each]))[::-1][:n_batches]
        together = np.minimum(together, np.append(0, np.cumsum(merged)))
    return np.sort(up)[::-1], together


def densest(column: Column, room: Ints) -> Ints:
    """Return the work that fits at most into so much room: the densest samples, the last one in part."""
    order = np.argsort(-(column.work / column.size), kind="stable")
    return interpolated(column.size[order], column.work[order], room, up=True)


def interpolated(size: Ints, work: Ints, room: Ints, *, up: bool) -> Ints:
    """Return the work of the first samples that fill so much room, rounded up or down by at most 2 units."""
    sizes, works = np.append(0, np.cumsum(size)), np.append(0, np.cumsum(work))
    last = np.minimum(np.searchsorted(sizes, room, "right") - 1, len(size))
    part = np.minimum(last, len(size) - 1)
    share = (room - sizes[last]) * (work[part] / size[part])
    share = np.where(last < len(size), share, 0.0)
    rounded = np.ceil(share * (1 + 2.0**-50)) + 1 if up else np.maximum(np.floor(share * (1 - 2.0**-50)) - 1, 0)
    found: Ints = works[last] + rounded.astype(np.int64)
    return found


def rank_bound(samples: Samples, n_micro_batches: int, n_ranks: int) -> int:
    """Return what the rank with most work has at least, over the whole step; the other objective is not less.

    The mean. Of the qR + 1 heaviest samples some rank gets q + 1, at least the lightest of these. The rank of the
    heaviest also holds K - 1 others, and what the micro-batches of the other ranks cannot hold.
    """
    work = samples.work
    descending = np.append(0, np.cumsum(np.sort(work)[::-1]))
    total = int(descending[-1])
    times = np.arange((len(work) - 1) // n_ranks + 1)
    together = int((descending[times * n_ranks + 1] - descending[times * n_ranks - times]).max())
    heaviest = int(work.argmax())
    others = n_micro_batches - 1
    beside = total - int(descending[len(work) - others]) if others <= len(work) - 1 else 0
    for sizes, budget in zip(samples.sizes.T, samples.budgets.tolist(), strict=True):
        left = int(sizes.sum()) - (n_ranks - 1) * n_micro_batches * budget - int(sizes[heaviest])
        rest = np.delete(np.arange(len(work)), heaviest)
        rest = rest[sizes[rest] > 0]
        if left > 0 and len(rest):
            order = rest[np.argsort(work[rest] / sizes[rest], kind="stable")]
            beside = max(beside, int(interpolated(sizes[order], work[order], np.array([left]), up=False)[0]))
    return max(-(-total // n_ranks), together, int(work[heaviest]) + beside)


def least_value(samples: Samples, n_rows: int, n_ranks: int, meet: Meet, of_rows: int | None = None) -> int:
    """Return the lower bound of the objective; ``of_rows``: that of `row_targets`, where it is known."""
    least = rank_bound(samples, n_rows, n_ranks)
    if meet == "step":
        return least
    return max(least, row_targets(samples, n_rows, n_ranks)[1] if of_rows is None else of_rows)
