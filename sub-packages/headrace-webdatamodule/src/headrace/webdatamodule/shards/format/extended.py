"""What several extended headers before one member say together, where all readers read the same out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import RefusedMemberError

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
    for field in ("path", "size"):
        if gnu.get(field) != python.get(field):
            told = f"the {field} {gnu.get(field)!r} for GNU tar, and {python.get(field)!r} for Python"
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
