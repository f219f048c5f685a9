"""Tar files: their members, the samples that members form, and fast USTAR headers.

Foreign tar files are read by Python's `tarfile`, which stops without an error at a damaged header: so what follows the
last member has to be the end of the archive, and nothing but zeros. Members become samples by webdataset's rule: the
name up to the first dot is the key, the rest is the member's.
"""

from __future__ import annotations

import re
import struct
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import (
    Damage,
    DamagedShardError,
    GroupingError,
    RefusedMemberError,
    ShardError,
)
from headrace.webdatamodule.shards.format.files import PIECE, Bytes, FileBytes

BLOCK = tarfile.BLOCKSIZE
META = re.compile(r"__[^/]*__($|/)")
PACK_KEY = "hrpack"  # the member key of packs, see `format.pack`
# What to do where names were not meant to be cut at their first dot.
DOTTED_IDS = 'pass split_at="last" if the dots are a part of the ids (--split-at last on the command line)'
_MANY = 16  # members with dots in their keys, in a sample
RESERVED = frozenset(("__key__", "__url__", "__local_path__", PACK_KEY))

# Names and records of honest archives have some hundred bytes; file systems end at some thousand.
MAX_EXTENDED_BYTES = 1 << 16
_MAX_GLOBAL_RECORDS = 1000
_LARGEST = (1 << 63) - 1
_EXTENDED = frozenset((tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE, b"L", b"K"))
_LABEL = b"V"
_Size = TypeVar("_Size", int, npt.NDArray[np.int64])
_KINDS = dict.fromkeys((tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE), "file")
_KINDS |= {tarfile.DIRTYPE: "directory", _LABEL: "label"}
_REFUSED = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    b"D": "a directory listing of an incremental backup",
    b"M": "the rest of a file from another volume",
    b"N": "a list of names of an old GNU tar",
}
_SPARSE_RECORD = re.compile(rb"[0-9] GNU\.sparse\.[a-z]+=")
# tarfile searches for records in time that grows with the square of such a run.
_LONG_NUMBER = re.compile(rb"[0-9]{1000}")


class Member(NamedTuple):
    """One member of a tar file."""

    name: str
    offset: int  # where its data begin, in bytes; its own header stands in the 512 bytes before
    size: int
    start: int  # where the first of its headers begins
    kind: str  # "file", "directory" or "label"; of `unpacked` also "pack", and "packed" inside of one


def walk(data: Bytes, *, shard: str = "") -> Iterator[Member]:
    """Find the members of a tar file in USTAR, GNU, PAX or V7 format; those that are no files have no data."""
    stream = _HeaderStream(data if isinstance(data, FileBytes) else memoryview(data))
    try:
        yield from _members(stream)
    except ShardError as error:
        error.shard = error.shard or shard or None
        error.offset = stream.last if error.offset is None else error.offset
        raise


def padded(size: _Size) -> _Size:
    """The next multiple of 512."""
    return size + -size % BLOCK


class _HeaderStream:
    """What tarfile reads: headers and extended headers, never the data of members."""

    def __init__(self, view: Bytes) -> None:
        self.view, self.last, self._position = view, 0, 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        self._position = position
        return position

    def read(self, size: int) -> bytes:
        if size >= BLOCK:
            self.last = self._position
        data = bytes(self.view[self._position : min(self._position + size, len(self.view))])
        self._position += len(data)
        if size > BLOCK and _LONG_NUMBER.search(data):
            raise RefusedMemberError("an extended header has a number of 1000 digits or more: pack the shard again")
        if _SPARSE_RECORD.search(data):
            raise RefusedMemberError("the member is a sparse file: pack the shard again without --sparse")
        return data


