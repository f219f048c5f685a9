"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

NAME = ".headrace.lock"
# A link is not followed to where it leads, and a FIFO that nobody reads is not waited for.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_log = logging.getLogger(__name__)


def lock(stream: BinaryIO, *, wait: bool = False) -> bool:
    """Lock an open file, until it is closed.

    Args:
        stream: The file, open for writing.
        wait: Whether to wait for another one who holds it.

    Returns:
        Whether it is locked now: not where another one holds it, nor where there are no locks.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Wait until nobody else writes to a directory, and keep others waiting.

    Several processes that want to write the same set, such as one a node, so write it once. Where files cannot be
    locked or made, nobody waits.

    Args:
        directory: Where to write; it exists.

    Yields:
        When it is ours.
    """
    stream = _held(directory)
    try:
        yield
    finally:
        if stream is not None:
            (directory / NAME).unlink(missing_ok=True)
            stream.close()


def _held(directory: Path) -> BinaryIO | None:
    while True:
        try:
            stream = os.fdopen(os.open(directory / NAME, _FLAGS, 0o666), "ab")
        except OSError:  # what cannot be written to says so when it is
            return None
        if not lock(stream):
            _log.warning("another process may be writing to %s: waiting for it", directory)
            if not lock(stream, wait=True):
                stream.close()
                return None
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # removed by who held it before us
