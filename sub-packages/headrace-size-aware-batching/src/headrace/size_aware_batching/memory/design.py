"""The design of batches to measure: real samples, over a grid of counts and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import whole_number
from headrace.size_aware_batching.sizes.read import read_sizes

_LEVELS = (0.02, 0.25, 0.5, 0.75, 1.0)  # of the sorted sizes, at which batches are measured


def design_batches(sizes: Any, points: int = 30, max_items: int = 64) -> list[NDArray[np.int64]]:
    """Choose batches to measure: real samples of similar size, on a grid of counts and largest sizes.

    The largest sizes are the 2nd, 25th, 50th, 75th and 100th percentile of each column; the counts are a geometric
    series from 1 to ``max_items``. A batch holds its largest sample and those just below it in size, repeated if there
    are too few.

    Args:
        sizes: Size of each sample, in any form that `DistributedSizeAwareBatchSampler` takes.
        points: Approximate number of batches; 20 to 40 suffice.
        max_items: Number of samples in the largest batch. (`fit_budget` finds by itself how many fit.)

    Returns:
        Indices of the samples of each batch, the smallest batch first.

    >>> [batch.tolist() for batch in design_batches([10, 20, 30], points=4, max_items=2)]
    [[0], [0, 0], [1], [2], [1, 0], [2, 1]]
    """
    array = read_sizes(sizes)
    points, max_items = whole_number("points", points) or 1, whole_number("max_items", max_items) or 1
    if not len(array):
        raise ValueError("sizes must hold at least one sample, got none")
    anchors = size_anchors(array)
    steps = min(max_items, max(2, -(-points // len(anchors)))) if max_items > 1 else 1
    counts = np.unique(np.rint(np.geomspace(1, max_items, steps)).astype(int))
    batches = [neighbours(order, place, int(count)) for order, place in anchors for count in counts]
    chosen = {tuple(batch.tolist()): batch for batch in batches}
    ordered = sorted(chosen.values(), key=lambda batch: padded_area(array, batch))
    if len(ordered) > points + len(anchors):
        ordered = [ordered[place] for place in np.unique(np.linspace(0, len(ordered) - 1, points).astype(int))]
    return ordered


def size_anchors(sizes: NDArray[Any], levels: Sequence[float] = _LEVELS) -> list[tuple[NDArray[np.int64], int]]:
    """Return, for each column and level, the samples by size and the place of the level's sample among them."""
    places = dict.fromkeys(int(level * (len(sizes) - 1)) for level in levels)
    orders = [np.argsort(column, kind="stable") for column in sizes.reshape(len(sizes), -1).T]
    return [(order, place) for order in orders for place in places]


def neighbours(order: NDArray[np.int64], place: int, count: int) -> NDArray[np.int64]:
    """Return ``count`` samples whose largest is at ``place`` of the sorted ones, the largest first."""
    return np.resize(order[max(0, place + 1 - count) : place + 1][::-1], count)


def padded_area(sizes: NDArray[Any], batch: NDArray[np.int64]) -> float:
    """Return count times largest, the sum over the columns."""
    return float(len(batch) * sizes[batch].reshape(len(batch), -1).max(axis=0).sum())
