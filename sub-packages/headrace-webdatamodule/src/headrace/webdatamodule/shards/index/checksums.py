"""Checksums of members, of what lies between them, of indexes and of whole shards: all of them are made here.

They are XXH3, which costs Python a tenth of a microsecond for a small member. Of a member's the low 32 bits are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule.shards.format.files import PIECE, Bytes

GAPS_PER_CHECKSUM = 64  # so that damage between members is narrowed down
MEMBER_BITS = 0xFFFFFFFF  # of `digest64` that a member's checksum keeps
_FINGERPRINT_PIECE = 4096


def member_checksums(members: Iterable[bytes | memoryview]) -> npt.NDArray[np.uint32]:
    """The checksums of members that are in memory, shape [n_members]."""
    return checksums64(members).astype(np.uint32)


def checksums64(pieces: Iterable[bytes | memoryview]) -> npt.NDArray[np.uint64]:
    """XXH3 in 64 bits of each piece, shape [n_pieces]."""
    return np.frombuffer(b"".join(map(xxhash.xxh3_64_digest, pieces)), ">u8").astype(np.uint64)


def checksum64(*pieces: bytes | memoryview) -> int:
    """XXH3 in 64 bits of some pieces, as if they were one."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def checksum32(data: Bytes, begin: int, end: int) -> int:
    """The checksum of a member's data, which may be larger than the memory: the low 32 bits of XXH3."""
    if end - begin > PIECE:
        return checksum_spans(data, [(begin, end)]) & MEMBER_BITS
    return digest64(data[begin:end]) & MEMBER_BITS


def checksum_spans(data: Bytes, spans: Iterable[tuple[int, int]]) -> int:
    """XXH3 in 64 bits of some parts of a file, as if they were one."""
    state = xxhash.xxh3_64()
    for begin, end in spans:
        _update(state, data, begin, end)
    return state.intdigest()


def gaps(offsets: Sequence[int], sizes: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Begin and end of what lies between the data of members: headers, padding, skipped members, the file's end."""
    begins = [0, *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    return list(zip(begins, [*offsets, end], strict=True))


def shard_checksums(
    data: Bytes, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], npt.NDArray[np.uint64]]:
    """The `checksum32` of each member, and one of 64 bits for each 64 of the `gaps`; the file is read once."""
    sums, gap_sums, end, state = list[int](), list[int](), 0, xxhash.xxh3_64()
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True), start=1):
        _update(state, data, end, offset)
        if not number % GAPS_PER_CHECKSUM:
            gap_sums.append(state.intdigest())
            state.reset()
        end = offset + size
        sums.append(checksum32(data, offset, end))
    _update(state, data, end, len(data))
    return sums, np.array([*gap_sums, state.intdigest()], np.uint64)


def _update(state: xxhash.xxh3_64, data: Bytes, begin: int, end: int) -> None:
    for first in range(begin, end, PIECE):
        state.update(data[first : min(first + PIECE, end)])


def fingerprint_ranges(shard_bytes: int, end: int) -> list[tuple[int, int]]:
    """Which bytes of a shard to look at to tell it from another one of the same size.

    The times of a file do not survive copies, and reading all of it is slow: size, begin, middle and the end of
    the last member tell shards of different content apart in three short reads, also over a network.
    """
    begins = (0, end // 2, max(0, end - _FINGERPRINT_PIECE))
    return [(begin, min(begin + _FINGERPRINT_PIECE, shard_bytes)) for begin in begins]


def content_fingerprint(shard_bytes: int, pieces: Iterable[bytes | memoryview]) -> int:
    """The checksum of a shard's size and of the bytes in its `fingerprint_ranges`."""
    return checksum64(shard_bytes.to_bytes(8, "little"), *pieces)
