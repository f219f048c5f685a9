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

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.decode import load_npy
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DamagedShardError, ManifestError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.container import MAX_DESCRIPTION_BYTES, checksum64
from headrace.webdatamodule.shards.index.manifest import MOST_BYTES, NAME, Manifest
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.reading.shard_reader import Mapped, OpenShard, Sample
from headrace.webdatamodule.shards.reading.sources import Head, ShardSet, is_url, of_heads, of_manifest, refuse_patterns
from headrace.webdatamodule.shards.remote.cache import Cache, cached_index, cached_shard
from headrace.webdatamodule.shards.remote.filesystem import Offsets, Patience, Pieces, Transport, check_far, coalesce

_REQUEST, _WINDOW = 4 << 20, 16 << 20


class Fetched(Mapped):
    """Pieces of a shard in the place of a map of all of it.

    Args:
        pieces: Those that are going to be read.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.data: Any = pieces

    def check_size(self) -> None:
        """What is here stays as it is."""


class RangedShard(OpenShard):
    """A shard and its index; members that lie close together come in one request, several requests at a time.

    Args:
        index: Of the shard; it names the URL.
        transport: Reads there.
        keys: Which members to read, in lower case; all when None.
        verify: Whether to check the checksum of each member that is read.
        gap: Bytes between two members that may be read in vain.
        max_bytes: Most bytes that a member may have.

    Raises:
        ShardError: The shard cannot be read.
        StaleIndexError: It is another one than was indexed.
    """

    def __init__(
        self,
        index: ShardIndex,
        transport: Transport,
        keys: Sequence[str] | None,
        *,
        verify: bool,
        gap: int,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(index, Fetched(Pieces([], [])), keys, verify=verify, max_bytes=max_bytes)
        self._transport, self._gap = transport, gap
        check_far(index, transport)

    def some(self, samples: Sequence[int], into: list[Sample]) -> None:
        """As of `OpenShard`; what was damaged on the way is read once more."""
        self._check_sizes(samples)
        before = len(into)
        try:
            self._over(self._fetch(samples)).some(samples, into)
        except DamagedShardError:
            del into[before:]
            self._over(self._fetch(samples)).some(samples, into)

    def between(self, start: int, stop: int) -> Iterator[list[Sample]]:
        """As of `OpenShard`; while a few samples are looked at, the next ones come."""
        small = self._small_until(start, stop)
        spans = windows(self._bytes(range(start, small)), _WINDOW)
        parts = [range(start + begin, start + end) for begin, end in spans]
        with ThreadPoolExecutor(1) as pool:
            coming = [pool.submit(self._fetch, part) for part in parts[:1]]
            for number, part in enumerate(parts):
                pieces = coming.pop().result()
                coming.extend(pool.submit(self._fetch, later) for later in parts[number + 1 : number + 2])
                yield from self._window(part, pieces)
        self._check_sizes(range(small, stop)[:1])

    def _whole(self) -> OpenShard:
        whole = copy(self)
        super(RangedShard, whole).__init__(
            self.index, self._mapped, None, verify=True, max_bytes=self.index.shard_bytes
        )
        return whole

    def _piece(self, begin: int, end: int) -> bytes:
        return self._transport.ranges(self.index.shard, [(begin, end)])[0]

    def _window(self, part: range, pieces: Pieces) -> Iterator[list[Sample]]:
        at = part.start
        try:
            for read in self._over(pieces).between(part.start, part.stop):
                at += len(read)
                yield read
        except DamagedShardError:
            again = range(at, part.stop)
            yield from self._over(self._fetch(again)).between(again.start, again.stop)

    def _over(self, pieces: Pieces) -> OpenShard:
        near = object.__new__(OpenShard)  # plans of many layouts are not made anew for each batch
        vars(near).update(vars(self), _mapped=Fetched(pieces))
        return near

    def _positions(self, samples: Sequence[int]) -> list[tuple[Offsets, Offsets]]:
        # Pairs of where samples of one layout stand in `samples`, shape [n], and their positions, shape [n, members].
        starts = np.fromiter(self.index.starts_of(samples), np.int64, len(samples))
        several = len(self._plans) > 1
        layouts = np.fromiter(self.index.layouts_of(samples), np.int64, starts.size) if several else starts * 0
        order = np.argsort(layouts, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(layouts[order])) + 1) if order.size else []
        plans = [self._plans[int(layouts[group[0]])] or () for group in groups]
        columns = [np.array([column for _, column in members], np.int64) for members in plans]
        return [(group, starts[group, None] + column) for group, column in zip(groups, columns, strict=True)]

    def _bytes(self, samples: range) -> npt.NDArray[np.int64]:
        made = np.zeros(len(samples), np.int64)
        for group, positions in self._positions(samples):
            made[group] = self.index.sizes[positions].astype(np.int64).sum(1)
        return made

    def _fetch(self, samples: Sequence[int]) -> Pieces:
        found = [positions.ravel() for _, positions in self._positions(samples)]
        wanted = np.concatenate([np.empty(0, np.int64), *found])
        begins = self.index.blocks[wanted].astype(np.int64) * BLOCK
        return self._read(begins, begins + self.index.sizes[wanted].astype(np.int64))

    def _read(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Pieces:
        spans = coalesce(begins, ends, gap=self._gap, most=_REQUEST)
        return Pieces(spans, self._transport.ranges(self.index.shard, spans))


def windows(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Cut a row of samples into parts of about as many bytes.

    Args:
        sizes: Bytes of each, shape [n].
        most: Bytes of a part, less than one sample more at most.

    Returns:
        Begin and end of each part.

    >>> windows(np.array([4, 4, 4, 100, 0, 1]), 8)
    [(0, 2), (2, 4), (4, 6)]
    """
    if not sizes.size:
        return []
    numbers = (np.cumsum(sizes) - sizes) // most
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, sizes.size], strict=True))


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
    return min(_INDEX + shard_bytes + min(2 * shard_bytes, MAX_DESCRIPTION_BYTES), _INDEX_MOST)


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
