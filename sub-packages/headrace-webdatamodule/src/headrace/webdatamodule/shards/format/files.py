"""Plain files: opened without blocking on FIFOs and devices, written atomically, and locked."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias

from filelock import FileLock, Timeout

from headrace.webdatamodule.shards.errors import Damage, DamagedShardError, ShardError
from headrace.webdatamodule.shards.urls import redacted

LOCK_NAME = ".headrace.lock"
PIECE = 1 << 20  # bytes that are looked at in one go
_NEAR, _AHEAD = 1 << 12, 1 << 20  # bytes: a read this near the last one reads ahead
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.:-]+:/")  # with one slash, which is what a path leaves of two
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # of directories: old CIFS, vboxsf, some of FUSE
_log = logging.getLogger(__name__)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileBytes:
    """The bytes of a file by their places, each read when it is asked for.

    Unlike a map, which kills the process when the file is cut meanwhile, this ends in an error. What is asked for
    in rising order comes from a buffer. Begin and end of a slice have to be given.
    """

    def __init__(self, path: str | Path) -> None:
        self._descriptor = -1
        self._path, self._descriptor = str(path), open_plain(path)
        self._size = os.fstat(self._descriptor).st_size
        self._begin, self._end, self._buffer = 0, 0, b""

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        begin, end = where.start, where.stop
        if self._begin <= begin and end <= self._end:
            return self._buffer[begin - self._begin : end - self._begin]
        begin, end, _ = where.indices(self._size)
        if end - begin > _AHEAD // 2:
            return self._read(begin, end - begin)
        near = self._begin <= begin <= self._end + _NEAR
        self._buffer = self._read(begin, min(_AHEAD if near else max(_NEAR, end - begin), self._size - begin))
        self._begin, self._end = begin, begin + len(self._buffer)
        return self._buffer[: max(0, end - begin)]

    def between(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        return self[begin:end]

    def _read(self, begin: int, size: int) -> bytes:
        os.lseek(self._descriptor, begin, os.SEEK_SET)
        pieces, left = list[bytes](), max(0, size)
        while left:
            piece = os.read(self._descriptor, left)
            if not piece:
                message = Damage.CUT_WHILE_READ.format(nbytes=self._size)
                raise DamagedShardError(message, shard=self._path, offset=begin + size - left)
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


Bytes: TypeAlias = bytes | mmap.mmap | memoryview | FileBytes


def open_plain(path: str | Path, error: type[ShardError] = DamagedShardError) -> int:
    """Open a file to read it; never wait for a FIFO, and never take a device for a file."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as problem:
        _refuse_kind(path, os.stat(path).st_mode, error)  # noqa: PTH116 - a socket cannot be opened
        raise problem from None
    try:
        _refuse_kind(path, os.fstat(descriptor).st_mode, error)
    except ShardError:
        os.close(descriptor)
        raise
    return descriptor


def read_plain(path: str | Path, error: type[ShardError], *, most: int) -> bytes:
    """Read all of a small file."""
    with os.fdopen(open_plain(path, error), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise error(f"{path} has {size} bytes, more than the {most} that such a file may have")
        return file.read(size + 1)


def read_or_map(path: str | Path, error: type[ShardError], *, most_read: int) -> bytes | mmap.mmap:
    """All of a file; a larger one is mapped, so that all processes share it."""
    with os.fdopen(open_plain(path, error), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size > most_read:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return file.read()


def expanded(place: str | os.PathLike[str]) -> Path:
    """A path with a leading "~" replaced by the home of the user; unchanged where there is no such user."""
    return Path(os.path.expanduser(place))  # noqa: PTH111 - that of Path raises where there is no such user


def output_directory(
    name: str, place: str | os.PathLike[str], *, cure: str = "write the shards, then copy them"
) -> Path:
    """A directory of this machine to write to, which the argument `name` gives; a URL would become a folder "s3:"."""
    if _URL.match(str(place)):
        raise ValueError(f"{name} must be a local one, got {redacted(str(place))!r}: {cure}")
    return expanded(place)


def _refuse_kind(path: str | Path, mode: int, error: type[ShardError]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise error(f"this is {kind}, not a plain file: move it away", shard=str(path))


class StoppedError(Exception):
    """A file under a temporary name was removed, because it is not wanted any more."""


class StagedFile:
    """A file under a temporary name; removed at the end of a `with` block, unless it was published.

    The name begins with a dot, which keeps it from readers' patterns. Its digits keep two writers apart, also on two
    hosts; those of `run` are the same for all files of one run.
    """

    def __init__(self, path: Path, run: str = "") -> None:
        self.path = path
        digits = "-".join(filter(None, (run, secrets.token_hex(4))))
        self.temporary = path.with_name(f".{path.name}.{digits}.part")
        self.stream: BinaryIO
        self._published = False

    def begin(self) -> Self:
        """Make the file; a `with` block does so."""
        try:
            self.stream = self.temporary.open("w+b")
        except BaseException:  # Ctrl-C, when it is there already
            self.temporary.unlink(missing_ok=True)
            raise
        return self

    __enter__ = begin

    def __exit__(self, *_: object) -> None:
        # What was published is on the disk already; what was not may fail once more while it is closed.
        with contextlib.suppress(OSError):
            self.stream.close()
        if not self._published:
            self.temporary.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes; a StoppedError when the file was removed."""
        if not os.fstat(self.stream.fileno()).st_nlink:
            raise StoppedError(f"{self.temporary} was removed while it was written")
        self.stream.write(data)

    def sync(self) -> None:
        """Bring all bytes to the disk, and close the file."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()

    def publish(self) -> None:
        """Give the file its final name, in place of what has it; a StoppedError when it was removed."""
        try:
            self.temporary.replace(self.path)
        except FileNotFoundError as error:
            raise StoppedError(f"{self.temporary} was removed before it was whole") from error
        self._published = True


@contextmanager
def staged_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when all of it is on the disk; after an error there is what was there before."""
    with StagedFile(path) as staged:
        yield staged.stream
        staged.sync()
        staged.publish()
        sync_directory(path.parent)


def atomic_write(path: Path, data: bytes, *, name_later: bool = False) -> None:
    """Write a small file to the disk: under its name is either what was there before, or all of it.

    With `name_later`, a loss of power may still bring back what was there before; of many files, `sync_directory`
    brings all names to the disk.
    """
    with StagedFile(path) as staged:
        staged.stream.write(data)
        staged.sync()
        staged.publish()
    if not name_later:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring the names of a directory's files to the disk, where its file system can do that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(descriptor)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Wait until nobody else writes to a directory, and keep others waiting.

    Several processes that want to write the same set, such as one a node, so write it once. Where files cannot be
    locked or made, nobody waits.
    """
    lock = FileLock(directory / LOCK_NAME, mode=0o666, fallback_to_soft=False)
    try:
        directory.stat()  # or the lock would make it
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.warning("another process is writing to %s: waiting for it", directory)
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # a read-only directory, or a file system without locks
        _log.debug("%s is not locked: %s", directory, error)
    try:
        yield
    finally:
        if lock.is_locked:
            (directory / LOCK_NAME).unlink(missing_ok=True)  # who waits for it sees that, and makes another one
            lock.release()
