"""Small files that are whole under their final name."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from headrace.webdatamodule.shards.tar import publish


def write_whole(path: Path, data: bytes) -> None:
    """Write a file to the disk: under its name is either what was there before, or all of it.

    Args:
        path: Its final name; the directory exists.
        data: Its bytes.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        publish({path: temporary})
    finally:
        temporary.unlink(missing_ok=True)
