"""The bytes of an index file: a head, a description in JSON and numpy arrays; and the checksums of shards and indexes.

====================  ============================================================================
8 bytes               magic: `89 48 52 49 0D 0A 1A 0A`; a transfer in text mode would change it
4 bytes               version of the format, 2 (all numbers are little-endian)
4 bytes               length of the description
8 bytes               XXH3 of the other head fields and the description
8 bytes               XXH3 of all that follows the description
the description       JSON, padded with spaces to a multiple of 8 bytes
the arrays            in the order of the description's "arrays", each padded with zeros to 8 bytes
====================  ============================================================================

Checksums are XXH3, which costs Python a tenth of a microsecond for a small member.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.errors import DamagedIndexError, IndexVersionError, ShardError
from headrace.webdatamodule.shards.format.files import PIECE, Bytes

MAGIC = b"\x89HRI\r\n\x1a\n"
VERSION = 2
MAX_DESCRIPTION_BYTES = 1 << 24  # a hundred thousand samples of which no two have the same members need some MiB
GAPS_PER_CHECKSUM = 64  # so that damage between members is narrowed down
_FINGERPRINT_PIECE = 4096
_HEAD = struct.Struct("<8sIIQQ")
_TYPES = ("|u1", "<u2", "<u4", "<u8")


class Unpacked(NamedTuple):
    """What an index file holds."""

    description: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]  # views into the file, not copies
    checksum: int  # of the head; it covers the checksum of the arrays, and so stands for the whole file
    body: memoryview  # the bytes behind the description
    body_checksum: int  # what their checksum has to be


def pack(description: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Make the bytes of an index file; the same for the same content."""
    plain = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    listed = [[name, array.dtype.str, array.size] for name, array in plain.items()]
    text = json.dumps({**description, "arrays": listed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_DESCRIPTION_BYTES:
        message = f"the names of members take {len(text)} bytes in the index, more than {MAX_DESCRIPTION_BYTES}"
        raise ShardError(f"{message}: name members alike in all samples, or make smaller shards")
    body = b"".join(array.tobytes() + bytes(-array.nbytes % 8) for array in plain.values())
    return _head(text, checksum64(body)) + text + body


def unpack(data: memoryview) -> Unpacked:
    """Take an index file apart: head and description are checked, the arrays' bytes are not even read."""
    text, checksum, body_checksum = _checked_head(data)
    body = data[_HEAD.size + len(text) :]
    description = json.loads(text)
    arrays = _arrays(description.pop("arrays"), body)
    return Unpacked(description, arrays, checksum, body, body_checksum)


def index_checksum(data: bytes | memoryview) -> int:
    """The checksum that stands for a whole index; its head and description are checked, and not read."""
    return _checked_head(memoryview(data))[1]


def _checked_head(data: memoryview) -> tuple[bytes, int, int]:
    """The description, the checksum of the head, and what that of the arrays has to be."""
    if len(data) < _HEAD.size or bytes(data[:8]) != MAGIC:
        raise DamagedIndexError(f"this is no index: it begins with {bytes(data[:16])!r}")
    _, version, length, _, body_checksum = _HEAD.unpack(data[: _HEAD.size])
    check_version(version, VERSION)
    if length > MAX_DESCRIPTION_BYTES:
        raise DamagedIndexError(f"the index has a description of {length} bytes, more than {MAX_DESCRIPTION_BYTES}")
    text = bytes(data[_HEAD.size : _HEAD.size + length])
    head = _head(text, body_checksum)
    if len(text) < length or head != bytes(data[: _HEAD.size]):
        raise DamagedIndexError("the head of the index is damaged: its checksum does not fit")
    return text, _HEAD.unpack(head)[3], body_checksum


def check_version(found: int, ours: int) -> None:
    """Refuse the format of another release: only a person can say whether its index may be replaced."""
    if found != ours:
        message = f"the index was written by another release of headrace (version {found}, this one reads {ours})"
        raise IndexVersionError(f"{message}: upgrade headrace, or index again with index_shards(force=True)")


def _head(text: bytes, body_checksum: int) -> bytes:
    own = checksum64(_HEAD.pack(MAGIC, VERSION, len(text), 0, body_checksum), text)
    return _HEAD.pack(MAGIC, VERSION, len(text), own, body_checksum)


def _arrays(listed: list[list[Any]], body: memoryview) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = 0
    for name, kind, count in listed:
        if kind not in _TYPES or not isinstance(count, int) or count < 0:
            raise DamagedIndexError(f"the index has an array of {count!r} times {kind!r}")
        nbytes = count * np.dtype(kind).itemsize
        if at + nbytes > len(body):
            raise DamagedIndexError(f"the index is cut: the array {name!r} ends behind the end of the file")
        arrays[name] = np.frombuffer(body, kind, count, at) if count else np.empty(0, kind)
        at += nbytes + -nbytes % 8
    if at != len(body):
        raise DamagedIndexError(f"the index is cut or longer than it says: {len(body)} bytes of arrays, not {at}")
    return arrays


def checksum64(*pieces: bytes | memoryview) -> int:
    """XXH3 in 64 bits of some pieces, as if they were one."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def checksum32(data: Bytes, begin: int, end: int) -> int:
    """The checksum of a member's data, which may be larger than the memory: the low 32 bits of XXH3."""
    if end - begin > PIECE:
        return checksum_spans(data, [(begin, end)]) & 0xFFFFFFFF
    return xxhash.xxh3_64_intdigest(data[begin:end]) & 0xFFFFFFFF


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
