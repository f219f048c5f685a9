"""Checksums of shards and indexes: XXH3, which costs Python a tenth of a microsecond for a small member."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.format.plain_files import PIECE, Bytes

FRAME_GAPS = 64
_SPOT = 4096


def checksum32(data: bytes | memoryview) -> int:
    """The checksum of a member's data: the low 32 bits of XXH3.

    Args:
        data: Bytes.

    Returns:
        0 to 2**32 - 1.

    >>> hex(checksum32(b"abc"))
    '0x892f3950'
    """
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


def checksum64(*pieces: bytes | memoryview) -> int:
    """XXH3 in 64 bits of some pieces, as if they were one.

    Args:
        pieces: Bytes.

    Returns:
        0 to 2**64 - 1.

    >>> checksum64(b"ab", b"c") == checksum64(b"abc")
    True
    """
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def checksum_between(data: Bytes, begin: int, end: int) -> int:
    """XXH3 in 64 bits of a part of a file, which may be larger than the memory.

    Args:
        data: The bytes of the file.
        begin: Where the part begins.
        end: Where it ends.

    Returns:
        0 to 2**64 - 1.
    """
    if end - begin <= PIECE:
        return xxhash.xxh3_64_intdigest(data[begin:end])
    return checksum_spans(data, [(begin, end)])


def checksum_spans(data: Bytes, spans: Iterable[tuple[int, int]]) -> int:
    """XXH3 in 64 bits of some parts of a file, as if they were one.

    Args:
        data: The bytes of the file.
        spans: Pairs of begin and end.

    Returns:
        0 to 2**64 - 1.

    >>> checksum_spans(b"abcd", [(0, 1), (2, 4)]) == checksum64(b"acd")
    True
    """
    state = xxhash.xxh3_64()
    for begin, end in spans:
        _update(state, data, begin, end)
    return state.intdigest()


def gaps(offsets: Sequence[int], sizes: Sequence[int], end: int) -> list[tuple[int, int]]:
    """What lies between the data of members: headers, padding, skipped members, and the end of the file.

    Args:
        offsets: Where the data of each member begin, in bytes, increasing.
        sizes: Bytes of data of each member.
        end: Bytes of the file.

    Returns:
        `len(offsets) + 1` pairs of begin and end.

    >>> gaps([512, 1536], [3, 0], 3072)
    [(0, 512), (515, 1536), (1536, 3072)]
    """
    begins = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    return list(zip(begins, [*offsets, end], strict=True))


def member_sums(data: Bytes, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], npt.NDArray[np.uint64]]:
    """Checksums over the data of members, and over all that is not: one for 64 gaps, so that damage is narrowed down.

    The file is read once, from its begin to its end.

    Args:
        data: The bytes of a tar file.
        offsets: Where the data of each member begin, in bytes, increasing.
        sizes: Bytes of data of each member.

    Returns:
        The `checksum32` of each member, and a 64-bit checksum for each 64 of the spans that `gaps` gives, shape
        [len(offsets) // 64 + 1].
    """
    sums, frames, end, state = list[int](), list[int](), 0, xxhash.xxh3_64()
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True), start=1):
        _update(state, data, end, offset)
        if not number % FRAME_GAPS:
            frames.append(state.intdigest())
            state.reset()
        end = offset + size
        sums.append(checksum_between(data, offset, end) & 0xFFFFFFFF)
    _update(state, data, end, len(data))
    return sums, np.array([*frames, state.intdigest()], np.uint64)


def _update(state: xxhash.xxh3_64, data: Bytes, begin: int, end: int) -> None:
    if end - begin <= PIECE:
        state.update(data[begin:end])
        return
    for first in range(begin, end, PIECE):
        state.update(data[first : min(first + PIECE, end)])


def spot_ranges(shard_bytes: int, end: int) -> list[tuple[int, int]]:
    """Which bytes of a shard to look at to tell it from another one of the same size.

    The times of a file do not survive copies, and reading all of it is slow: size, begin, middle and the end of
    the last member tell shards of different content apart in three short reads, also over a network.

    Args:
        shard_bytes: Bytes of the file.
        end: Where the last member's blocks end.

    Returns:
        Three pairs of begin and end; they overlap in small files.

    >>> spot_ranges(10240, 5632)
    [(0, 4096), (2816, 6912), (1536, 5632)]
    """
    begins = (0, end // 2, max(0, end - _SPOT))
    return [(begin, min(begin + _SPOT, shard_bytes)) for begin in begins]


def spots(shard_bytes: int, pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of a shard's size and of the bytes that `spot_ranges` names.

    Args:
        shard_bytes: Bytes of the file.
        pieces: The bytes in these ranges.

    Returns:
        0 to 2**64 - 1.
    """
    return checksum64(shard_bytes.to_bytes(8, "little"), *pieces)
