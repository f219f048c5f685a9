"""Sizes of members, from an index alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index.shard_index import ShardIndex


def member_sizes(index: ShardIndex, member: str, missing: int | None = None) -> npt.NDArray[np.int64]:
    """How many bytes a member has in each sample of a shard.

    Args:
        index: Of the shard.
        member: The member's key, in lower case.
        missing: What to say of samples that lack it; an error when None.

    Returns:
        Bytes, shape [n_samples].

    Raises:
        ShardError: A sample lacks the member.
    """
    positions = index.positions(member)
    lacking = positions < 0
    if missing is None and lacking.any():
        key = index.key(int(lacking.argmax()))
        cure = "correct the shard, or name a member that all samples have; IndexedShards.sizes takes missing=0 instead"
        message = f"the sample has no member {member!r}: {cure}"
        raise ShardError(message, shard=index.shard, sample=key)
    if not index.n_members:
        return np.empty(0, np.int64)
    sizes = index.sizes[positions].astype(np.int64)
    return np.where(lacking, missing or 0, sizes)
