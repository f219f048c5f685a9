"""One header of a tar file: 512 bytes to a name, a size and a kind."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import DamagedShardError, RefusedMemberError

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
