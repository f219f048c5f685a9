"""Shards on other machines: `s3://`, `gs://`, `https://` and whatever else fsspec knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.decode import load_npy
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import ManifestError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.index.container import MOST_DESCRIBED, checksum64
from headrace.webdatamodule.shards.index.manifest import MOST_BYTES, NAME, Manifest
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.places import refuse_patterns
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard
from headrace.webdatamodule.shards.reading.sources import Head, ShardSet, is_url, of_heads, of_manifest
from headrace.webdatamodule.shards.remote.cache import Cache
from headrace.webdatamodule.shards.remote.cached import cached_index, cached_shard
from headrace.webdatamodule.shards.remote.ranged import RangedShard
from headrace.webdatamodule.shards.remote.retrying import Patience
from headrace.webdatamodule.shards.remote.transport import Transport

_THREADS = 16
# A column may have more bytes than these, and those for each sample, only where somebody means harm.
_COLUMN, _WIDEST = 1 << 20, 1 << 12
# An index has some numbers for each member, which takes a block of the shard at the least, and its key, which is in
# the shard too; and a description in JSON, which may write a character of a name in three times its bytes. Where
# nobody tells how large the shard is, its index may have the most.
_INDEX, _INDEX_MOST = 1 << 20, 1 << 28
_One = TypeVar("_One")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Remote:
    """Where shards are on another machine, and how to read them there. `IndexedShards` takes it, or its URL alone.

    Without a cache, a batch is read in as few requests as its members lie together. With one, whole shards are
    copied there when they are first used, and checked; processes of one machine share it. Pieces need a web server
    that reads ranges; with a cache, one that sends whole files only will do.

    Args:
        url: Of a directory with a manifest, of a manifest, of a tar file, or several of tar files in one place.
        storage_options: For fsspec's file system, such as `{"endpoint_url": ...}` or credentials.
        cache_dir: Where to keep whole shards; None reads pieces.
        cache_bytes: Bytes that the cache may have; what was not used for the longest time goes first.
        gap: Bytes between two members that are rather read in vain than asked for apart.
        patience: How often to try again.
        timeout: Seconds for the requests of one batch, or of 32 MiB on the way to the cache.

    Raises:
        ValueError: An argument is not allowed.

    >>> Remote("s3://bucket/train", {"key": "secret"})  # doctest: +ELLIPSIS
    Remote(url=('s3://bucket/train',), cache_dir=None, cache_bytes=..., timeout=120.0)
    """

    url: str | Sequence[str]
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int = 100 << 30
    gap: int = 1 << 17
    patience: Patience = field(default_factory=Patience)
    timeout: float = 120.0

    def __post_init__(self) -> None:
        urls = (self.url,) if isinstance(self.url, str) else tuple(self.url)
        wrong = [url for url in urls if not is_url(url)]
        if not urls or wrong:
            raise ValueError(f"url must be one or more such as 's3://bucket/directory', got {wrong or self.url!r}")
        if self.gap < 0 or self.timeout <= 0:
            raise ValueError(f"gap must be 0 or more, timeout more than 0, got {self.gap} and {self.timeout}")
        object.__setattr__(self, "url", urls)
        if self.cache_dir is not None:
            Cache(os.fspath(self.cache_dir), self.cache_bytes)

    @cached_property
    def cache(self) -> Cache | None:
        """The cache, if there is one."""
        return None if self.cache_dir is None else Cache(os.fspath(self.cache_dir), self.cache_bytes)

    @cached_property
    def transport(self) -> Transport:
        """What reads there."""
        return Transport(self.url[0], self.storage_options, self.patience, self.timeout)


@dataclass(frozen=True)
class RemoteSet(ShardSet):
    """Some shards on another machine.

    Args:
        remote: Where, and how to read them.
        nbytes: Bytes of each shard, as the manifest tells; empty when there is none.
    """

    remote: Remote
    nbytes: tuple[int, ...] = ()

    def path(self, number: int) -> str:
        """The URL of a shard."""
        return _inside(self.folder, self.names[number]) if self.folder else self.names[number]

    def read_index(self, number: int) -> ShardIndex:
        """Fetch the index of a shard, or map it in the cache."""
        url, remote = self.path(number), self.remote
        most = most_index_bytes(self.nbytes[number]) if self.nbytes else _INDEX_MOST
        if remote.cache is not None:
            return cached_index(remote.cache, remote.transport, url, self.checksums[number], most)
        return _fetched(remote.transport, url, most)

    def open_shard(
        self, index: ShardIndex, keys: Sequence[str] | None, *, verify: bool, max_bytes: int = MAX_BYTES
    ) -> OpenShard:
        """As of `ShardSet`: the shard in the cache, or one that is read in pieces."""
        remote = self.remote
        if remote.cache is not None:
            kept = cached_shard(remote.cache, remote.transport, index)
            return OpenShard(index, kept, keys, verify=verify, max_bytes=max_bytes)
        return RangedShard(index, remote.transport, keys, verify=verify, gap=remote.gap, max_bytes=max_bytes)

    def column(self, name: str) -> npt.NDArray[Any]:
        """As of `ShardSet`: the column is fetched and checked."""
        if not self.folder:
            raise ManifestError(f"there is no column {name!r}: a list of shards has none; give their directory")
        manifest = _manifest(self.folder, self.remote.transport)
        if manifest.fingerprint != self.fingerprint:
            raise StaleIndexError(f"the manifest in {self.folder!r} was replaced: make the dataset again")
        entries = [entry for entry in manifest.columns if entry.name == name]
        if not entries:
            raise ManifestError(f"there is no column {name!r}, only {sorted(self.columns)}; make it with add_column")
        url = _inside(self.folder, entries[0].file)
        data = self.remote.transport.whole(url, _COLUMN + _WIDEST * sum(self.samples))
        if f"{checksum64(data):016x}" != entries[0].checksum:
            raise ManifestError(f"the column {name!r} at {url!r} is damaged: its checksum does not fit")
        return load_npy(data, len(data))

    @staticmethod
    def each(function: Callable[[_One], _Made], things: Iterable[_One]) -> Iterator[_Made]:
        """As of `ShardSet`: several at once, because most of the time is spent waiting."""
        return concurrently(function, list(things))


def find_remote(source: str | Remote | Sequence[str]) -> RemoteSet:
    """Find out what there is to read.

    Args:
        source: A URL, several of tar files, or these in a `Remote`.

    Raises:
        ManifestError: The manifest is damaged.
        ShardError: There is none, or no index, or one that is damaged; or the place cannot be reached.
        ValueError: It is no URL, or a pattern.
    """
    remote = source if isinstance(source, Remote) else Remote(source)
    refuse_patterns(remote.url)
    first = remote.url[0].rstrip("/")
    if len(remote.url) == 1 and not first.lower().endswith(".tar"):
        folder = first.removesuffix(f"/{NAME}")
        manifest = _manifest(folder, remote.transport)
        nbytes = tuple(shard.nbytes for shard in manifest.shards)
        return RemoteSet(**vars(of_manifest(folder, manifest)), remote=remote, nbytes=nbytes)
    heads = list(concurrently(lambda url: _head(remote.transport, url), remote.url))
    return RemoteSet(**vars(of_heads(tuple(remote.url), heads)), remote=remote)


def most_index_bytes(shard_bytes: int) -> int:
    """How many bytes the index of a shard may have.

    Args:
        shard_bytes: Of the shard.

    >>> most_index_bytes(10_240), most_index_bytes(1 << 40)
    (1079296, 268435456)
    """
    return min(_INDEX + shard_bytes + min(2 * shard_bytes, MOST_DESCRIBED), _INDEX_MOST)


def _fetched(transport: Transport, url: str, most: int) -> ShardIndex:
    data = transport.whole(f"{url}{SUFFIX}", most)
    try:
        return ShardIndex(data, shard=url)
    except ShardError as error:
        failed = copy(error)  # its traceback would keep the data
    del data
    raise failed


def _head(transport: Transport, url: str) -> Head:
    index = _fetched(transport, url, _INDEX_MOST)
    return index.n_samples, index.checksum, index.member_keys


def concurrently(function: Callable[[_One], _Made], things: Sequence[_One]) -> Iterator[_Made]:
    """Call a function for some things in threads.

    Args:
        function: What to call.
        things: What with.

    Yields:
        What it returned, in order.

    >>> list(concurrently(abs, [-1, 2]))
    [1, 2]
    """
    if len(things) < 2:
        yield from map(function, things)
        return
    with ThreadPoolExecutor(min(_THREADS, len(things))) as pool:
        yield from pool.map(function, things)


def _inside(folder: str, name: str) -> str:
    web = folder.lower().startswith(("http://", "https://"))  # where "#" and "?" end a name
    return f"{folder}/{quote(name) if web else name}"


def _manifest(folder: str, transport: Transport) -> Manifest:
    url = f"{folder}/{NAME}"
    try:
        return Manifest.from_json(transport.whole(url, MOST_BYTES))
    except ManifestError as error:
        error.message = f"{url}: {error.message}"
        raise
    except ShardError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            message = f"there is no {NAME} in {folder!r}: call index_shards where the shards are written, and copy all"
            raise ManifestError(message) from error
        raise
