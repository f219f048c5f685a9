"""A set of shards on another machine: `s3://`, `gs://`, `https://` and whatever else fsspec knows, or a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

import numpy.typing as npt

from headrace.webdatamodule.shards.errors import DamagedIndexError, ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import read_or_map
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.consolidated import SET_INDEX_NAME, Listed, SetIndex, head_bytes
from headrace.webdatamodule.shards.index.container import INDEX_VERSION
from headrace.webdatamodule.shards.index.manifest import (
    MOST_MANIFEST_BYTES,
    NAME,
    Manifest,
    checked_column,
    column_entry,
    read_column,
)
from headrace.webdatamodule.shards.index.shard_index import READ_BYTES, SUFFIX, ShardIndex, index_path
from headrace.webdatamodule.shards.reading.local_shards import (
    Head,
    ShardSet,
    head,
    of_heads,
    of_manifest,
)
from headrace.webdatamodule.shards.reading.open_shards import concurrently
from headrace.webdatamodule.shards.reading.shard_reader import MappedShard, ShardBytes
from headrace.webdatamodule.shards.remote.cache import (
    SAMPLES,
    Cache,
    cached_index,
    cached_name,
    cached_set_index,
    cached_shard,
    check_shard,
    fetch_index,
)
from headrace.webdatamodule.shards.remote.remote import Remote
from headrace.webdatamodule.shards.remote.sample_cache import SampleCache, share_of_room
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.store import KnownParts, Span, Store, StoreError, TrafficCounter
from headrace.webdatamodule.shards.urls import file_name, is_web

# Bounds for servers that send without end: of a column, and of each sample's row in it; of an index, which takes less
# than eight times the shard, where packs hold empty members, and where the size of that is unknown.
_COLUMN, _WIDEST = 1 << 20, 1 << 17
_INDEX, _INDEX_MOST = 1 << 20, 1 << 28
_SET_INDEX_MOST = 1 << 26  # more would keep the first batch waiting: indexes of shards are fetched as they are needed
_OTHERS = (
    "For tar files that others host, or whose URLs are signed one by one, keep the indexes on this machine: "
    "Remote(urls, index_dir=...).index_shards(), once"
)


@dataclass(frozen=True)
class RemoteSet(ShardSet):
    """Some shards on another machine."""

    remote: Remote
    nbytes: tuple[int, ...]  # of each shard
    is_remote: ClassVar[bool] = True

    @property
    def holds_descriptors(self) -> bool:
        """See `ShardSet`; what is read in ranges is never closed."""
        return self.remote.cache_dir is not None or isinstance(self.remote.url, Store)

    def path(self, number: int) -> str:
        """The URL of a shard."""
        return _inside(self.folder, self.names[number]) if self.folder else self.names[number]

    def open_set_index(self, listed: Listed) -> SetIndex | None:
        """Fetch the index of the whole set, or map it in the cache; without a cache, only a small one."""
        url, remote = _inside(self.folder, SET_INDEX_NAME), self.remote
        most = head_bytes(len(self.names)) + sum(map(most_index_bytes, self.nbytes))
        if remote.cache is None:
            return remote.files.read_as(url, min(most, _SET_INDEX_MOST), lambda data: SetIndex(data, listed))
        most = min(most, remote.cache_bytes)
        return cached_set_index(remote.cache, remote.files, url, listed, most, patience=remote.timeout)

    @property
    def keeps_samples(self) -> bool:
        """See `ShardSet`."""
        cache, unit = self.remote.cache, self.remote.cache_unit
        return cache is not None and (unit == "sample" or (unit == "auto" and sum(self.nbytes) > cache.max_bytes))

    def cached_share(self, sample_bytes: float) -> float | None:
        """See `ShardSet`; a table, and the indexes that were read, take some of the cache."""
        cache = self.remote.cache
        if cache is None or not self.keeps_samples:
            return None
        indexes = 0
        for name in self.cached_names():
            with suppress(OSError):
                indexes += (cache.directory / name).stat().st_size
        return share_of_room(cache.max_bytes - indexes, sum(self.samples), sample_bytes)

    def sample_cache(self, members: Sequence[str] | None) -> SampleCache | None:
        """See `ShardSet`."""
        cache = self.remote.cache
        if cache is None or not self.keeps_samples:
            return None
        name = cached_name((self.samples, self.checksums, INDEX_VERSION, members), SAMPLES)
        return SampleCache(cache, name, sum(self.samples))

    def cached_names(self) -> frozenset[str]:
        """The names of all its files in a cache."""
        suffixes = (SUFFIX,) if self.keeps_samples else (".tar", SUFFIX)
        names = {cached_name(checksum, suffix) for checksum in self.checksums for suffix in suffixes}
        return frozenset({*names, cached_name(self.set_fingerprint, SUFFIX)})

    def read_index(self, number: int) -> ShardIndex:
        """Fetch the index of a shard, or map it in the cache."""
        url, remote = self.path(number), self.remote
        most = most_index_bytes(self.nbytes[number])
        if remote.cache is not None:
            return cached_index(remote.cache, remote.files, url, self.checksums[number], most)
        return fetch_index(remote.files, url, most)

    def open_bytes(self, index: ShardIndex, *, verified: bool, whole: bool) -> ShardBytes:
        """See `ShardSet`: the shard in the cache, or one of which ranges are read."""
        remote = self.remote
        if (data := remote.files.map(index.shard)) is not None:
            return MappedShard(index, data, verified=verified)
        if remote.cache is not None and whole:
            cached = cached_shard(remote.cache, remote.files, index, verified=verified)
            if cached is not None:
                return cached
        if not verified and whole:  # else each read finds out
            check_shard(remote.files, index)
        return RangedShard(index, remote.files)

    @property
    def traffic(self) -> TrafficCounter:
        """See `ShardSet`."""
        return self.remote.files.traffic

    @property
    def lookahead(self) -> int:
        """See `ShardSet`; 0 where a cache has room for all shards, which are kept whole."""
        cache = self.remote.cache
        kept_whole = cache is not None and not self.keeps_samples and sum(self.nbytes) <= cache.max_bytes
        return 0 if kept_whole else self.remote.lookahead

    def fetch(self, wanted: Sequence[tuple[str, Span]], *, ahead: bool) -> list[bytes]:
        """See `ShardSet`."""
        return (self.remote.ahead if ahead else self.remote.files).ranges_of(wanted)

    def column(self, name: str) -> npt.NDArray[Any]:
        """See `ShardSet`: the column is fetched and checked."""
        manifest = self.check_manifest(name, lambda: _manifest(self.folder, self.remote.files))
        entry = column_entry(manifest, name)

        def read(data: bytes) -> npt.NDArray[Any]:
            return checked_column(manifest, entry, lambda: read_column(data, entry.checksum))

        url, most = _inside(self.folder, entry.file), _COLUMN + _WIDEST * sum(self.samples)
        return self.remote.files.read_as(url, most, read)


@dataclass(frozen=True)
class IndexedHere(RemoteSet):
    """Tars on another machine, whose indexes are in a folder of this one."""

    urls: tuple[str, ...] = ()

    def path(self, number: int) -> str:
        """The URL of a shard."""
        return self.urls[number]

    def open_set_index(self, listed: Listed) -> SetIndex | None:
        """Map the index of the whole set."""
        return ShardSet.open_set_index(self, listed)

    def read_index(self, number: int) -> ShardIndex:
        """Map the index of a shard."""
        path = index_path(os.path.join(self.folder, self.names[number]))  # noqa: PTH118 - the paths are texts
        return ShardIndex(read_or_map(path, DamagedIndexError, most_read=READ_BYTES), shard=self.urls[number])

    def column(self, name: str) -> npt.NDArray[Any]:
        """Map a column of the manifest."""
        return ShardSet.column(self, name)


def _find_here(remote: Remote, folder: str) -> IndexedHere:
    try:
        manifest = Manifest.load(folder)
    except ManifestError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            error.message = (
                f"there is no {NAME} in {folder!r}: index the tar files once, with Remote(...).index_shards()"
            )
        raise
    urls = {file_name(name): name for name in remote.names}
    names = {shard.name for shard in manifest.shards}
    if other := min(names ^ urls.keys(), default=None):
        message = f"{folder!r} has the indexes of {len(names)} tar files, and url names {len(urls)}"
        which = f"and not {other!r}" if other in names else f"among them {other!r}, which is new"
        raise ManifestError(f"{message}, {which}: give all of them, or call index_shards() for these")
    nbytes, ordered = (
        tuple(shard.nbytes for shard in manifest.shards),
        tuple(urls[shard.name] for shard in manifest.shards),
    )
    return IndexedHere(**vars(of_manifest(folder, manifest)), remote=remote, nbytes=nbytes, urls=ordered)


def find_remote(source: str | Remote | Sequence[str] | Store) -> RemoteSet:
    """Find out what there is to read."""
    remote = source if isinstance(source, Remote) else Remote(source)
    names = remote.names
    found: RemoteSet
    if remote.indexes is not None:
        found = _find_here(remote, str(remote.indexes))
    elif len(names) == 1 and not names[0].lower().endswith(".tar"):
        folder = names[0].rstrip("/").removesuffix(f"/{NAME}")
        manifest = _manifest(folder, remote.files)
        nbytes = tuple(shard.nbytes for shard in manifest.shards)
        found = RemoteSet(**vars(of_manifest(folder, manifest)), remote=remote, nbytes=nbytes)
    else:
        heads = list(concurrently(lambda url: _head(remote.files, url), names))
        nbytes = tuple(nbytes for _, nbytes in heads)
        found = RemoteSet(**vars(of_heads(names, [one for one, _ in heads])), remote=remote, nbytes=nbytes)
    if remote.cache is not None:
        remote.cache.wanted = frozenset({*remote.cache.wanted, *found.cached_names()})  # of others that it opened, too
        _check_room(found, remote.cache)
    return found


def _check_room(found: RemoteSet, cache: Cache) -> None:
    """Refuse a cache without room for all shards, where the server sends whole files only: the rest cannot be read."""
    if sum(found.nbytes) <= cache.max_bytes:
        return
    kept = (cache.directory / cached_name(checksum, ".tar") for checksum in found.checksums)
    at = next((at for at, path in enumerate(kept) if found.nbytes[at] > BLOCK and not path.exists()), None)
    if at is None:
        return
    url, files = found.path(at), found.remote.files
    with suppress(ShardError):  # which the read of a sample finds, too
        files.ranges(url, [(BLOCK, BLOCK + 1)])
    if files.sends_whole_files(url):
        message = f"the server does not read ranges, and the shards have {sum(found.nbytes)} bytes, more than the cache"
        cure = f"give a cache_bytes of them and their indexes, some more than {cache.max_bytes}"
        raise ShardError(f"{message}: {cure}, or serve them where ranges are read", shard=url)


class RangedShard(ShardBytes):
    """A shard of which ranges are read."""

    by_ranges = True

    def __init__(self, index: ShardIndex, files: CheckedStore) -> None:
        self.index, self._files = index, files

    def fetch(self, spans: Sequence[Span]) -> KnownParts:
        """See `ShardBytes`."""
        return self._files.parts(self.index.shard, spans)

    def fetch_again(self, begin: int, end: int) -> bytes | None:
        """See `ShardBytes`."""
        return b"".join(self._files.ranges(self.index.shard, [(begin, end)] if begin < end else []))

    def diagnose(self) -> None:
        """See `ShardBytes`."""
        check_shard(self._files, self.index)


def most_index_bytes(shard_bytes: int) -> int:
    """How many bytes the index of a shard may have."""
    return min(_INDEX + 8 * shard_bytes, _INDEX_MOST)


def _head(files: CheckedStore, url: str) -> tuple[Head, int]:
    """What a reader has to know of a shard, and its bytes."""
    try:
        index = fetch_index(files, url, _INDEX_MOST)
        return head(index), index.shard_bytes
    except StoreError as error:
        if not error.missing and error.status not in (401, 403):
            raise
        message = f"there is no index {url + SUFFIX!r} beside it, or it may not be read: call index_shards where the"
        message += " shards are written, and copy all; a list is one of tar files, and a directory is given by its URL"
        raise ShardError(f"{message} alone. {_OTHERS}", shard=url) from error


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{quote(name) if is_web(folder) else name}"


def _manifest(folder: str, files: CheckedStore) -> Manifest:
    url = _inside(folder, NAME)
    try:
        return files.read_as(url, MOST_MANIFEST_BYTES, Manifest.from_json)
    except StoreError as error:
        if error.missing:
            message = f"there is no {NAME} in {folder!r}: call index_shards where the shards are written, and copy all"
            raise ManifestError(f"{message}. {_OTHERS}") from error
        raise
