"""Checksums of shards and indexes: XXH3, which costs Python a tenth of a microsecond for a small member."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

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


def frames(data: memoryview, between: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """Checksums over all that is not data of a member, one for 64 gaps, so that damage is narrowed down.

    Args:
        data: The bytes of a tar file.
        between: As of `gaps`.

    Returns:
        One 64-bit checksum for each 64 gaps, shape [ceil(len(between) / 64)].
    """
    groups = (between[first : first + FRAME_GAPS] for first in range(0, len(between), FRAME_GAPS))
    return np.array([checksum64(*(data[a:b] for a, b in group)) for group in groups], np.uint64)


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