class _Header(tarfile.TarInfo):
    """A header that is checked before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str | None, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)  # type: ignore[arg-type]  # the stub of 3.11 has no None
        if header.size < 0:
            raise DamagedShardError(Damage.NEGATIVE_SIZE.format(size=header.size), member=header.name)
        if header.type in _EXTENDED:
            if header.size > MAX_EXTENDED_BYTES:
                message = f"an extended header has {header.size} bytes, more than the {MAX_EXTENDED_BYTES} that names"
                raise RefusedMemberError(f"{message} and records need")
        elif header.type not in _KINDS:
            what = _REFUSED.get(header.type, f"of the unknown type {header.type!r}")
            message = f"the member is {what}: shards hold plain files only; pack the shard again without it"
            raise RefusedMemberError(message, member=header.name)
        return header


def _members(stream: _HeaderStream) -> Iterator[Member]:
    if not len(stream.view):
        raise DamagedShardError(Damage.EMPTY)
    try:
        file = cast(Any, stream)
        archive = tarfile.TarFile(fileobj=file, tarinfo=_Header, encoding="utf-8", errors="surrogateescape")
        while (header := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # or all of them stay in memory
            if len(archive.pax_headers) > _MAX_GLOBAL_RECORDS:
                raise RefusedMemberError(f"the shard has more than {_MAX_GLOBAL_RECORDS} global extended records")
            yield _checked(header, archive.offset, len(stream.view))
    except tarfile.TarError:
        raise _what_is_wrong(stream.view, stream.last) from None
    except RecursionError:
        raise RefusedMemberError("there are hundreds of extended headers before one member") from None
    except (OverflowError, UnicodeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise DamagedShardError(Damage.UNREADABLE_HEADER.format(reason=reason)) from error
    stream.last = archive.offset
    _check_end(stream.view, archive.offset)


def _checked(header: tarfile.TarInfo, following: int, nbytes: int) -> Member:
    name, kind = header.name, _KINDS[header.type]
    at: dict[str, Any] = {"member": name, "offset": header.offset_data - BLOCK}
    if not name or "\0" in name:
        raise DamagedShardError(Damage.NO_NAME.format(name=name), **at)
    size = header.size if kind == "file" else 0
    if not 0 <= header.size <= _LARGEST:
        raise DamagedShardError(Damage.EXTENDED_SIZE, **at)
    if header.offset_data + padded(size) > nbytes:
        left = nbytes - header.offset_data
        message = Damage.CUT_DATA if left < size else Damage.CUT_PADDING
        raise DamagedShardError(message.format(size=size, left=left), **at)
    if following < header.offset_data + padded(size):
        raise RefusedMemberError("a global extended header changes the member's size: pack the shard again", **at)
    return Member(name, header.offset_data, size, header.offset, kind)


def _check_end(view: Bytes, at: int) -> None:
    end = bytes(view[at : min(at + 2 * BLOCK, len(view))])
    if (len(end) >= BLOCK and end[:BLOCK].count(0) < BLOCK) or 0 < len(end) < BLOCK:
        raise _what_is_wrong(view, at)
    if len(end) < 2 * BLOCK:
        raise DamagedShardError(Damage.CUT_END)
    for begin in range(at, len(view), PIECE):
        piece = bytes(view[begin : min(begin + PIECE, len(view))])
        if piece.count(0) != len(piece):
            where = begin + len(piece) - len(piece.lstrip(b"\0"))
            raise DamagedShardError(Damage.BEHIND_END.format(offset=where))
    if len(view) % BLOCK:
        raise DamagedShardError(Damage.CUT_BLOCK.format(nbytes=len(view), block=BLOCK))


def _what_is_wrong(view: Bytes, at: int) -> DamagedShardError:
    block = bytes(view[at : min(at + BLOCK, len(view))])
    if compressed := compression(block):
        return DamagedShardError(Damage.COMPRESSED.format(program=compressed))
    if len(view) < BLOCK:
        return DamagedShardError(Damage.NO_TAR.format(nbytes=len(view), begin=block[:24]))
    if len(block) < BLOCK and block:
        return DamagedShardError(Damage.CUT_HEADER.format(left=len(block), whole=BLOCK))
    if not block.strip(b"\0"):
        return DamagedShardError(Damage.CUT_BEHIND_EXTENDED)
    if block[257:262] == b"ustar":
        return DamagedShardError(Damage.HEADER)
    return DamagedShardError(Damage.NO_HEADER.format(begin=block[:24]))


# How compressed files begin, by the program that makes and unpacks them.
_COMPRESSED = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
_COMPRESSED_NAMES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst")


def compression(begin: bytes) -> str:
    """The program that compressed a file, by its first bytes; empty for others, and for tar files."""
    if begin[257:262] == b"ustar":
        return ""
    return next((program for program, magic in _COMPRESSED.items() if begin.startswith(magic)), "")


def is_compressed_name(name: str) -> bool:
    """Whether a name is that of a compressed tar file."""
    return name.lower().endswith(_COMPRESSED_NAMES)


def compressed_beside(folder: Path) -> str:
    """What to say, after another message, of a directory that holds compressed tar files; empty for others."""
    names = sorted(path.name for path in folder.iterdir() if is_compressed_name(path.name)) if folder.is_dir() else []
    return f", only {len(names)} compressed ones such as {names[0]}: decompress them first" if names else ""


class SkippedMember(NamedTuple):
    """A member that is no part of a sample."""

    name: str
    offset: int
    reason: str  # "directory", "label", "no extension", "hidden" or "meta"


@dataclass
class Samples:
    """The samples of a shard."""

    keys: list[str] = field(default_factory=list)
    layouts: dict[tuple[str, ...], int] = field(default_factory=dict)  # member keys, as written, and their number
    layout_of: list[int] = field(default_factory=list)  # of each sample
    offsets: list[int] = field(default_factory=list)  # of each member's data, those of all samples in a row
    sizes: list[int] = field(default_factory=list)
    skipped: list[SkippedMember] = field(default_factory=list)
    end: int = 0  # of the last member's blocks
    packs: int = 0
    split_at: str = "first"  # or "last": the dot of a name where the member's key begins, see `split_name`


def group(members: Iterable[Member], *, shard: str = "", split_at: str = "first") -> Samples:
    """Put members together that belong to one sample.

    As webdataset does, names without an extension and names whose first part begins and ends with two
    underscores are skipped; so are hidden files, which it would take for members of a sample "folder/".
    """
    samples, seen = Samples(split_at=split_at), set[str]()
    current, kind, suffixes = None, "", list[str]()
    for member in members:
        if member.kind != "packed":
            samples.end = member.offset + padded(member.size)
        if member.kind == "pack":  # its members follow, and are of another kind than those before
            samples.packs += 1
            continue
        reason = skip_reason(member)
        if reason:
            samples.skipped.append(SkippedMember(member.name, member.offset, reason))
            continue
        key, suffix = split_name(member.name, "first" if member.kind == "packed" else split_at)
        if key != current or member.kind != kind:
            if key in seen:
                raise _repeated(key, suffix, member, shard)
            _close(samples, suffixes, shard)
            seen.add(key)
            samples.keys.append(key)
            current, kind, suffixes = key, member.kind, []
        suffixes.append(suffix)
        samples.offsets.append(member.offset)
        samples.sizes.append(member.size)
    _close(samples, suffixes, shard)
    return samples


def _repeated(key: str, suffix: str, member: Member, shard: str) -> GroupingError:
    if member.kind == "packed":
        message, offset = "the sample of this pack is in the shard before it, too: make keys unique", member.offset
    else:
        message = "members of other samples lie between those of this one: put them next to one another"
        message += f", or {DOTTED_IDS}" if "." in suffix else ""
        offset = member.offset - BLOCK
    return GroupingError(message, shard=shard, sample=key, member=member.name, offset=offset)


def skip_reason(member: Member) -> str:
    """Why a member is no part of a sample; empty when it is one."""
    if member.kind == "packed":
        return ""
    if member.kind != "file":
        return member.kind
    begin = member.name.rfind("/") + 1
    dot = member.name.find(".", begin)
    if dot <= begin:
        return "hidden" if dot == begin else "no extension"
    return "meta" if member.name.startswith("__") and META.match(member.name) else ""


def split_name(name: str, split_at: str = "first") -> tuple[str, str]:
    """The sample's key and the member's, cut at the first or the last dot of the last part of the path."""
    begin = name.rfind("/") + 1
    dot = name.index(".", begin) if split_at == "first" else name.rindex(".", begin)
    return name[:dot], name[dot + 1 :]


def few_samples(what: str, dotted: int, samples: int, name: str) -> str:
    """What to say of `dotted` members with dots in their keys, `name` among them, in so few samples; empty for others.

    A sample with many members is no fault; but ids with dots, cut at the first one, make a few samples of all files.
    """
    if dotted < _MANY * samples:
        return ""
    few = f"{dotted:,} {what} make only {samples:,} samples, as names such as {name!r} are cut at their first dot"
    return f"{few}: {DOTTED_IDS}"


def is_key(text: str) -> bool:
    """Whether readers give a sample's key back as it is: they cut names at the first dot, and skip some of them."""
    return not (not text or "." in text or "\0" in text or text.startswith(("/", "__")) or text.endswith("/"))


