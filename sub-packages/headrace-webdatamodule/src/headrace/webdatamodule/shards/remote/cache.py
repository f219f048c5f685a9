"""A directory of shards, samples and indexes from another machine, of limited size, shared by processes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar
from zlib import crc32

from filelock import FileLock, Timeout

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    IndexVersionError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.files import output_directory, sync_directory
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.consolidated import Listed, SetIndex
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import MappedShard, ShardReader
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.store import Span, StoreError

# Whatever else lies in the directory is not ours, and stays.
_NAME = re.compile(r"[0-9a-f]{32}\.(tar|hri|samples)")
SAMPLES = ".samples"  # a folder
_PART = ".part"
_LOCKS = 64
_PAUSE = 0.05
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REQUEST, _AT_ONCE = 8 << 20, 4
_Thing = TypeVar("_Thing")
_Mapped: TypeAlias = bytes | mmap.mmap


class Cache:
    """Keeps files, and evicts those that were not used for the longest time, but none of this process's datasets.

    Beside files lie folders of samples, which count, and are evicted as a whole; see `SampleCache`.

    A file under its name is complete. Who makes one holds a lock, which ends with its process; who waited for the lock
    finds the file. What is evicted is unlinked: who has it open, or mapped, keeps it. Until then it takes room on the
    disk that is not counted.
    """

    def __init__(self, directory: str | Path, max_bytes: int) -> None:
        self.directory = output_directory("cache_dir", directory, cure="give a directory of this machine").absolute()
        self.max_bytes = checked_int("cache_bytes", max_bytes, 1, cure="say how large the cache may grow")
        self.wanted: Collection[str] = frozenset()  # names of files that are not evicted while this object lives
        self._disk_is_full = False  # as this process found out
        _IN_USE.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _IN_USE.add(self)

    def find(self, name: str) -> BinaryIO | None:
        """Open a file, and note that it was used; None when it is not here."""
        try:
            file = (self.directory / name).open("rb")
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # of another user, or on a disk that is read-only
            os.utime(file.fileno())
        return file

    def put(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> BinaryIO | None:
        """Make a file that `fill` writes and checks, unless another process does so meanwhile; it is returned open.

        None where there is no room beside the files that are wanted, or on the disk.
        """
        if nbytes > self.max_bytes:
            cure = "raise cache_bytes, or read without a cache"
            raise ShardError(f"the file of {nbytes} bytes does not fit into a cache of {self.max_bytes} bytes: {cure}")
        if self._disk_is_full:
            return None
        try:
            return self._put(name, nbytes, fill)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            if not self._disk_is_full:
                self._disk_is_full = True
                message = f"no more shards are kept in {str(self.directory)!r} ({error}), so they are read by ranges"
                warnings.warn(f"{message}: make room there, or give another cache_dir", stacklevel=2)
            return None

    def _put(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> BinaryIO | None:
        path = self.directory / name
        part = self.directory / f"{name}{_PART}"
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.lock(name):
            found = self.find(name)
            if found is not None:
                return found
            part.unlink(missing_ok=True)  # of a process that was killed
            file = part.open("w+b")
            try:
                while not (reserved := self._reserve(file, nbytes, part)):
                    if reserved is None:
                        part.unlink(missing_ok=True)
                        file.close()
                        return None
                    time.sleep(_PAUSE)  # others are writing what cannot be evicted yet
                fill(file)
                file.flush()
                os.fsync(file.fileno())
                with self.lock():  # a file that gets its name meanwhile could be missed when sizes are added up
                    part.replace(path)
                    sync_directory(self.directory)
                return file
            except BaseException:
                part.unlink(missing_ok=True)
                file.close()
                raise

    def drop(self, name: str) -> None:
        """Remove a file."""
        (self.directory / name).unlink(missing_ok=True)

    def make_room(self, nbytes: int, part: Path | None = None) -> int:
        """Evict what this process does not want until so many bytes are free; return how many are.

        Call it under `lock()`. `part` is the file that is being written, whose lock is held.
        """
        listed = self._listed()
        room = self.max_bytes - sum(size for _, size, _ in listed)
        wanted = self._wanted()
        for _, size, path in listed:
            if room >= nbytes:
                break
            if path != part and not _is_in(path, wanted) and self._evict(path, part):
                room += size
        return room

    def lock(self, name: str = "") -> FileLock:
        """The lock of the directory, or that of a file and a few others."""
        which = f"-{crc32(name.encode()) % _LOCKS:02d}" if name else ""
        return FileLock(self.directory / f".lock{which}", mode=0o666, poll_interval=0.01)

    @contextmanager
    def alone(self, name: str, patience: float) -> Iterator[None]:
        """Fetch a file while other processes that want it wait, each no longer than so many seconds."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{self.lock(name).lock_file}-fetch", timeout=patience, mode=0o666, poll_interval=0.01)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(Timeout):
                held.enter_context(lock)
            yield

    def _listed(self) -> list[tuple[int, int, Path]]:
        """For each file when it was used last, its bytes, and its path; the least recently used ones first."""
        found: list[tuple[int, int, Path]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name.removesuffix(_PART)):
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        status = entry.stat()
                        nbytes = _folder_bytes(entry.path) if entry.is_dir() else status.st_size
                        found.append((status.st_mtime_ns, nbytes, Path(entry.path)))
        return sorted(found)

    def _reserve(self, file: BinaryIO, nbytes: int, part: Path) -> bool | None:
        """Evict until there is room, and take it by the size of the file, so that others count it.

        False where there may be room later, None where there will be none.
        """
        with self.lock():
            wanted = self._wanted()
            if nbytes > self.max_bytes - sum(size for _, size, path in self._listed() if _is_in(path, wanted)):
                return None
            has_room = self.make_room(nbytes, part) >= nbytes
            if has_room:
                file.truncate(nbytes)
            return has_room

    def _wanted(self) -> list[Collection[str]]:
        """The names that datasets of this process want."""
        return [cache.wanted for cache in list(_IN_USE) if cache.directory == self.directory]

    def _evict(self, path: Path, part: Path | None) -> bool:
        if path.suffix == SAMPLES:
            shutil.rmtree(path, ignore_errors=True)  # a process that writes there makes the folder anew
            return True
        lock = self.lock(path.name.removesuffix(_PART))
        ours = part is not None and lock.lock_file == self.lock(part.name.removesuffix(_PART)).lock_file
        if path.suffix != _PART or ours:  # nobody else writes under a lock that is held here
            path.unlink(missing_ok=True)
            return True
        try:
            with lock.acquire(timeout=0):  # its writer was killed
                path.unlink(missing_ok=True)
                return True
        except Timeout:
            return False


