"""The bytes of a shard to the bytes of its index."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.grouping import Samples, group
from headrace.webdatamodule.shards.format.headers import BLOCK
from headrace.webdatamodule.shards.format.plain_files import Bytes, FileBytes
from headrace.webdatamodule.shards.format.walking import walk
from headrace.webdatamodule.shards.index.checksums import member_sums, spot_ranges, spots
from headrace.webdatamodule.shards.index.keys import describe_keys
from headrace.webdatamodule.shards.index.packing import pack

_NAMED = 16
Arrays = dict[str, npt.NDArray[Any]]


def build_index(data: Bytes, *, shard: str = "") -> bytes:
    """Read a whole shard, check its structure and make its index.

    Args:
        data: The bytes of a tar file, a memory map, or an open file.
        shard: Path or URL, named in errors.

    Returns:
        The bytes of an index file, for `ShardIndex`; the same for the same shard.

    Raises:
        DamagedShardError: The file is no whole tar file.
        RefusedMemberError: A member is no plain file.
        GroupingError: The members do not form samples.
        ShardError: The names of members do not fit into an index.
    """
    view = data if isinstance(data, FileBytes) else memoryview(data)
    try:
        return pack_index(view, group(walk(view, shard=shard), shard=shard))
    except ShardError as error:
        error.shard = error.shard or shard or None
        raise


def pack_index(view: Bytes, samples: Samples) -> bytes:
    """Make an index of samples that are known already.

    Args:
        view: The bytes of the tar file.
        samples: What lies in it.

    Returns:
        The bytes of an index file.
    """
    keys, key_arrays = describe_keys(samples.keys)
    checksums, frames = member_sums(view, samples.offsets, samples.sizes)
    arrays: Arrays = {
        "blocks": narrow(np.array(samples.offsets, np.uint64) // BLOCK),
        "sizes": narrow(np.array(samples.sizes, np.uint64)),
        "checksums": np.array(checksums, np.uint32),
        "frames": frames,
        **ragged(samples),
        **key_arrays,
    }
    ranges = spot_ranges(len(view), samples.end)
    description = {
        "samples": len(samples.keys),
        "shard_bytes": len(view),
        "end": samples.end,
        "spots": spots(len(view), [view[begin:end] for begin, end in ranges]),
        "layouts": list(samples.layouts),
        "keys": keys,
        "skipped": Counter(one.reason for one in samples.skipped),
        "skipped_names": [one.name for one in samples.skipped if one.reason not in ("directory", "label")][:_NAMED],
    }
    return pack(description, arrays)


def narrow(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """The same numbers in 4 bytes each where they fit, which they do for shards below 2 TiB.

    >>> narrow(np.array([1, 2], np.uint64)).dtype, narrow(np.array([1 << 32], np.uint64)).dtype
    (dtype('uint32'), dtype('uint64'))
    """
    return numbers if numbers.size and int(numbers.max()) >> 32 else numbers.astype(np.uint32)


def ragged(samples: Samples) -> Arrays:
    """The arrays that only an index of samples with unlike members has.

    Args:
        samples: All of a shard.
    """
    layouts = list(samples.layouts)
    arrays: Arrays = {}
    if len(layouts) > 1:
        arrays["layout_of"] = np.array(samples.layout_of, np.uint16 if len(layouts) <= 1 << 16 else np.uint32)
    if len({len(layout) for layout in layouts}) > 1:
        widths = [len(layouts[number]) for number in samples.layout_of]
        arrays["starts"] = narrow(np.array([0, *accumulate(widths[:-1])], np.uint64))
    return arrays
