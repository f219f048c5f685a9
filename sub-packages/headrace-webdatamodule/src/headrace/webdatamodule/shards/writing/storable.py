"""What a sample may consist of, so that readers of tar shards give it back as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import RESERVED


def check_key(key: str, *, shard: str | None = None) -> bytes:
    r"""Refuse a sample key that readers of tar shards would not give back as it is.

    Args:
        key: The sample's key. Readers cut a member's name at its first dot, and skip names that begin
            with two underscores.
        shard: Named in the error.

    Returns:
        The key in UTF-8.

    Raises:
        ShardError: The key is empty, holds a dot or a NUL, is an absolute path, begins with "__", or is no UTF-8.

    >>> check_key("ü/1")
    b'\xc3\xbc/1'
    """
    if not key or "." in key or "\0" in key or key.startswith(("/", "__")) or key.endswith("/"):
        message = f"the sample key {key!r} cannot be stored: give a text without dots, not empty,"
        raise ShardError(f"{message} not beginning with '/' or '__', not ending with '/'", shard=shard)
    return _encoded(key, key, shard)


def member_endings(suffixes: Iterable[object], *, sample: str, shard: str) -> list[bytes]:
    """What follows the sample's key in the names of its members, checked.

    Args:
        suffixes: The member keys of one sample.
        sample: The sample's key, named in errors.
        shard: Named in errors.

    Returns:
        A dot and the member's key in UTF-8, for each.

    Raises:
        ShardError: Names that readers would skip, split elsewhere or take for one or for their own; or there are none.

    >>> member_endings(["txt", "seg.png"], sample="a", shard="a-000000.tar")
    [b'.txt', b'.seg.png']
    """
    endings: dict[str, bytes] = {}  # readers fold the case of member keys
    for suffix in suffixes:
        if not isinstance(suffix, str) or not re.fullmatch(r"[^/\0]+", suffix) or suffix.lower() in endings:
            allowed = "a text without '/', unlike the sample's other member keys even in lower case"
            raise ShardError(f"the member key {suffix!r} cannot be stored: give {allowed}", shard=shard, sample=sample)
        if suffix.lower() in RESERVED:
            message = "the member has a key that readers use for themselves: rename it"
            raise ShardError(message, shard=shard, sample=sample, member=f"{sample}.{suffix}")
        endings[suffix.lower()] = _encoded(f".{suffix}", sample, shard)
    if not endings:
        raise ShardError("the sample has no members: give at least one", shard=shard, sample=sample)
    return list(endings.values())


def member_bytes(data: object, *, sample: str, member: str, shard: str | None = None) -> bytes:
    r"""The bytes of a member.

    Args:
        data: Bytes, a bytearray, or a memory view of anything.
        sample: The sample's key, named in errors.
        member: The member's name, named in errors.
        shard: Named in errors.

    Raises:
        ShardError: It is something else; the error says how to make bytes of it.

    >>> member_bytes(memoryview(np.arange(2, dtype="<i2")), sample="a", member="a.bin")
    b'\x00\x00\x01\x00'
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    message = f"a member must be bytes, got {type(data).__name__}: {_how_to_encode(data)}"
    raise ShardError(message, shard=shard, sample=sample, member=member)


def _how_to_encode(data: object) -> str:
    if isinstance(data, str):
        return "encode it, such as with text.encode()"
    if isinstance(data, np.ndarray | np.generic):
        cure = "numpy.save it into an io.BytesIO as a member 'npy' and give its getvalue()"
        return f"{cure}, or use safetensors.numpy.save for a member 'safetensors'"
    if type(data).__module__.partition(".")[0] == "torch":
        return "use safetensors.torch.save for a member 'safetensors', or torch.save it into an io.BytesIO as a 'pt'"
    return "encode it, such as with json.dumps(value).encode() for a member 'json'"


def _encoded(text: str, sample: str, shard: str | None) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ShardError(f"{text!r} cannot be written as UTF-8: {error.reason}", shard=shard, sample=sample) from error
