"""Sorting samples by size in little memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**18
COUNTED = 2**16  # sizes below this are sorted by counting


def index_type(n_samples: int) -> type[np.signedinteger[Any]]:
    """Return the smallest integer type that holds the indices of so many samples."""
    return np.int32 if n_samples < 2**31 else np.int64


def sorted_by_size(sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of the samples by size, largest first, and the sizes in that order.

    Small integers come back in two bytes each.

    >>> order, falling = sorted_by_size(np.array([3, 7, 3, 9]))
    >>> order.tolist(), falling.tolist(), falling.dtype
    ([3, 1, 0, 2], [9, 7, 3, 3], dtype('uint16'))
    """
    order = falling_order(sizes)
    if not len(sizes) or sizes.dtype.kind not in "iu" or sizes.max() >= COUNTED:
        return order, sizes[order]
    counts = np.zeros(int(sizes.max()) + 1, np.int64)
    for start in range(0, len(sizes), CHUNK):
        counts += np.bincount(sizes[start : start + CHUNK], minlength=len(counts))
    return order, np.repeat(np.arange(len(counts), dtype=np.uint16)[::-1], counts[::-1])


def falling_order(sizes: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of the samples by size, largest first, equal sizes in their order.

    Small integers are sorted by counting, a chunk at a time: 4 bytes a sample and a chunk's worth beside them.

    >>> falling_order(np.array([3, 7, 3, 9])).tolist()
    [3, 1, 0, 2]
    """
    kind = index_type(len(sizes))
    if not len(sizes):
        return np.zeros(0, kind)
    largest = sizes.max()
    if not np.issubdtype(sizes.dtype, np.integer) or largest >= COUNTED or sizes.min() < 0:
        # A stable sort that rises on the negated sizes falls on the sizes.
        negated = -sizes.astype(np.float64 if sizes.dtype.kind == "f" else np.int64)
        return np.argsort(negated, kind="stable").astype(kind)
    order = np.empty(len(sizes), kind)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(sizes), CHUNK)]
    counts = np.zeros(int(largest) + 1, np.int64)
    for chunk in chunks:
        counts += np.bincount(sizes[chunk], minlength=len(counts))
    # Where the next sample of each size goes; the largest size comes first.
    following = np.concatenate([[0], np.cumsum(counts[::-1])[:-1]])[::-1].copy()
    for chunk in chunks:
        part = (largest - sizes[chunk]).astype(np.uint16)
        ranked = np.argsort(part, kind="stable")
        values = largest - part[ranked].astype(np.int64)
        present = np.bincount(values, minlength=len(counts))
        before = np.concatenate([[0], np.cumsum(present[::-1])[:-1]])[::-1]
        order[(following - before)[values] + np.arange(len(values))] = ranked + chunk.start
        following += present
    return order
