"""Files under temporary names: locked while they are written, so that those of killed writers can be told apart."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Self

from headrace.webdatamodule.shards.format.files import lock, sync_directory


class StoppedError(Exception):
    """A file under a temporary name was removed by those who do not want it any more."""


class Part:
    """A file on its way to its final name.

    Removed at the end of a `with` block, unless it was published.

    Args:
        path: The final name; its directory exists.
        run: Hexadecimal digits that tell all parts of one run from others.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{run}-{secrets.token_hex(4)}.part")
        self.stream = _locked(self.temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What was published is on the disk already; what was not may fail once more while it is closed.
        with contextlib.suppress(OSError):
            self.stream.close()
        self.temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            StoppedError: The part was removed.
        """
        self.check()
        self.stream.write(data)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes between two positions."""
        self.stream.seek(begin)
        return self.stream.read(end - begin)

    def check(self) -> None:
        """See whether the part is wanted.

        Raises:
            StoppedError: It was removed.
        """
        if not os.fstat(self.stream.fileno()).st_nlink:
            raise StoppedError(f"{self.temporary} was removed while it was written")

    def sync(self) -> None:
        """Bring all bytes to the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def publish(self) -> None:
        """Give the file its final name, in place of what has it.

        Raises:
            StoppedError: The part was removed.
        """
        try:
            self.temporary.replace(self.path)
        except FileNotFoundError as error:
            raise StoppedError(f"{self.temporary} was removed before it was whole") from error


def remove_run(directory: Path, prefix: str, run: str) -> None:
    """Remove the parts of one run; who writes them stops at the next piece.

    Args:
        directory: Where they lie.
        prefix: Begin of their final names.
        run: As of `Part`.
    """
    for path in _parts(directory, prefix, re.escape(run)):
        path.unlink(missing_ok=True)


def remove_abandoned(directory: Path, prefix: str) -> None:
    """Remove the parts that nobody writes any more, because the writer was killed.

    Args:
        directory: Where they lie.
        prefix: Begin of their final names.
    """
    for path in _parts(directory, prefix, "[0-9a-f]+"):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileExistsError(f"{path} lies where a writer's own files go, and is no file: remove it")
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as stream:
            if lock(stream):
                path.unlink()


def write_locked(path: Path, data: bytes) -> None:
    """Write a small file to the disk, whole; what a killed writer leaves of it is found by `remove_abandoned`.

    Args:
        path: Its final name; the directory exists.
        data: Its bytes.
    """
    with Part(path, "0") as part:
        part.write(data)
        part.sync()
        part.publish()
    sync_directory(path.parent)


def _parts(directory: Path, prefix: str, run: str) -> list[Path]:
    of_set = rf"{re.escape(prefix)}(-[0-9]+\.tar(\.hri)?|\.plan\.json)"
    name = re.compile(rf"\.({of_set}|manifest\.json)\.{run}-[0-9a-f]+\.part")
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]


def _locked(path: Path) -> BinaryIO:
    while True:
        stream = path.open("w+b")
        lock(stream)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # taken for abandoned between these lines
