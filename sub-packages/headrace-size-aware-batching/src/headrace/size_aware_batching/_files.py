"""Files that are written whole or not at all, by one process at a time."""

import contextlib
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PART = ".part"


def write_atomically(path: Path, pieces: Iterable[Any]) -> None:
    """Write bytes, or arrays, under a temporary name beside the path; rename the file once it is on the disk."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with part.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # a directory cannot be opened everywhere
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def remove_parts(path: Path) -> None:
    """Remove what killed writers of a path left; only for the one that holds its lock."""
    for part in path.parent.glob(f"{path.name}.*{PART}"):
        part.unlink(missing_ok=True)


@contextmanager
def one_writer(path: Path) -> Iterator[bool]:
    """Wait for the lock of a path and hold it; yield whether there are locks here. The system frees it at any end."""
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    with path.with_name(f"{path.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # of a file system without locks
            yield False
        else:
            yield True
