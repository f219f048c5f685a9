"""Packs: many small samples in one member of a tar file, after a table of their keys and sizes.

In a member of its own, a small text takes a thousand bytes more, for header and padding. A pack is a plain file to
`tar` and to webdataset, and its samples can be found without an index:

====================  ============================================================================
8 bytes               magic: `89 48 52 4B 0D 0A 1A 0A`
4 bytes               version of the format, 1 (all numbers are little-endian)
4 bytes               length of the table
8 bytes               XXH3 of the other head fields and the table
the table             for each member its size in decimal digits, a space, its name in UTF-8, and a NUL
the data              of all members, in the order of the table, with nothing between, to the end of the pack
====================  ============================================================================

The table holds no offsets, so it cannot describe data that overlap, or lie outside the pack.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule.shards.errors import Damage, DamagedShardError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format.files import Bytes
from headrace.webdatamodule.shards.format.tar import (
    BLOCK,
    NAME,
    PACK_KEY,
    RESERVED,
    Member,
    Samples,
    group,
    is_key,
    skip_reason,
    split_name,
    walk,
)

PACK_MAGIC = b"\x89HRK\r\n\x1a\n"
PACK_VERSION = 1
MOST_BYTES = 1 << 30  # of the data of a pack, which is made in memory
MOST_TABLE = 1 << 20  # bytes of a table; a malicious one takes some 25 times its bytes of memory
# What a pack takes at most beside its table and its data: its header in the tar, its head, an empty table, padding.
OVERHEAD = BLOCK + 128 + BLOCK
_HEAD = struct.Struct("<8sIIQ")
_ENTRY = re.compile(r"([0-9]{1,10}) (.+)", re.DOTALL)
PackedMember = tuple[
    str, int, int
]  # its name, as it would be in a tar file; where its data begin in the pack; its bytes


def read_samples(view: Bytes, *, shard: str = "", split_at: str = "first") -> Samples:
    """The samples of a tar file, those in packs included; for `split_at` see `split_name`."""
    return group(unpacked(view, walk(view, shard=shard), shard=shard), shard=shard, split_at=split_at)


def unpacked(view: Bytes, members: Iterable[Member], *, shard: str = "") -> Iterator[Member]:
    """The members of a tar file, each pack followed by those that it holds, of the kind "packed"."""
    for member in members:
        if not is_pack(member):
            yield member
            continue
        begin = member.offset
        try:
            table = read_table(member.size, lambda first, end, begin=begin: view[begin + first : begin + end])  # type: ignore[misc]
        except ShardError as error:
            error.shard, error.member, error.offset = shard or None, member.name, begin - BLOCK
            raise
        yield member._replace(kind="pack")
        for name, first, size in table:
            yield Member(name, begin + first, size, member.start, "packed")


def is_pack(member: Member) -> bool:
    """Whether a member of a tar file is a pack, by its name."""
    return member.kind == "file" and is_pack_name(member.name)


def is_pack_name(name: str) -> bool:
    """Whether a name is that of a pack."""
    if not name.lower().endswith(f".{PACK_KEY}") or skip_reason(Member(name, 0, 0, 0, "file")):
        return False
    return split_name(name)[1].lower() == PACK_KEY


def read_table(nbytes: int, read: Callable[[int, int], Any]) -> list[PackedMember]:
    """The table of a pack of so many bytes; `read(begin, end)` gives some of them. All of it is checked."""
    head = bytes(read(0, min(_HEAD.size, nbytes)))
    if len(head) < _HEAD.size or head[:8] != PACK_MAGIC:
        raise _damaged(f"it begins with {head[:8]!r}: restore the shard, or rename a member that is no pack")
    _, version, length, _ = _HEAD.unpack(head)
    if version != PACK_VERSION:
        message = f"the pack was written by another release of headrace (version {version}, this one reads"
        raise RefusedMemberError(f"{message} {PACK_VERSION}): upgrade headrace")
    if length > min(MOST_TABLE, nbytes - _HEAD.size):
        raise _damaged(f"its table of {length} bytes does not fit into it, or has more than {MOST_TABLE}")
    text = bytes(read(_HEAD.size, _HEAD.size + length))
    if _head(text) != head:
        raise _damaged("the checksum of its table does not fit: restore the shard")
    try:
        *entries, rest = text.decode().split("\0")
    except UnicodeDecodeError as error:
        raise _damaged("its table is no UTF-8") from error
    members, at = list[PackedMember](), _HEAD.size + length
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None or not _is_name(match[2]):
            raise _damaged(f"its table has the entry {entry[:99]!r}, which is no size and name of a member")
        members.append((match[2], at, int(match[1])))
        at += int(match[1])
    if rest or at != nbytes:
        raise _damaged("the sizes in its table are not those of its data")
    return members


def _is_name(name: str) -> bool:
    """Whether a name is that of a member of a sample, which is no pack."""
    if skip_reason(Member(name, 0, 0, 0, "file")):
        return False
    key, suffix = split_name(name)
    return is_key(key) and suffix != "" and suffix.lower() not in RESERVED


def _damaged(reason: str) -> DamagedShardError:
    return DamagedShardError(Damage.PACK.format(reason=reason))


# Writing


def pack_name(first_key: str) -> bytes:
    """What a pack is called in its tar file: by its first sample, or by the XXH3 of that key where it is too long."""
    name = f"{first_key}.{PACK_KEY}".encode()
    return name if len(name) <= NAME else f"{digest64(first_key.encode()):016x}.{PACK_KEY}".encode()


def pack_head(members: Iterable[tuple[str, int]]) -> bytes:
    """What comes before the data of a pack: head and table. `members` are names and sizes."""
    text = "".join(f"{size} {name}\0" for name, size in members).encode()
    return _head(text) + text


def table_bytes(key: str, members: Iterable[str]) -> int:
    """Bytes that a sample takes in a table, at most: a size has up to 10 digits."""
    return sum(12 + len(f"{key}.{member}".encode("utf-8", "surrogatepass")) for member in members)


def _head(text: bytes) -> bytes:
    own = digest64(_HEAD.pack(PACK_MAGIC, PACK_VERSION, len(text), 0) + text)
    return _HEAD.pack(PACK_MAGIC, PACK_VERSION, len(text), own)
