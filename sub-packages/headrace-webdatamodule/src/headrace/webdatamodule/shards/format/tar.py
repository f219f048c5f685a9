"""Tar files: their headers, their members, the samples that members form, and the fast USTAR writer.

Members become samples by webdataset's rule: the name up to the first dot is the key, the rest is the member's.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import DamagedShardError, GroupingError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format.files import Bytes, FileBytes

BLOCK = 512
FILES = frozenset((b"0", b"\0", b"7"))
DIRECTORY, LABEL = b"5", b"V"
LONG_NAME, LONG_LINK, GLOBAL = b"L", b"K", b"g"
PAX = frozenset((b"x", b"X"))
EXTENSIONS = PAX | {LONG_NAME, LONG_LINK, GLOBAL}
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"D": "a directory listing of an incremental backup",
    b"M": "the rest of a file from another volume",
    b"N": "a list of names of an old GNU tar",
    b"S": "a sparse file",
}
# name, size, checksum, kind, magic, prefix
_FIELDS = struct.Struct("100s 24x 12s 12x 8s c 100x 6s 82x 155s 12x")


class Header(NamedTuple):
    """What a header says.

    Args:
        name: Path of the member.
        size: Bytes of data that follow.
        kind: Its type flag.
    """

    name: str
    size: int
    kind: bytes


def parse_header(block: bytes) -> Header:
    """Read one header: of USTAR, GNU, PAX or the old V7 format.

    Args:
        block: 512 bytes.

    Returns:
        Name, size and kind; what extended headers say before it is not looked at.

    Raises:
        DamagedShardError: The header's checksum does not fit, or a number is none.

    >>> import tarfile
    >>> header = tarfile.TarInfo("a/b.txt")
    >>> header.size = 8
    >>> parse_header(header.tobuf(tarfile.USTAR_FORMAT))
    Header(name='a/b.txt', size=8, kind=b'0')
    """
    name, size, promised, kind, magic, prefix = _FIELDS.unpack(block)
    if header_sum(block) != _octal(promised) and _signed_sum(block) != _octal(promised):
        raise DamagedShardError(_what_it_is(block))
    path = text(name)
    if prefix[0] and magic == b"ustar\0":  # GNU tar has times in this place
        path = f"{text(prefix)}/{path}"
    if kind == b"\0" and path.endswith("/"):  # so the V7 format marked directories
        kind = DIRECTORY
    # The size of directories and labels says nothing about data that follow.
    return Header(path, 0 if kind in (DIRECTORY, LABEL) else parse_number(size), kind)


def refuse_kind(kind: bytes) -> None:
    """Raise a RefusedMemberError unless the kind is a file, a directory or a volume label."""
    if kind not in FILES and kind not in (DIRECTORY, LABEL):
        what = _REFUSED.get(kind, f"of the unknown type {kind!r}")
        raise RefusedMemberError(f"the member is {what}: shards hold plain files only; pack the shard again without it")


def header_sum(block: bytes) -> int:
    """The sum of a header's bytes, those of the checksum field counted as spaces.

    >>> header_sum(bytes(512))
    256
    """
    # The low half of Adler-32 is a plain sum, modulo 65521, which 256 bytes do not reach.
    parts = block[:148], block[156:412], block[412:]
    return 256 + sum(zlib.adler32(part, 0) & 0xFFFF for part in parts)


def _signed_sum(block: bytes) -> int:
    # Some old writers added signed characters.
    return header_sum(block) - 256 * sum(byte > 127 for byte in block[:148] + block[156:])


def text(field: bytes) -> str:
    r"""A text field: what stands before the first NUL. Bytes that are no UTF-8 become surrogates, as in tarfile.

    >>> text(b"abc\0\0")
    'abc'
    """
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def parse_number(field: bytes) -> int:
    r"""A number field: octal digits, or the base-256 form of GNU tar for large numbers.

    Args:
        field: The bytes; the first bit marks base 256, the second one a negative number.

    Raises:
        DamagedShardError: It is negative or no number.

    >>> parse_number(b"0000017 \0"), parse_number(b"\x80\0\0\x01\0")
    (15, 256)
    """
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise DamagedShardError(f"the header has a negative size, {field!r}")
        return int.from_bytes(field, "big") - (0x80 << 8 * (len(field) - 1))
    number = _octal(field)
    if number is None:
        raise DamagedShardError(f"the header has a size that is no number, {field!r}")
    return number


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\0")[0].strip(b" ") or b"0"
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def _what_it_is(block: bytes) -> str:
    if block[257:262] == b"ustar":
        return "the header is damaged: its checksum does not fit"
    if block.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "this is compressed: unpack it to a plain tar file first"
    return f"here is no tar header, but {block[:24]!r}"


_READ = ("path", "size")
_DIGITS = 20


def parse_pax(data: bytes) -> dict[str, str]:
    r"""Read the records "length key=value" and a newline each.

    Args:
        data: The data of an extended header.

    Returns:
        The records that change what is read: `path` and `size`. An empty value takes back an earlier one.

    Raises:
        DamagedShardError: The records do not fill the data, or one of them has another form.
        RefusedMemberError: They describe a sparse file.

    >>> parse_pax(b"14 path=a.txt\n19 mtime=12345.678\n")
    {'path': 'a.txt'}
    """
    found: dict[str, str] = {}
    at, end = 0, len(data.rstrip(b"\0"))  # some writers fill up with NULs
    while at < end:
        key, value, at = _record(data, at)
        if key.startswith("GNU.sparse."):
            raise RefusedMemberError("the member is a sparse file: pack the shard again without --sparse")
        if key in _READ:
            found[key] = value
    return found


def pax_size(records: Mapping[str, str], otherwise: int) -> int:
    """The size that the records give a member.

    Args:
        records: Of `parse_pax`.
        otherwise: What the member's own header says.

    Raises:
        DamagedShardError: It is no number, or negative.
    """
    size = records.get("size") or str(otherwise)
    if not (size.isascii() and size.isdecimal() and len(size) <= _DIGITS):
        raise DamagedShardError(f"the extended header has a size that is no number or negative, {size!r}")
    return int(size)


def _record(data: bytes, at: int) -> tuple[str, str, int]:
    space = data.find(b" ", at, at + _DIGITS)
    digits = data[at:space] if space > at else b""
    end = at + int(digits) if digits.isdigit() else 0
    equals = data.find(b"=", space + 1, end)
    if not (space < equals < end <= len(data) and data[end - 1] == 0x0A):
        raise DamagedShardError(f"the extended header is damaged: here is no record, but {data[at : at + 24]!r}")
    key, value = data[space + 1 : equals], data[equals + 1 : end - 1]
    return key.decode("utf-8", "replace"), value.decode("utf-8", "surrogateescape"), end


Records = Mapping[str, str]


class Extended(NamedTuple):
    """One extended header.

    Args:
        records: The path or size that it gives the next member.
        inherited: What global headers had said before it; None for a long name of GNU tar, which heeds none.
    """

    records: Records
    inherited: Records | None


def settle(inherited: Records, latest: Records, own: Sequence[Extended]) -> Records:
    """What holds for a member.

    GNU tar heeds the last header of each kind, and a PAX one more than a global one more than a long name. Python's
    `tarfile` heeds the first header, and all global ones. Where they differ, one shard would be two.

    Args:
        inherited: What all global headers said so far.
        latest: What the last of them said.
        own: The extended headers before the member, in order.

    Returns:
        Its path and size, where they say them.

    Raises:
        RefusedMemberError: GNU tar and `tarfile` read different ones.

    >>> settle({}, {}, [Extended({"path": "a"}, {}), Extended({"path": "b"}, None)])
    {'path': 'a'}
    """
    if len(own) == 1 and not inherited:
        return own[0].records
    gnu, python = _as_gnu_tar(latest, own), _as_tarfile(inherited, own)
    for name in ("path", "size"):
        if gnu.get(name) != python.get(name):
            told = f"the {name} {gnu.get(name)!r} for GNU tar, and {python.get(name)!r} for Python"
            raise RefusedMemberError(f"several extended headers give the member {told}; pack the shard again")
    return gnu


def _as_gnu_tar(latest: Records, own: Sequence[Extended]) -> Records:
    names = [one.records for one in own if one.inherited is None]
    records = [one.records for one in own if one.inherited is not None]
    return {**(names[-1] if names else {}), **latest, **(records[-1] if records else {})}


def _as_tarfile(inherited: Records, own: Sequence[Extended]) -> Records:
    made = dict(inherited)
    for one in reversed(own):
        made |= {**(one.inherited or {}), **one.records}
    return made


_ZEROS = bytes(BLOCK)
_CHUNK = 1 << 20
MOST_HEADERS = 16
MOST_EXTENDED = 1 << 20  # bytes of a long name or of extended records; file systems end at some thousand


class Member(NamedTuple):
    """One member of a tar file.

    Args:
        name: Its path.
        offset: Where its data begin, in bytes; its own header stands in the 512 bytes before.
        size: Bytes of data.
        start: Where the first of its headers begins.
        kind: "file", "directory" or "label".
    """

    name: str
    offset: int
    size: int
    start: int
    kind: str


def walk(data: Bytes, *, shard: str = "") -> Iterator[Member]:
    """Find the members of a tar file in USTAR, GNU, PAX or V7 format.

    Args:
        data: The bytes of the file, a memory map, or an open file.
        shard: Path or URL, named in errors.

    Yields:
        Each member, in order. Those that are no files have no data.

    Raises:
        DamagedShardError: The file is empty, cut, changed, no tar file, or has something behind its end.
        RefusedMemberError: A member is a link, a device, sparse, or of an unknown kind.
    """
    view, at = data if isinstance(data, FileBytes) else memoryview(data), 0
    walker = _Walker(view)
    try:
        while (member := walker.member(at)) is not None:
            yield member
            at = padded(member.offset + member.size)
    except ShardError as error:
        error.shard, error.offset = shard or None, walker.at
        error.member = walker.name
        raise


def padded(size: int) -> int:
    """The next multiple of 512.

    >>> padded(0), padded(1), padded(512)
    (0, 512, 512)
    """
    return size + -size % BLOCK


class _Walker:
    """Remembers where it stands, for errors, and what global headers said."""

    def __init__(self, view: Bytes) -> None:
        self.view = view
        self.at = 0
        self.name: str | None = None
        self.inherited: dict[str, str] = {}  # of all global headers
        self.latest: dict[str, str] = {}  # of the last one

    def member(self, start: int) -> Member | None:
        """The member whose headers begin here; None at the end of the archive, which is checked."""
        self.at, self.name = start, None
        own: list[Extended] = []
        while (header := self._header(extended=self.at > start)) is not None:
            if header.kind not in EXTENSIONS:
                said = settle(self.inherited, self.latest, own) if own or self.inherited else self.inherited
                return self._finished(header, said, start)
            own += self._extension(header)
            if len(own) > MOST_HEADERS:
                raise RefusedMemberError(f"there are more than {MOST_HEADERS} extended headers before one member")
            self.at += BLOCK + padded(header.size)
        return None

    def _header(self, *, extended: bool) -> Header | None:
        block = bytes(self.view[self.at : self.at + BLOCK])
        if len(block) == BLOCK and block != _ZEROS:
            return parse_header(block)
        if extended:
            raise DamagedShardError("the shard is cut: an extended header is not followed by its member")
        check_end(self.view, self.at)
        return None

    def _extension(self, header: Header) -> list[Extended]:
        data = self._data(header)
        if header.kind == LONG_NAME:
            return [Extended({"path": text(data)}, None)]
        if header.kind == LONG_LINK:
            return []
        records = parse_pax(data)
        if header.kind == GLOBAL:
            self.inherited, self.latest = {**self.inherited, **records}, records
            return []
        return [Extended(records, self.inherited)]

    def _data(self, header: Header) -> bytes:
        self._check_room(header.size)
        if header.size > MOST_EXTENDED:
            raise RefusedMemberError(
                f"an extended header has {header.size} bytes, more than the {MOST_EXTENDED} that names and records need"
            )
        return bytes(self.view[self.at + BLOCK : self.at + BLOCK + header.size])

    def _finished(self, header: Header, records: Mapping[str, str], start: int) -> Member:
        self.name = name = records.get("path", "").rstrip("/") or header.name  # as tarfile does
        if not name or "\0" in name:
            raise DamagedShardError(f"the member has no usable name, but {name!r}")
        refuse_kind(header.kind)
        if header.kind not in FILES:
            kind = "directory" if header.kind == DIRECTORY else "label"
            return Member(name, self.at + BLOCK, 0, start, kind)
        size = pax_size(records, header.size) if records else header.size
        self._check_room(size)
        return Member(name, self.at + BLOCK, size, start, "file")

    def _check_room(self, size: int) -> None:
        left = len(self.view) - self.at - BLOCK
        if padded(size) > left:
            raise DamagedShardError(f"the header promises {size} bytes of data, but {left} follow: the shard is cut")


def check_end(view: Bytes, at: int) -> None:
    """Check that an archive ends here: two blocks of zeros, and nothing but zeros behind them.

    Args:
        view: The bytes of the file.
        at: Where no further header stands.

    Raises:
        DamagedShardError: The end is missing, cut, or followed by something.
    """
    if not len(view):
        raise DamagedShardError("the shard is empty: it has 0 bytes")
    end = bytes(view[at : at + 2 * BLOCK])
    if len(view) < BLOCK:
        raise DamagedShardError(f"this is no tar file, or cut: it has {len(end)} bytes, beginning {end[:24]!r}")
    if len(end) < BLOCK and end:
        raise DamagedShardError(f"the shard is cut: {len(end)} bytes of a header are left of {BLOCK}")
    if len(end) < 2 * BLOCK:
        raise DamagedShardError("the shard is cut: the two blocks of zeros that end a tar file are missing")
    for begin in range(at, len(view), _CHUNK):
        piece = bytes(view[begin : begin + _CHUNK])
        if piece.count(0) != len(piece):
            where = begin + len(piece) - len(piece.lstrip(b"\0"))
            message = f"something follows at byte {where} behind zeros that end a tar file: a page was lost, or"
            raise DamagedShardError(f"{message} two tar files were joined; pack them again as one")
    if len(view) % BLOCK:
        raise DamagedShardError(f"the shard is cut: its {len(view)} bytes are no multiple of {BLOCK}")


META = re.compile(r"__[^/]*__($|/)")
RESERVED = frozenset(("__key__", "__url__", "__local_path__"))


@dataclass(frozen=True)
class Skipped:
    """A member that is no part of a sample.

    Args:
        name: Its path in the tar file.
        offset: Where its data begin, in bytes.
        reason: "directory", "label", "no extension", "hidden" or "meta".
    """

    name: str
    offset: int
    reason: str


@dataclass
class Samples:
    """The samples of a shard.

    Args:
        keys: Of the samples, in order.
        layouts: The different tuples of member keys, as written, with their numbers.
        layout_of: The number of each sample's layout.
        offsets: Where each member's data begin, in bytes; those of all samples in a row.
        sizes: Bytes of data of each member.
        skipped: What is no part of a sample.
        end: Where the last member's blocks end.
    """

    keys: list[str] = field(default_factory=list)
    layouts: dict[tuple[str, ...], int] = field(default_factory=dict)
    layout_of: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    end: int = 0


def group(members: Iterable[Member], *, shard: str = "") -> Samples:
    """Put members together that belong to one sample.

    As webdataset does, names without an extension and names whose first part begins and ends with two
    underscores are skipped; so are hidden files, which it would take for members of a sample "folder/".

    Args:
        members: As of `walk`, in the order of the tar file.
        shard: Path or URL, named in errors.

    Returns:
        The samples, and what was skipped.

    Raises:
        GroupingError: A sample's members do not stand together, or two of them have one key.

    >>> names = ["a/1.txt", "a/1.CLS", "a/2.txt", "README"]
    >>> found = group([Member(name, 512, 0, 0, "file") for name in names])
    >>> found.keys, found.layouts, [skipped.name for skipped in found.skipped]
    (['a/1', 'a/2'], {('txt', 'CLS'): 0, ('txt',): 1}, ['README'])
    """
    samples, seen = Samples(), set[str]()
    current, suffixes = None, list[str]()
    for member in members:
        samples.end = member.offset + member.size + -member.size % BLOCK
        reason = skip_reason(member)
        if reason:
            samples.skipped.append(Skipped(member.name, member.offset, reason))
            continue
        key, suffix = split_name(member.name)
        if key != current:
            if key in seen:
                message = "the sample was closed already: put its members next to one another"
                raise GroupingError(message, shard=shard, sample=key, member=member.name, offset=member.offset - BLOCK)
            _close(samples, suffixes, shard)
            seen.add(key)
            samples.keys.append(key)
            current, suffixes = key, []
        suffixes.append(suffix)
        samples.offsets.append(member.offset)
        samples.sizes.append(member.size)
    _close(samples, suffixes, shard)
    return samples


def skip_reason(member: Member) -> str:
    """Why a member is no part of a sample; empty when it is one.

    >>> [skip_reason(Member(name, 512, 0, 0, "file")) for name in ("a.b/c", "a/.b", "__a__/b.c", "__a.b")]
    ['no extension', 'hidden', 'meta', '']
    """
    if member.kind != "file":
        return member.kind
    begin = member.name.rfind("/") + 1
    dot = member.name.find(".", begin)
    if dot <= begin:
        return "hidden" if dot == begin else "no extension"
    return "meta" if member.name.startswith("__") and META.match(member.name) else ""


def split_name(name: str) -> tuple[str, str]:
    """The sample's key and the member's, cut at the first dot of the last part of the path.

    Args:
        name: Path of a member that has such a dot.

    >>> split_name("a.b/c.tar.gz")
    ('a.b/c', 'tar.gz')
    """
    dot = name.index(".", name.rfind("/") + 1)
    return name[:dot], name[dot + 1 :]


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
        message = ""
        if suffix.lower() in folded:
            message = "the sample has two members of this key, case aside: rename or remove one"
        elif suffix.lower() in RESERVED:
            message = "the member has a key that readers use for themselves: rename it"
        if message:
            key = samples.keys[-1]
            raise GroupingError(message, shard=shard, sample=key, member=f"{key}.{suffix}", offset=offset - BLOCK)
        folded.add(suffix.lower())


NAME, PREFIX = 100, 155
MOST_BYTES = 0o77777777777
RECORD = 20 * BLOCK
PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]

# Mode, user and group; time; type, link, magic, names of both, device; each behind the field before it.
_OWNER = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"00000000000\0"
_REST = b"\0 0" + bytes(100) + b"ustar\00000" + bytes(80)
# The checksum counts itself as spaces: here are one of them and the "\0 " behind its digits, which becomes two.
_CONSTANT = sum(_OWNER) + sum(_TIME) + sum(_REST) + 7 * 32


def header(name: bytes, name_sum: int, size: int) -> bytes:
    r"""The USTAR header of a plain file: 512 bytes that depend on the arguments only.

    Args:
        name: Its path, at most 100 bytes.
        name_sum: The sum of these bytes; callers that know a part of it save time.
        size: Bytes of data, at most `MOST_BYTES`.

    >>> made = header(b"a.txt", sum(b"a.txt"), 8)
    >>> len(made), made[:6], made[124:136], made[148:156]
    (512, b'a.txt\x00', b'00000000010\x00', b'006715\x00 ')
    """
    digits, digits_sum = _digits(size)
    checksum = _CONSTANT + name_sum + digits_sum
    return b"%b%b%b%b%06o%b" % (name.ljust(NAME, b"\0"), _OWNER, digits, _TIME, checksum, _TAIL)


def long_header(name: bytes, size: int) -> bytes | None:
    """The same for a path of more than 100 bytes, which is cut at a slash.

    Args:
        name: The path.
        size: Bytes of data.

    Returns:
        The header; None when the path has no slash where it can be cut.

    >>> len(long_header(b"d" * 90 + b"/" + b"n" * 90, 0)), long_header(b"n" * 101, 0)
    (512, None)
    """
    cut = name.find(b"/", max(0, len(name) - NAME - 1))
    if not 0 < cut <= PREFIX:
        return None
    prefix, rest = name[:cut], name[cut + 1 :]
    short = header(rest, sum(prefix) + sum(rest), size)
    return short[: -len(_PREFIX_FIELD)] + prefix.ljust(len(_PREFIX_FIELD), b"\0")


def end(nbytes: int) -> bytes:
    """What ends a tar file: two blocks of zeros, and more up to a multiple of 10240 bytes, as tar does.

    Args:
        nbytes: Bytes before it.

    >>> len(end(0)), len(end(9728))
    (10240, 10752)
    """
    return bytes(2 * BLOCK + -(nbytes + 2 * BLOCK) % RECORD)


_PREFIX_FIELD = bytes(PREFIX + 12)
_TAIL = _REST + _PREFIX_FIELD


@lru_cache(maxsize=4096)
def _digits(size: int) -> tuple[bytes, int]:
    digits = b"%011o" % size
    return digits, sum(digits)
