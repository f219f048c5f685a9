"""The members of a tar file, found by its headers alone, and every fault of its structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import DamagedShardError, RefusedMemberError, ShardError
from headrace.webdatamodule.shards.format import headers, pax
from headrace.webdatamodule.shards.format.extended import Extended, settle
from headrace.webdatamodule.shards.format.headers import BLOCK, Header
from headrace.webdatamodule.shards.format.plain_files import Bytes, FileBytes

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
            if header.kind not in headers.EXTENSIONS:
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
            return headers.parse_header(block)
        if extended:
            raise DamagedShardError("the shard is cut: an extended header is not followed by its member")
        check_end(self.view, self.at)
        return None

    def _extension(self, header: Header) -> list[Extended]:
        data = self._data(header)
        if header.kind == headers.LONG_NAME:
            return [Extended({"path": headers.text(data)}, None)]
        if header.kind == headers.LONG_LINK:
            return []
        records = pax.parse_pax(data)
        if header.kind == headers.GLOBAL:
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
        headers.refuse_kind(header.kind)
        if header.kind not in headers.FILES:
            kind = "directory" if header.kind == headers.DIRECTORY else "label"
            return Member(name, self.at + BLOCK, 0, start, kind)
        size = pax.pax_size(records, header.size) if records else header.size
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
