"""Bytes of a member to an object, by the member's extension. No extension runs code.

webdataset's own ``.decode()`` unpickles and calls ``torch.load``; this module takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass, AllowedClassError
from headrace.webdatamodule.shards.decoding.arrays import Arrays, load_npy, load_npz, load_safetensors
from headrace.webdatamodule.shards.decoding.capped import MAX_BYTES, Room, gunzip, text_bytes
from headrace.webdatamodule.shards.decoding.images import SUFFIXES, load_image
from headrace.webdatamodule.shards.decoding.json_memory import json_bytes
from headrace.webdatamodule.shards.decoding.torch_bytes import load_torch_zip
from headrace.webdatamodule.shards.decoding.unpickler import restricted_loads
from headrace.webdatamodule.shards.errors import DecodeError, ShardError

# Protocol 2, then torch's magic number: what torch.save wrote before it wrote zip files.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_Decoder = Callable[[bytes, Collection[AllowedClass], Room], Any]
# Longer texts are no integers that Python reads.
_DIGITS = 1 << 16
# Shorter JSON is not counted, as its objects take no more than this for each byte.
_MOST_JSON = 64
_REASON = 500


def _text(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> str:
    if 5 * len(data) > room.left:
        room.take(text_bytes(data), "the text takes")
    return data.decode("utf-8")


def _json(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> Any:
    if _MOST_JSON * len(data) > room.left:
        room.take(_json_bytes(data, room), "the objects of this JSON take")
    return json.loads(data)


def _json_bytes(data: bytes, room: Room) -> int:
    encoding = json.detect_encoding(data)
    if encoding in ("utf-8", "utf-8-sig"):
        return json_bytes(data)
    wide = 6 * len(data)  # the text in memory, and in UTF-8
    Room(room.left).take(wide, "this JSON takes")
    return wide + json_bytes(data.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass"))


def _integer(data: bytes, _allowed: Collection[AllowedClass], _room: Room) -> int:
    if len(data) > _DIGITS:
        raise DecodeError(f"{len(data)} bytes are no integer: it may have {_DIGITS}, and Python reads 4300 digits")
    return int(data)


def _pickle(data: bytes, allowed: Collection[AllowedClass], room: Room) -> Any:
    return restricted_loads(data, allowed, room)


def _torch(data: bytes, allowed: Collection[AllowedClass], room: Room) -> Any:
    if data[:4] == b"PK\x03\x04":
        return load_torch_zip(data, allowed, room)
    if data.startswith(_LEGACY_TORCH):
        raise DecodeError(
            "torch.save wrote this in its old format, which is not read; load it with torch where you trust "
            "it and save it again with torch.save of version 1.6 or later"
        )
    return restricted_loads(data, allowed, room)


def _npy(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> np.ndarray[Any, Any]:
    return load_npy(data, room)


def _npz(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> Arrays:
    return load_npz(data, room)


def _safetensors(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> Arrays:
    return load_safetensors(data, room)


def _image(data: bytes, _allowed: Collection[AllowedClass], room: Room) -> np.ndarray[Any, Any]:
    return load_image(data, room)


_DECODERS: dict[str, _Decoder] = {
    **dict.fromkeys(("pyd", "pickle", "pkl"), _pickle),
    **dict.fromkeys(("pt", "pth"), _torch),
    **dict.fromkeys(("txt", "text"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _integer),
    "json": _json,
    "npy": _npy,
    "npz": _npz,
    "safetensors": _safetensors,
    **dict.fromkeys(SUFFIXES, _image),
}


def decode_member(
    key: str, data: bytes, *, allowed_classes: Collection[AllowedClass] = (), max_bytes: int = MAX_BYTES
) -> Any:
    """Decode one member of a sample by its last extension.

    ======================  ==========================================================================
    pyd pickle pkl          :func:`restricted_loads`
    pt pth                  what ``torch.save`` writes, on the CPU; or a bare pickle, as above
    json; txt text          parsed; ``str`` (UTF-8)
    cls cls2 index inx id   ``int``
    npy; npz                array; dict of arrays; never with pickled objects inside
    safetensors             dict of arrays; needs the extra `safetensors`
    png jpg jpeg webp bmp   array of uint8, shape [height, width, channels]; needs the extra `images`
    ppm pgm pbm pnm         the same
    any of these with .gz   decompressed first
    anything else           the bytes as they are (also .gz of anything else)
    ======================  ==========================================================================

    Args:
        key: The member's key inside the sample, such as "tensor.pyd" or "json.gz". Case does not matter.
        data: The member's bytes.
        allowed_classes: Classes or functions that pickles may use; see :func:`restricted_loads`.
        max_bytes: Most bytes that may be held at once: the member's own, what they are unpacked to, and what is made
            of these. Default 2 GiB, enough for arrays and images of half of it, and for pickled ones of a third. Of
            JSON and pickles with millions of small objects, these are counted by what they take at the most.

    Returns:
        The object.

    Raises:
        DecodeError: When the bytes are not what the extension says, or too many, or when the library that reads them
            is not installed; it names the member.
        UnsafePickleError: When a pickle asks for something that is not allowed.
        ValueError: When an entry of allowed_classes is no class, function or name.

    >>> decode_member("meta.json", b'{"a": 1}')
    {'a': 1}
    >>> decode_member("raw", b"12")
    b'12'
    """
    *_, before, last = ("", "", *key.lower().split("."))
    decoder = _DECODERS.get(before if last == "gz" else last)
    if decoder is None:
        return data
    try:
        room = Room(max_bytes)
        room.take(len(data), "the member has")
        return decoder(gunzip(data, room) if last == "gz" else data, allowed_classes, room)
    except ShardError as error:
        error.member = key
        raise
    except AllowedClassError:
        raise
    except Exception as error:  # zipfile, tokenize and numpy raise a dozen kinds for damaged bytes
        message = f"these bytes are no {last}: {type(error).__name__}: {str(error)[:_REASON]}"
        raise DecodeError(message, member=key) from error