def _close(samples: Samples, suffixes: list[str], shard: str) -> None:
    if not suffixes:
        return
    layout = tuple(suffixes)
    if layout not in samples.layouts:
        _check_layout(samples, layout, shard)
    samples.layout_of.append(samples.layouts.setdefault(layout, len(samples.layouts)))


def _check_layout(samples: Samples, layout: tuple[str, ...], shard: str) -> None:
    folded: set[str] = set()
    for suffix, offset in zip(layout, samples.offsets[-len(layout) :], strict=True):
        key, lower = samples.keys[-1], suffix.lower()
        if lower in folded or lower in RESERVED:
            message = "the sample has two members of this key, case aside: rename or remove one"
            message = message if lower in folded else "the member has a key that readers use for themselves: rename it"
            raise GroupingError(message, shard=shard, sample=key, member=f"{key}.{suffix}", offset=offset - BLOCK)
        folded.add(lower)


# USTAR headers: many at once, which takes a small part of tarfile's time, and the same bytes on every version of Python

NAME, PREFIX = 100, 155
MOST_MEMBER_BYTES = 0o77777777777
RECORD = 20 * BLOCK
PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]

# Name; mode, user, group; size, which is filled in; time; checksum; type, link, magic, names of both, device, prefix.
_FIELDS = [bytes(NAME), b"0000644\0", b"0000000\0" * 2, bytes(12), b"00000000000\0", b"      \0 "]
_HEADER = b"".join([*_FIELDS, b"0", bytes(100), b"ustar\00000", bytes(80 + PREFIX + 12)])
_REST = sum(_HEADER) + ord(" ")  # of the checksum, which counts itself as spaces
_NAME, _SIZE, _CHECKSUM, _PREFIX = (0, NAME), (124, 135), (148, 154), (345, 345 + PREFIX)


