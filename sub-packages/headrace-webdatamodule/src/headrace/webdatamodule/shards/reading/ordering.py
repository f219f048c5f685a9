"""A batch of positions to what has to be read of each shard."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Group = tuple[int, list[int]]


def by_shard(indices: Sequence[int] | npt.NDArray[np.integer], ends: Sequence[int]) -> tuple[list[Group], list[int]]:
    """Put the positions that lie in one shard together, in the order of the shard.

    Args:
        indices: Positions in a set of shards, shape [n]; negative ones count from the end.
        ends: The position behind each shard's last sample, shape [number of shards].

    Returns:
        Pairs of a shard and numbers of samples in it; and for each of these, in order, its place in `indices`.

    Raises:
        IndexError: A position is not there.
        TypeError: A position is no integer.

    >>> by_shard([4, 0, -1, 0], [3, 5])
    ([(0, [0, 0]), (1, [1, 1])], [1, 3, 0, 2])
    """
    wanted = np.asarray(indices)
    if not wanted.size:
        return [], []
    if wanted.dtype.kind not in "iu" or wanted.ndim != 1:
        raise TypeError(f"indices must be integers, shape [n], got {wanted.dtype} of shape {list(wanted.shape)}")
    order = wanted.argsort(kind="stable")
    ascending = wanted[order].tolist()
    count = ends[-1] if ends else 0
    if ascending[0] < -count or ascending[-1] >= count:
        wrong = ascending[0] if ascending[0] < -count else ascending[-1]
        raise IndexError(f"indices must be {-count} to {count - 1}, got {wrong}")
    if ascending[0] < 0:
        return by_shard(np.where(wanted < 0, wanted + count, wanted), ends)
    return _cut(ascending, ends), order.tolist()


def _cut(ascending: list[int], ends: Sequence[int]) -> list[Group]:
    groups: list[Group] = []
    begin = 0
    while begin < len(ascending):
        shard = bisect_right(ends, ascending[begin])
        start = ends[shard - 1] if shard else 0
        end = bisect_left(ascending, ends[shard], begin)
        groups.append((shard, [at - start for at in ascending[begin:end]]))
        begin = end
    return groups
