"""Bins filled to the brim: best-fit decreasing on the histogram of sizes."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Steps = list[tuple[int, int]]  # (size, how many of it), in the order they were laid


def best_fit(falling: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack sizes into bins, each into the fullest bin that still takes it.

    Works on whole groups: bins that hold the same sizes are one entry, and all samples of one size are laid at
    once, so that the effort depends on the number of distinct sizes, not of samples (after Krell et al.,
    "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027).

    Args:
        falling: Sizes, largest first, shape ``[n]``; none above the budget.
        budget: Largest sum of a bin.

    Returns:
        The places in ``falling`` bin by bin, shape ``[n]``, and where each bin begins, shape ``[bins + 1]``.

    >>> places, offsets = best_fit(np.array([6, 5, 5, 4]), 10)
    >>> [places[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])]
    [[1, 2], [0, 3]]
    """
    if not len(falling):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    edges = np.flatnonzero(np.diff(falling)) + 1
    firsts = np.concatenate([[0], edges])
    sizes = falling[firsts].tolist()
    counts = np.diff(np.concatenate([firsts, [len(falling)]])).tolist()
    return lay_out(pack_histogram(sizes, counts, budget), dict(zip(sizes, firsts.tolist(), strict=True)))


def pack_histogram(sizes: list[int], counts: list[int], budget: int) -> list[tuple[int, Steps]]:
    """Pack ``counts[i]`` samples of ``sizes[i]``, falling; return (how many bins, what each of them holds)."""
    room: list[int] = []  # the residuals that some bins have, rising
    groups: dict[int, list[tuple[int, Steps]]] = {}

    def put(residual: int, bins: int, steps: Steps) -> None:
        if residual not in groups:
            insort(room, residual)
            groups[residual] = []
        groups[residual].append((bins, steps))

    for size, count in zip(sizes, counts, strict=True):
        while count:
            steps: Steps = []
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


def lay_out(groups: list[tuple[int, Steps]], firsts: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
