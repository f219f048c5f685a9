"""The bytes of an index file: a head, a description in JSON and numpy arrays.

====================  ============================================================================
8 bytes               magic: `89 48 52 49 0D 0A 1A 0A`; a transfer in text mode would change it
4 bytes               version of the format, 1 (all numbers are little-endian)
4 bytes               length of the description
8 bytes               XXH3 of the other head fields and the description
8 bytes               XXH3 of all that follows the description
the description       JSON, padded with spaces to a multiple of 8 bytes
the arrays            in the order of the description's "arrays", each padded with zeros to 8 bytes
====================  ============================================================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import DamagedIndexError, IndexVersionError, ShardError
from headrace.webdatamodule.shards.index.checksums import checksum64

INDEX_MAGIC = b"\x89HRI\r\n\x1a\n"
INDEX_VERSION = 1  # of all that stands beside the tar files: indexes, manifest, plan, and samples in a cache
MAX_DESCRIPTION_BYTES = 1 << 24  # a hundred thousand samples of which no two have the same members need some MiB
_HEAD = struct.Struct("<8sIIQQ")
_TYPES = ("|u1", "<u2", "<u4", "<u8")


class Unpacked(NamedTuple):
    """What an index file holds."""

    description: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]  # views into the file, not copies
    checksum: int  # of the head; it covers the checksum of the arrays, and so stands for the whole file
    body: memoryview  # the bytes after the description
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
    if len(data) < _HEAD.size or bytes(data[:8]) != INDEX_MAGIC:
        raise DamagedIndexError(f"this is no index: it begins with {bytes(data[:16])!r}")
    _, version, length, _, body_checksum = _HEAD.unpack(data[: _HEAD.size])
    check_version(version)
    if length > MAX_DESCRIPTION_BYTES:
        raise DamagedIndexError(f"the index has a description of {length} bytes, more than {MAX_DESCRIPTION_BYTES}")
    text = bytes(data[_HEAD.size : _HEAD.size + length])
    head = _head(text, body_checksum)
    if len(text) < length or head != bytes(data[: _HEAD.size]):
        raise DamagedIndexError("the head of the index is damaged: its checksum does not fit")
    return text, _HEAD.unpack(head)[3], body_checksum


def check_version(found: int) -> None:
    """Refuse the format of another release: only a person can say whether its index may be replaced."""
    if found != INDEX_VERSION:
        reads = f"version {found}, this one reads {INDEX_VERSION}"
        message = f"the index was written by another release of headrace ({reads})"
        raise IndexVersionError(f"{message}: upgrade headrace, or index again with force=True (--force)")


def _head(text: bytes, body_checksum: int) -> bytes:
    own = checksum64(_HEAD.pack(INDEX_MAGIC, INDEX_VERSION, len(text), 0, body_checksum), text)
    return _HEAD.pack(INDEX_MAGIC, INDEX_VERSION, len(text), own, body_checksum)


def _arrays(listed: list[list[Any]], body: memoryview) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = 0
    for name, kind, count in listed:
        if kind not in _TYPES or not isinstance(count, int) or count < 0:
            raise DamagedIndexError(f"the index has an array of {count!r} times {kind!r}")
        nbytes = count * np.dtype(kind).itemsize
        if at + nbytes > len(body):
            raise DamagedIndexError(f"the index is cut: the array {name!r} ends past the end of the file")
        arrays[name] = np.frombuffer(body, kind, count, at) if count else np.empty(0, kind)
        at += nbytes + -nbytes % 8
    if at != len(body):
        raise DamagedIndexError(f"the index is cut or longer than it says: {len(body)} bytes of arrays, not {at}")
    return arrays
