"""Whether a write of shards was stopped before all of them were there: the note that `write_shards` leaves says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headrace.webdatamodule.shards.errors import ManifestError, ShardError
from headrace.webdatamodule.shards.format.plain_files import read_plain

NOTE = ".plan.json"
_MOST_BYTES = 1 << 20


def stopped_write(directory: Path) -> str | None:
    """What to say of a directory where shards of a plan are missing.

    Args:
        directory: Where the shards lie; need not exist.

    Returns:
        What happened and the cure; None when all shards of all plans are there, or nothing was planned.
    """
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    for note in sorted(name for name in names if name.endswith(NOTE) and not name.startswith(".")):
        prefix, planned = note.removesuffix(NOTE), _planned(directory / note)
        if planned is None:
            continue
        found = (re.fullmatch(rf"{re.escape(prefix)}-([0-9]{{6,}})\.tar", name, re.ASCII) for name in names)
        there = sum(1 for one in found if one and int(one[1]) < planned)
        if there < planned:
            cure = f"run it again, or remove {note} to keep what is there"
            return f"a write was stopped at {there} of {planned} shards in {str(directory)!r}: {cure}"
    return None


def refuse_stopped(directory: Path) -> None:
    """Refuse to take a part of a set for all of it.

    Args:
        directory: Where the shards lie.

    Raises:
        ManifestError: Shards of a plan are missing.
    """
    stopped = stopped_write(directory)
    if stopped:
        raise ManifestError(stopped)


def _planned(note: Path) -> int | None:
    # Other programs may call their files so too: what is no plan of ours says nothing.
    try:
        table = json.loads(read_plain(note, ManifestError, most=_MOST_BYTES))
    except (OSError, RecursionError, ShardError, ValueError):
        return None
    if not isinstance(table, dict) or table.get("format") != "headrace-plan":
        return None
    shards = table.get("shards")
    return shards if type(shards) is int and shards > 0 else None