def ustar_headers(names: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    """USTAR headers of plain files: 512 bytes each, which depend on the arguments only; the names are such that fit."""
    parts = {_SIZE: _octal(np.array(sizes, np.int64), 11)}
    if len(max(names, key=len)) > NAME:
        cuts = [_cut(name) if len(name) > NAME else 0 for name in names]
        parts[_PREFIX] = _texts([name[:cut] for name, cut in zip(names, cuts, strict=True)], PREFIX)
        names = [name[cut + 1 :] if cut else name for name, cut in zip(names, cuts, strict=True)]
    parts[_NAME] = _texts(names, NAME)
    sums = np.full(len(names), _REST)
    table = np.empty((len(names), BLOCK), np.uint8)
    table[:] = np.frombuffer(_HEADER, np.uint8)
    for where, part in parts.items():
        table[:, slice(*where)] = part
        sums += part.sum(axis=1, dtype=np.int64)
    table[:, slice(*_CHECKSUM)] = _octal(sums, 6)
    return [header for (header,) in struct.iter_unpack(f"{BLOCK}s", table.tobytes())]


def fits_header(name: bytes) -> bool:
    """Whether a header holds a name: 100 bytes, or a path that is cut at a slash."""
    return len(name) <= NAME or _cut(name) > 0


def _cut(path: bytes) -> int:
    """The slash at which a path of more than 100 bytes is cut; 0 for none."""
    cut = path.find(b"/", max(0, len(path) - NAME - 1))
    return cut if 0 < cut <= PREFIX else 0


def _texts(texts: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    return np.array(texts, f"S{width}").view(np.uint8).reshape(len(texts), width)


def _octal(numbers: npt.NDArray[np.int64], digits: int) -> npt.NDArray[np.uint8]:
    return (numbers[:, None] >> np.arange(3 * digits - 3, -1, -3) & 7 | ord("0")).astype(np.uint8)


def tar_end(nbytes: int) -> bytes:
    """What ends a tar file: two blocks of zeros, and more up to a multiple of 10240 bytes, as tar does."""
    return bytes(2 * BLOCK + -(nbytes + 2 * BLOCK) % RECORD)
