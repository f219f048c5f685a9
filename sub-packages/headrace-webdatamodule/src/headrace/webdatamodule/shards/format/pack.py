"""Packs: many small samples in one member of a tar file, after a table of their keys and sizes.

In a member of its own, a small text takes a thousand bytes more, for header and padding. A pack is a plain file to
`tar` and to webdataset, and its samples can be found without an index:

====================  ============================================================================
8 bytes               magic: `89 48 52 4B 0D 0A 1A 0A`
4 bytes               version of the format, 1 (all numbers are little-endian)
4 bytes               length of the table
8 bytes               XXH3 of the other head fields and the table
the table             JSON: {"layouts", "layout_of", "keys", "sizes"}
the data              of all members, in the order of the table, with nothing between, to the end of the pack
====================  ============================================================================

`layouts` are the distinct lists of member keys, `layout_of` the number of each sample's layout, `keys` those of the
samples, and `sizes` the bytes of each member, those of all samples in a row. The table holds no offsets, so it cannot
describe data that overlap, or lie outside the pack.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from json.encoder import encode_basestring
from typing import Any, NamedTuple

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
MAX_TABLE_BYTES = 1 << 22  # four times what we write; malicious JSON takes 21 times its bytes of memory
MOST_BYTES = 1 << 30  # of the data of a pack, which is made in memory
MOST_TABLE = 1 << 20  # bytes of a table that we write, as `table_bytes` counts them
# What a pack takes at most beside its table and its data: its header in the tar, its head, an empty table, padding.
OVERHEAD = BLOCK + 128 + BLOCK
_HEAD = struct.Struct("<8sIIQ")
_FIELDS = ["layouts", "layout_of", "keys", "sizes"]
_MEMBER = re.compile(r"[^/\0]+")


class Table(NamedTuple):
    """What a pack holds."""

    names: list[str]  # of the members, as they would be in a tar file
    begins: list[int]  # where their data begin in the pack, in bytes
    sizes: list[int]


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
        for name, first, size in zip(*table, strict=True):
            yield Member(name, begin + first, size, member.start, "packed")


def is_pack(member: Member) -> bool:
    """Whether a member of a tar file is a pack, by its name."""
    return member.kind == "file" and is_pack_name(member.name)


def is_pack_name(name: str) -> bool:
    """Whether a name is that of a pack."""
    if not name.lower().endswith(f".{PACK_KEY}") or skip_reason(Member(name, 0, 0, 0, "file")):
        return False
    return split_name(name)[1].lower() == PACK_KEY


def unpack(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and data of the members of a pack that is in memory, for readers without an index."""
    try:
        table = read_table(len(data), lambda begin, end: data[begin:end])
    except ShardError as error:
        error.member = name
        raise
    return ((name, data[begin : begin + size]) for name, begin, size in zip(*table, strict=True))


def read_table(nbytes: int, read: Callable[[int, int], Any]) -> Table:
    """The table of a pack of so many bytes; `read(begin, end)` gives some of them. All of it is checked."""
    head = bytes(read(0, min(_HEAD.size, nbytes)))
    if len(head) < _HEAD.size or head[:8] != PACK_MAGIC:
        raise _damaged(f"it begins with {head[:8]!r}: restore the shard, or rename a member that is no pack")
    _, version, length, _ = _HEAD.unpack(head)
    if version != PACK_VERSION:
        message = f"the pack was written by another release of headrace (version {version}, this one reads"
        raise RefusedMemberError(f"{message} {PACK_VERSION}): upgrade headrace")
    if length > min(MAX_TABLE_BYTES, nbytes - _HEAD.size):
        raise _damaged(f"its table of {length} bytes does not fit into it, or has more than {MAX_TABLE_BYTES}")
    text = bytes(read(_HEAD.size, _HEAD.size + length))
    if _head(text) != head:
        raise _damaged("the checksum of its table does not fit: restore the shard")
    begin = _HEAD.size + length
    names, sizes = _checked(text, nbytes - begin)
    return Table(names, list(accumulate(sizes[:-1], initial=begin)), sizes)