_IN_USE: weakref.WeakSet[Cache] = weakref.WeakSet()  # of this process


def _folder_bytes(folder: str) -> int:
    nbytes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                nbytes += entry.stat().st_size
    return nbytes


def _is_in(path: Path, wanted: list[Collection[str]]) -> bool:
    return any(path.name.removesuffix(_PART) in names for names in wanted)


class CachedShard(MappedShard):
    """A map of a shard in the cache; when a member of it is damaged, the file is fetched again once."""

    def __init__(
        self, index: ShardIndex, data: _Mapped, again: Callable[[], _Mapped | None], *, verified: bool
    ) -> None:
        super().__init__(index, data, verified=verified)
        self._again: Callable[[], _Mapped | None] | None = again

    def fetch_again(self, begin: int, end: int) -> bytes | None:
        """See `ShardBytes`; None where another file has taken the room meanwhile."""
        again, self._again = self._again, None
        if again is not None:
            fetched = again()
            if fetched is None:
                return None
            self.data, self.stale = fetched, None
        return bytes(self.data[begin:end])


def cached_name(content: object, suffix: str) -> str:
    """The name under which a file is kept, by what identifies its content, such as a checksum.

    So an entry is never stale, and is found again whatever the host, the path and the signature of its URL are.
    """
    return f"{text_digest(repr(content))}{suffix}"


def cached_shard(cache: Cache, files: CheckedStore, index: ShardIndex, *, verified: bool) -> CachedShard | None:
    """Map a shard that is in the cache, or is fetched now and compared with all checksums of its index.

    None where the cache has no room for it.
    """
    name = cached_name(index.checksum, ".tar")

    def fill(file: BinaryIO) -> None:
        fetch_whole(files, index.shard, index.shard_bytes, file)
        file.flush()
        ShardReader(index, MappedShard(index, _map(file)), None, verify=True).check_all()

    def put() -> BinaryIO | None:
        try:
            if not files.sends_whole_files(index.shard):
                check_shard(files, index)  # before all of it is on its way
        except StoreError as error:
            if not error.lacks_ranges:
                raise
        return cache.put(name, index.shard_bytes, fill)

    def put_or_again() -> BinaryIO | None:
        try:
            return put()
        except (DamagedShardError, StaleIndexError):  # on the way, perhaps
            return put()

    def again() -> _Mapped | None:
        cache.drop(name)
        with _named(cache, index.shard):
            return _mapped(put())

    def use(data: _Mapped) -> CachedShard:
        return CachedShard(index, data, again, verified=verified)

    with _named(cache, index.shard):
        found = _found(cache, name, use)
        if found is not None:
            return found
        data = _mapped(put_or_again())
        return None if data is None else use(data)


