"""Whole shards and indexes from another machine, kept in a cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import BinaryIO, TypeVar

import xxhash

from headrace.webdatamodule.shards.errors import DamagedIndexError, DamagedShardError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.mapped import Mapped
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard
from headrace.webdatamodule.shards.remote.bounded import WholeFileError
from headrace.webdatamodule.shards.remote.cache import Cache
from headrace.webdatamodule.shards.remote.coalescing import Span
from headrace.webdatamodule.shards.remote.ranged import check_far
from headrace.webdatamodule.shards.remote.transport import Transport

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
