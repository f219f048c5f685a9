"""The records of a PAX extended header."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.webdatamodule.shards.errors import DamagedShardError, RefusedMemberError

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
