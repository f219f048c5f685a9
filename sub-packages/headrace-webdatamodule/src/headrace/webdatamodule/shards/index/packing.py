"""The bytes of an index file: a head, a description in JSON and numpy arrays, each with a checksum over it.

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

from headrace.webdatamodule.shards.errors import DamagedIndexError, ShardError
from headrace.webdatamodule.shards.index.checksums import checksum64

MAGIC = b"\x89HRI\r\n\x1a\n"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
MOST_DESCRIBED = 1 << 24  # bytes; a hundred thousand samples of which no two have the same members need some MiB
_TYPES = ("|u1", "<u2", "<u4", "<u8")


class Unpacked(NamedTuple):
    """What an index file holds.

    Args:
        description: The JSON object, less the list of arrays.
        arrays: Views into the file, not copies.
        checksum: Of the head; it covers the checksum of the arrays, and so stands for the whole file.
        body: The bytes behind the description.
        body_checksum: What their checksum has to be.
    """

    description: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]
    checksum: int
    body: memoryview
    body_checksum: int


def pack(description: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Make the bytes of an index file.

    Args:
        description: What JSON can hold.
        arrays: Unsigned integers, one-dimensional.

    Returns:
        The bytes; the same for the same content.

    Raises:
        ShardError: The description is longer than 16 MiB.

    >>> unpack(memoryview(pack({"a": 1}, {"x": np.arange(3, dtype=np.uint16)}))).arrays["x"].tolist()
    [0, 1, 2]
    """
    plain = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    listed = [[name, array.dtype.str, array.size] for name, array in plain.items()]
    text = json.dumps({**description, "arrays": listed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_DESCRIBED:
        message = f"the names of members take {len(text)} bytes in the index, more than the {MOST_DESCRIBED} allowed"
        raise ShardError(f"{message}: name members alike in all samples, or make smaller shards")
    body = b"".join(array.tobytes() + bytes(-array.nbytes % 8) for array in plain.values())
    return _head(text, checksum64(body)) + text + body


def unpack(data: memoryview) -> Unpacked:
    """Take an index file apart, without touching the arrays.

    Args:
        data: The bytes, or a memory map of them.

    Returns:
        Its parts; head and description are checked, the arrays' bytes are not.

    Raises:
        DamagedIndexError: The bytes are cut, changed, of another version or of something else.
    """
    if len(data) < _HEAD.size or bytes(data[:8]) != MAGIC:
        raise DamagedIndexError(f"this is no index: it begins with {bytes(data[:16])!r}; index the shard again")
    _, version, length, _, body_checksum = _HEAD.unpack(data[: _HEAD.size])
    if version != VERSION:
        raise DamagedIndexError(f"the index has version {version}, this release reads version {VERSION}")
    if length > MOST_DESCRIBED:
        message = f"the index has a description of {length} bytes, more than the {MOST_DESCRIBED} allowed"
        raise DamagedIndexError(f"{message}: index the shard again")
    text = bytes(data[_HEAD.size : _HEAD.size + length])
    head = _head(text, body_checksum)
    if len(text) < length or head != bytes(data[: _HEAD.size]):
        raise DamagedIndexError("the head of the index is damaged: its checksum does not fit")
    body = data[_HEAD.size + length :]
    description = json.loads(text)
    arrays = _arrays(description.pop("arrays"), body)
    return Unpacked(description, arrays, _HEAD.unpack(head)[3], body, body_checksum)


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
