"""Files that are whole under their final name, or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file to the disk: under its name is either what was there before, or all of it.

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


def publish(staged: Mapping[Path, Path]) -> None:
    """Give files that are on the disk already their final names.

    Args:
        staged: {final name: temporary name}, all in one directory.
    """
    for path, temporary in staged.items():
        temporary.replace(path)
    for directory in {path.parent for path in staged}:
        sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Bring the names of a directory's files to the disk.

    Args:
        directory: Where files were renamed.
    """
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