def fetch_whole(files: CheckedStore, url: str, nbytes: int, file: BinaryIO) -> None:
    """Write all bytes of a shard into a file, in ranges where the server reads them."""
    try:
        if not (whole := files.sends_whole_files(url)):
            for spans in _requests(nbytes):
                file.writelines(files.ranges(url, spans))
    except StoreError as error:
        if not error.lacks_ranges:
            raise
        whole = True
    if whole:
        files.download(url, nbytes, file)


def cached_index(cache: Cache, files: CheckedStore, url: str, checksum: int, most: int) -> ShardIndex:
    """Map an index that is in the cache, or is fetched now; of another checksum if it was replaced there."""

    def use(data: _Mapped) -> ShardIndex:
        return _checked_index(data, url)

    with _named(cache, url):
        found = _found(cache, cached_name(checksum, SUFFIX), use)
        if found is not None:
            return found
        index = fetch_index(files, url, most)
        data = _put(cache, cached_name(index.checksum, SUFFIX), index.data)
        return index if data is None else use(data)


def fetch_index(files: CheckedStore, url: str, most: int) -> ShardIndex:
    """Fetch the index of a shard, and check all of it."""
    return files.read_as(url + SUFFIX, most, lambda data: _checked_index(data, url))


def cached_set_index(
    cache: Cache, files: CheckedStore, url: str, listed: Listed, most: int, *, patience: float
) -> SetIndex:
    """Map the index of a whole set that is in the cache, or is fetched now by one process, while others wait for it."""
    name = cached_name(listed.fingerprint, SUFFIX)

    def use(data: _Mapped) -> SetIndex:
        return SetIndex(data, listed)

    with _named(cache, url):
        found = _found(cache, name, use)
        if found is not None:
            return found
        with cache.alone(name, patience):
            found = _found(cache, name, use)
            if found is not None:
                return found
            index = files.read_as(url, most, use)
            data = _put(cache, name, index.data)
            return index if data is None else use(data)


def _checked_index(data: _Mapped, url: str) -> ShardIndex:
    index = ShardIndex(data, shard=url)
    index.check_self()
    return index


def _map(file: BinaryIO) -> _Mapped:
    empty = file.seek(0, os.SEEK_END) == 0  # an empty file cannot be mapped
    return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _mapped(file: BinaryIO | None) -> _Mapped | None:
    if file is None:
        return None
    with closing(file):
        return _map(file)


def _put(cache: Cache, name: str, data: Any) -> _Mapped | None:
    return _mapped(cache.put(name, len(data), lambda file: file.writelines([data])))


def _found(cache: Cache, name: str, use: Callable[[_Mapped], _Thing]) -> _Thing | None:
    data = _mapped(cache.find(name))
    if data is not None:
        try:
            return use(data)
        except (DamagedIndexError, IndexVersionError, StaleIndexError):  # damaged on this disk
            cache.drop(name)
    return None


@contextmanager
def _named(cache: Cache, url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cure = "make room there, or give another cache_dir"
        raise ShardError(f"the cache {str(cache.directory)!r} cannot be used ({error}): {cure}", shard=url) from error


def check_shard(files: CheckedStore, index: ShardIndex) -> None:
    """Check by its size and three short pieces whether a shard is the one that was indexed."""
    size = files.size(index.shard)
    wanted = index.fingerprint_ranges() if size == index.shard_bytes else [(0, min(BLOCK, size))]
    parts = files.parts(index.shard, wanted)
    index.check_shard(size, lambda begin, end: parts[begin:end])


def _requests(nbytes: int) -> Sequence[list[Span]]:
    spans = [(begin, min(begin + _REQUEST, nbytes)) for begin in range(0, nbytes, _REQUEST)]
    return [spans[first : first + _AT_ONCE] for first in range(0, len(spans), _AT_ONCE)]
