"""A directory of whole shards and indexes from another machine, of limited size, for several processes at once."""

from __future__ import annotations

import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from headrace.webdatamodule.shards.errors import DamagedIndexError, DamagedShardError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import publish
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import Mapped, OpenShard
from headrace.webdatamodule.shards.remote.filesystem import Span, Transport, WholeFileError, check_far

# Whatever else lies in the directory is not ours, and is let be.
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.(tar|hri)")

_PART = ".part"

_PAUSE = 0.05


class Cache:
    """Keeps files, and lets go of those that were not used for the longest time.

    Under its name a file is whole. It is written under another one, which its writer holds locked; a lock ends with
    its process, however that ends, and who waited for it begins anew. What is let go is unlinked: who has it open, or
    mapped, keeps it. Until then it takes room on the disk that is not counted.

    Args:
        directory: Where the files lie; made if need be. On one machine: locks do not reach across all networks.
        max_bytes: Bytes of all files in it, those that are being written included.

    Raises:
        ValueError: There is no room for anything.
    """

    def __init__(self, directory: str | Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, got {max_bytes}: say how large the cache may grow")
        self.directory, self.max_bytes = Path(directory).expanduser().absolute(), max_bytes

    def find(self, name: str) -> BinaryIO | None:
        """Open a file, and note that it was used.

        Args:
            name: Its name: 32 hexadecimal digits, a dash, 16 of them, ".tar" or ".hri".

        Returns:
            The file; None when it is not here.
        """
        try:
            file = self._path(name).open("rb")
        except FileNotFoundError:
            return None
        os.utime(file.fileno())
        return file

    def put(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> BinaryIO:
        """Make a file, unless another process does so meanwhile.

        Args:
            name: Its name.
            nbytes: Its size.
            fill: Writes the bytes and checks them; the file gets its name when it returns.

        Returns:
            The file, open.

        Raises:
            OSError: The directory cannot be written.
            ShardError: The file has more bytes than the cache may.
        """
        if nbytes > self.max_bytes:
            cure = "raise cache_bytes, or read without a cache"
            raise ShardError(f"the file of {nbytes} bytes does not fit into a cache of {self.max_bytes} bytes: {cure}")
        path = self._path(name)
        part = path.with_name(f"{name}{_PART}")
        self.directory.mkdir(parents=True, exist_ok=True)
        file = _claimed(part)
        try:
            found = self.find(name)
            if found is None:
                self._reserve(file, nbytes, part)
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                with self._alone():  # a file that gets its name meanwhile could be missed when sizes are added up
                    publish({path: part})
                _unlock(file)
                return file
        except BaseException:
            part.unlink(missing_ok=True)
            file.close()
            raise
        part.unlink(missing_ok=True)
        file.close()
        return found

    def drop(self, name: str) -> None:
        """Remove a file.

        Args:
            name: Its name.
        """
        self._path(name).unlink(missing_ok=True)

    def nbytes(self) -> int:
        """The bytes of all files in the cache, those that are being written included."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self._alone():
            return sum(size for _, size, _ in self._listed())

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name must be 32 hexadecimal digits, '-', 16, '.tar' or '.hri', got {name!r}")
        return self.directory / name

    def _listed(self) -> list[tuple[int, int, Path]]:
        found: list[tuple[int, int, Path]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name.removesuffix(_PART)):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # let go meanwhile
                        continue
                    found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(found)

    def _reserve(self, file: BinaryIO, nbytes: int, part: Path) -> None:
        while not self._fits(file, nbytes, part):
            time.sleep(_PAUSE)  # others are writing what cannot be let go yet

    def _fits(self, file: BinaryIO, nbytes: int, part: Path) -> bool:
        with self._alone():
            file.truncate(0)
            listed = self._listed()
            room = self.max_bytes - nbytes - sum(size for _, size, _ in listed)
            for _, size, path in listed:
                if room >= 0:
                    break
                if path != part and _removed(path):
                    room += size
            if room >= 0:
                file.truncate(nbytes)  # so that others count it
            return room >= 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.directory / ".lock").open("ab") as file:
            _lock(file, wait=True)
            yield


def _claimed(part: Path) -> BinaryIO:
    while True:
        file: BinaryIO = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            _lock(file, wait=True)
            # Who held the lock before may have given the file its name, or removed it.
            if os.path.samestat(os.fstat(file.fileno()), part.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _removed(path: Path) -> bool:
    if path.suffix != _PART:
        path.unlink(missing_ok=True)
        return True
    try:
        with closing(path.open("rb")) as file:
            dead = _lock(file, wait=False)
            if dead:  # unlinked while it is locked: who waits for it sees that it is another one
                path.unlink(missing_ok=True)
            return dead
    except FileNotFoundError:  # its writer has failed
        return False


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    if sys.platform == "win32":
        raise ShardError("a cache of shards needs the locks of POSIX, which Windows has not: read without a cache")
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _unlock(file: BinaryIO) -> None:
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


_REQUEST, _AT_ONCE = 8 << 20, 4

_Thing = TypeVar("_Thing")


class MappedFile(Mapped):
    """A memory map of an open file that holds a shard.

    Args:
        index: Of the shard.
        file: The file.

    Raises:
        StaleIndexError: It is another shard.
    """

    def __init__(self, index: ShardIndex, file: BinaryIO) -> None:
        self.path, self.nbytes = index.shard, index.shard_bytes
        self.data: bytes | mmap.mmap = _mapped(file)
        index.check_shard(len(self.data), lambda begin, end: self.data[begin:end])


def cached_name(url: str, checksum: int, suffix: str) -> str:
    """Under which name a file is kept. Other content has another name, so that nothing in a cache grows old.

    Args:
        url: Of the shard.
        checksum: Of its index, which stands for the whole shard.
        suffix: ".tar" or ".hri".

    >>> cached_name("s3://bucket/a.tar", 255, ".tar")
    '8558cc2d5dc25eacec349d39164465b5-00000000000000ff.tar'
    """
    return f"{xxhash.xxh3_128_hexdigest(url.encode())}-{checksum:016x}{suffix}"


def cached_shard(cache: Cache, transport: Transport, index: ShardIndex) -> MappedFile:
    """Map a shard that is in the cache, or comes there now.

    Args:
        cache: The cache.
        transport: Reads what is not there.
        index: Of the shard; it names the URL.

    Returns:
        The map. What has just come was compared with all checksums of the index. Where the server does not read
        ranges, the whole file comes in one request.

    Raises:
        ShardError: It cannot be read, is another one than was indexed, or does not fit.
    """
    name = cached_name(index.shard, index.checksum, ".tar")

    def fill(file: BinaryIO) -> None:
        try:
            for spans in _batches(index.shard_bytes):
                file.writelines(transport.ranges(index.shard, spans))
        except ShardError as error:
            _need_no_ranges(error)
            transport.copy(index.shard, index.shard_bytes, file)
        file.flush()
        OpenShard(index, MappedFile(index, file), None, verify=True).check_all()

    def put() -> BinaryIO:
        try:
            check_far(index, transport)  # before all of it is on its way
        except ShardError as error:
            _need_no_ranges(error)
        return cache.put(name, index.shard_bytes, fill)

    return _kept(cache, name, put, lambda file: MappedFile(index, file), index.shard)


def cached_index(cache: Cache, transport: Transport, url: str, checksum: int, most: int) -> ShardIndex:
    """Map an index that is in the cache, or comes there now.

    Args:
        cache: The cache.
        transport: Reads what is not there.
        url: Of the shard.
        checksum: That the index should have.
        most: Bytes that it may have.

    Returns:
        The index, all of whose bytes were checked; of another checksum if there is another one.

    Raises:
        ShardError: It cannot be read, or does not fit.
    """

    def put() -> BinaryIO:
        data = transport.whole(f"{url}{SUFFIX}", most)
        index = ShardIndex(data, shard=url)
        index.check_self()
        return cache.put(cached_name(url, index.checksum, SUFFIX), len(data), lambda file: file.writelines([data]))

    def use(file: BinaryIO) -> ShardIndex:
        index = ShardIndex(_mapped(file), shard=url)
        index.check_self()
        return index

    return _kept(cache, cached_name(url, checksum, SUFFIX), put, use, url)


def _kept(cache: Cache, name: str, put: Callable[[], BinaryIO], use: Callable[[BinaryIO], _Thing], url: str) -> _Thing:
    try:
        found = cache.find(name)
        if found is not None:
            try:
                with closing(found):
                    return use(found)
            except (DamagedIndexError, StaleIndexError):  # damaged on this disk
                cache.drop(name)
        with closing(_once_more(put)) as file:
            return use(file)
    except OSError as error:
        cure = "make room there, or give another cache_dir"
        raise ShardError(f"the cache {str(cache.directory)!r} cannot be used ({error}): {cure}", shard=url) from error


def _once_more(put: Callable[[], BinaryIO]) -> BinaryIO:
    try:
        return put()
    except (DamagedShardError, DamagedIndexError, StaleIndexError):  # on the way, perhaps
        return put()


def _need_no_ranges(error: ShardError) -> None:
    if not isinstance(error.__cause__, WholeFileError):
        raise error


def _batches(nbytes: int) -> Sequence[list[Span]]:
    spans = [(begin, min(begin + _REQUEST, nbytes)) for begin in range(0, nbytes, _REQUEST)]
    return [spans[first : first + _AT_ONCE] for first in range(0, len(spans), _AT_ONCE)]


def _mapped(file: BinaryIO) -> bytes | mmap.mmap:
    empty = file.seek(0, 2) == 0  # an empty file cannot be mapped
    return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