def _checked(text: bytes, data_bytes: int) -> tuple[list[str], list[int]]:
    """Names and sizes of the members, from a table whose checksum fits, but which may be malicious."""
    try:
        pairs = json.loads(text.decode(), object_pairs_hook=list)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _damaged(f"its table is no JSON in UTF-8 ({type(error).__name__})") from error
    is_object = isinstance(pairs, list) and all(type(pair) is tuple for pair in pairs)
    if not is_object or [name for name, _ in pairs] != _FIELDS:
        raise _damaged(f"its table is no object of {', '.join(_FIELDS)}, in this order")
    layouts, layout_of, keys, sizes = (value for _, value in pairs)
    if not (_all(list, layouts) and _all(int, layout_of) and _all(str, keys) and _all(int, sizes)):
        raise _damaged("its table has something else than lists of integers and texts")
    for layout in layouts:
        if not layout or not _all(str, layout) or not all(map(_MEMBER.fullmatch, layout)):
            raise _damaged("a sample in its table has no members, or one without a name")
        folded = {suffix.lower() for suffix in layout}
        if len(folded) < len(layout) or folded & RESERVED:
            raise _damaged("a sample in its table has two members of one key, or a reserved one")
    if not keys or len(layout_of) != len(keys) or not all(0 <= number < len(layouts) for number in layout_of):
        raise _damaged("its table has no samples, or some without a layout")
    if len(set(keys)) < len(keys) or not all(map(is_key, keys)):
        raise _damaged("a key in its table occurs twice, or cannot be that of a sample")
    if sum(len(layouts[number]) for number in layout_of) != len(sizes):
        raise _damaged("its table has not one size for each member")
    if min(sizes) < 0 or sum(sizes) != data_bytes:
        raise _damaged(f"the sizes in its table are not those of its {data_bytes} bytes of data")
    names = [f"{key}.{suffix}" for key, number in zip(keys, layout_of, strict=True) for suffix in layouts[number]]
    try:
        "".join(names).encode()
    except UnicodeEncodeError as error:
        raise _damaged("a name in its table cannot be written as UTF-8") from error
    return names, sizes


def _all(kind: type, values: object) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)


def _damaged(reason: str) -> DamagedShardError:
    return DamagedShardError(Damage.PACK.format(reason=reason))


# Writing


def pack_name(first_key: str) -> bytes:
    """What a pack is called in its tar file: by its first sample, or by the XXH3 of that key where it is too long."""
    name = f"{first_key}.{PACK_KEY}".encode()
    return name if len(name) <= NAME else f"{digest64(first_key.encode()):016x}.{PACK_KEY}".encode()


def pack_head(samples: Sequence[tuple[str, Sequence[str], Sequence[int]]]) -> bytes:
    """What comes before the data of a pack: head and table. `samples` are keys, member keys and their sizes."""
    layouts: dict[tuple[str, ...], int] = {}
    layout_of = [layouts.setdefault(tuple(members), len(layouts)) for _, members, _ in samples]
    sizes = [size for _, _, some in samples for size in some]
    values = [list(layouts), layout_of, [key for key, _, _ in samples], sizes]
    table = dict(zip(_FIELDS, values, strict=True))
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    return _head(text) + text


def table_bytes(key: str, members: tuple[str, ...]) -> int:
    """Bytes that a sample takes in a table, at most: its key, its layout and its sizes, with what separates them."""
    return _text_bytes(key) + _layout_bytes(members)


@lru_cache(maxsize=4096)
def _layout_bytes(members: tuple[str, ...]) -> int:
    return sum(_text_bytes(name) + 13 for name in members) + 12  # a size has up to 10 digits


def _text_bytes(text: str) -> int:
    return len(encode_basestring(text).encode("utf-8", "surrogatepass"))  # who writes it refuses what is no UTF-8


def _head(text: bytes) -> bytes:
    own = digest64(_HEAD.pack(PACK_MAGIC, PACK_VERSION, len(text), 0) + text)
    return _HEAD.pack(PACK_MAGIC, PACK_VERSION, len(text), own)
