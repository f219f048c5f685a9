"""Members that are larger than a reader may take: found in the index, before a byte of them is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from headrace.webdatamodule.shards.errors import DecodeError
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.rows import place


def oversized(index: ShardIndex, keys: Sequence[str] | None, max_bytes: int) -> dict[int, int]:
    """Find the samples that have too large a member.

    Args:
        index: Of the shard.
        keys: Which members count, in lower case; all when None.
        max_bytes: The most bytes that a member may have.

    Returns:
        Numbers of samples, ascending, and the position of the first such member of each in the index's arrays.
    """
    if not index.sizes.size or int(index.sizes.max()) <= max_bytes:
        return {}
    wanted = None if keys is None else frozenset(keys)
    found: dict[int, int] = {}
    for at in np.flatnonzero(index.sizes > max_bytes).tolist():
        sample, _ = index.locate(at)
        if wanted is None or index.layout(sample)[at - index.span(sample)[0]] in wanted:
            found.setdefault(sample, at)
    return found


def refuse_size(index: ShardIndex, at: int, max_bytes: int) -> NoReturn:
    """Raise the error of a member that is too large.

    Args:
        index: Of the shard.
        at: The member's position in the index's arrays.
        max_bytes: The most bytes that a member may have.

    Raises:
        DecodeError: Always.
    """
    message = f"the member has {int(index.sizes[at])} bytes, which is more than max_bytes={max_bytes}"
    raise DecodeError(f"{message}: raise max_bytes if that is meant to be, or leave it out of keys", **place(index, at))
