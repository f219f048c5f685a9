"""Where a shard differs from its index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from headrace.webdatamodule.shards.errors import DamagedShardError, ShardError
from headrace.webdatamodule.shards.format.grouping import Samples, group
from headrace.webdatamodule.shards.format.headers import BLOCK
from headrace.webdatamodule.shards.format.plain_files import Bytes
from headrace.webdatamodule.shards.format.walking import walk
from headrace.webdatamodule.shards.index.checksums import FRAME_GAPS, checksum_between, checksum_spans, gaps
from headrace.webdatamodule.shards.index.shard_index import ShardIndex


def differences(view: Bytes, index: ShardIndex) -> Iterator[ShardError]:
    """Compare each byte of a shard with its index.

    Args:
        view: The bytes of the tar file.
        index: Its index, whose own bytes were checked.

    Yields:
        Each difference, with its place.
    """
    if len(view) != index.shard_bytes:
        message = f"the shard has {len(view)} bytes, but {index.shard_bytes} when it was indexed"
        yield DamagedShardError(message, shard=index.shard, offset=min(len(view), index.shard_bytes))
    structure = structure_fault(view, index)
    if structure is not None:
        yield structure
    yield from _data_faults(view, index)
    yield from _frame_faults(view, index, known=structure.offset if structure else None)


def place(index: ShardIndex, offset: int) -> tuple[str | None, str | None]:
    """Which sample and which member a byte of a shard belongs to: by its data, the padding behind, or its headers.

    Args:
        index: The index of the shard.
        offset: The byte.

    Returns:
        The sample's key and the member's name; None and None behind the last member.
    """
    position = int(np.searchsorted(index.ends, offset, "right"))
    if position == index.n_members:
        return None, None
    sample, member = index.locate(position)
    return index.key(sample), member


def structure_fault(view: Bytes, index: ShardIndex) -> ShardError | None:
    """The first fault of a tar file's structure, or the first member that is another one than in the index.

    Args:
        view: The bytes of the tar file.
        index: Its index.

    Returns:
        The fault; None when all members are where the index says.
    """
    try:
        samples = group(walk(view, shard=index.shard), shard=index.shard)
    except ShardError as error:
        if error.sample is None and error.offset is not None:
            error.sample, member = place(index, error.offset)
            error.member = error.member or member
        return error
    pairs = enumerate(zip_longest(_members(index), _of_samples(samples)))
    position = next((position for position, (told, found) in pairs if told != found), None)
    if position is None:
        return None
    message = "the shard has another member here than its index says"
    if position < index.n_members:
        return _at(index, position, message)
    return DamagedShardError(message, shard=index.shard, offset=samples.offsets[position] - BLOCK)


def _members(index: ShardIndex) -> Iterator[tuple[str, int, int]]:
    layouts = index.layout_numbers.tolist()
    names = [f"{key}.{suffix}" for key, one in zip(index.keys, layouts, strict=True) for suffix in index.suffixes[one]]
    return zip(names, index.offsets.tolist(), index.sizes.tolist(), strict=True)


def _of_samples(samples: Samples) -> Iterator[tuple[str, int, int]]:
    layouts = list(samples.layouts)
    keyed = zip(samples.keys, samples.layout_of, strict=True)
    names = [f"{key}.{suffix}" for key, one in keyed for suffix in layouts[one]]
    return zip(names, samples.offsets, samples.sizes, strict=True)


def _data_faults(view: Bytes, index: ShardIndex) -> Iterator[ShardError]:
    offsets, sizes, checksums = index.offsets.tolist(), index.sizes.tolist(), index.checksums.tolist()
    for position, (offset, size, checksum) in enumerate(zip(offsets, sizes, checksums, strict=True)):
        if offset + size > len(view):
            message = f"the data of {index.n_members - position} members, from here on, lie behind the end of the shard"
            yield _at(index, position, message)
            return
        if checksum_between(view, offset, offset + size) & 0xFFFFFFFF != checksum:
            yield _at(index, position, f"the {size} bytes of data are damaged: their checksum does not fit")


def _at(index: ShardIndex, position: int, message: str) -> ShardError:
    sample, member = index.locate(position)
    offset = int(index.blocks[position] - 1) * BLOCK
    return DamagedShardError(message, shard=index.shard, sample=index.key(sample), member=member, offset=offset)


def _frame_faults(view: Bytes, index: ShardIndex, *, known: int | None) -> Iterator[ShardError]:
    between = gaps(index.offsets.tolist(), index.sizes.tolist(), index.shard_bytes)
    for number, checksum in enumerate(index.frames.tolist()):
        parts = between[number * FRAME_GAPS : (number + 1) * FRAME_GAPS]
        begin, end = parts[0][0], parts[-1][1]
        if end > len(view) or checksum_spans(view, parts) == checksum:
            continue
        padding = [fault for part in parts for fault in _padding_faults(view, index, *part)]
        yield from padding
        if not padding and not (known is not None and begin <= known < end):
            sample, member = place(index, begin)
            message = f"a header, padding or a skipped member between bytes {begin} and {end} was changed"
            yield DamagedShardError(message, shard=index.shard, sample=sample, member=member, offset=begin)


def _padding_faults(view: Bytes, index: ShardIndex, begin: int, end: int) -> Iterator[ShardError]:
    # Writers fill up with zeros; what is not zero there is the damage itself.
    padding = bytes(view[begin : min(begin + -begin % BLOCK, end)])
    if padding.strip(b"\0"):
        offset = begin + len(padding) - len(padding.lstrip(b"\0"))
        sample, member = place(index, offset)
        message = "the padding behind the data was changed"
        yield DamagedShardError(message, shard=index.shard, sample=sample, member=member, offset=offset)
