"""The best plan of a small step, by trying all."""

import itertools
from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def partitions(count: int, parts: int) -> NDArray[np.int8]:
    """Return all ways to put so many samples into so many parts, none of them empty, a row each."""
    rows = np.zeros((1, 1), np.int8)
    for place in range(1, count):
        used = rows.max(axis=1) + 1
        grown = [
            np.concatenate([rows[used >= part], np.full(((used >= part).sum(), 1), part, np.int8)], axis=1)
            for part in range(parts)
        ]
        rows = np.concatenate(grown)
        rows = rows[rows.max(axis=1) + 1 >= parts - (count - 1 - place)]
    return rows


@cache
def groupings(ranks: int, steps: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return all ways to give each rank so many micro-batches, the order of the ranks aside."""

    def split(left: tuple[int, ...]) -> list[tuple[tuple[int, ...], ...]]:
        if not left:
            return [()]
        found = []
        for others in itertools.combinations(left[1:], steps - 1):
            rest = tuple(number for number in left if number not in (left[0], *others))
            found += [((left[0], *others), *more) for more in split(rest)]
        return found

    return split(tuple(range(ranks * steps)))


def best(
    sizes: NDArray[np.int64], budget: int, work: NDArray[np.int64], ranks: int, steps: int, meet: str
) -> int | None:
    """Return the least value of the objective with so many micro-batches on each rank, None where no plan exists."""
    parts = ranks * steps
    ways = partitions(len(sizes), parts)
    load = np.stack([(ways == part) @ sizes for part in range(parts)], axis=1)
    ways = ways[(load <= budget).all(axis=1)]
    if not len(ways):
        return None
    works = np.stack([(ways == part) @ work for part in range(parts)], axis=1)
    if meet == "micro_batch":
        return int(np.sort(works, axis=1)[:, ::-1][:, ::ranks].sum(axis=1).min())
    values = [
        np.stack([works[:, list(rank)].sum(axis=1) for rank in grouping], axis=1).max(axis=1)
        for grouping in groupings(ranks, steps)
    ]
    return int(np.min(values))
