"""Shards on other machines: `s3://`, `gs://`, `https://` and whatever else fsspec knows."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import quote

import numpy.typing as npt

from headrace.webdatamodule._arguments import check_seconds
from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.errors import DamagedIndexError, ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import output_directory, read_or_map
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.build import index_each
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
    expand_braces,
    head,
    is_url,
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
from headrace.webdatamodule.shards.remote.indexing import index_tars
from headrace.webdatamodule.shards.remote.sample_cache import SampleCache, share_of_room
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.fsspec import MAX_CONNECTIONS, FsspecStore
from headrace.webdatamodule.shards.stores.obstore import ObstoreFirst, ObstoreStore, make_store
from headrace.webdatamodule.shards.stores.retries import RetryPolicy
from headrace.webdatamodule.shards.stores.store import KnownParts, Span, Store, StoreError, TrafficCounter
from headrace.webdatamodule.shards.urls import Secrets, file_name, is_web, redacted

_THREADS = 16
_WINDOW = 16 << 20
# Bounds for servers that send without end: of a column, and of each sample's row in it; of an index, which takes less
# than eight times the shard, where packs hold empty members, and where the size of that is unknown.
_COLUMN, _WIDEST = 1 << 20, 1 << 17
_INDEX, _INDEX_MOST = 1 << 20, 1 << 28
_CACHE_BYTES = 100 << 30
_SET_INDEX_MOST = 1 << 26  # more would keep the first batch waiting: indexes of shards are fetched as they are needed
_OTHERS = (
    "For tar files that others host, or whose URLs are signed one by one, keep the indexes on this machine: "
    "Remote(urls, index_dir=...).index_shards(), once"
)
CacheUnit: TypeAlias = Literal["auto", "shard", "sample"]
_One = TypeVar("_One")
_Made = TypeVar("_Made")


@dataclass(frozen=True, repr=False)
class Remote:
    """Shards on another machine, and how to read them; for `IndexedShards`, which also accepts a URL.

    Without a cache, members of a batch that lie close together are read in one request. A cache with room for all
    shards downloads and checks each whole shard when it is first used. A smaller cache keeps as many of the samples
    read as fit. The processes of a machine share the cache. Reading parts of a shard needs a web server that supports
    range requests; with a cache of whole shards, a server that sends only whole files is enough.

    Args:
        url: URL of a directory with a manifest, of a manifest or of a tar file, or several URLs of tar files in one
            place; numbers in braces are expanded. A query, such as that of a signed URL, is kept for all files that
            belong to it. Or a `Store` of your own: a directory of shards with a manifest.
        storage_options: Options of fsspec's file system, such as `{"endpoint_url": ...}` or credentials.
        cache_dir: Directory of the cache; None: no cache.
        cache_bytes: Maximum bytes of the cache. Data of other datasets are evicted to make room, the least recently
            used first; data of datasets that are open in this process stay.
        cache_unit: Unit of the cache: "shard" or "sample"; "auto" is "shard" if all shards fit, else "sample". With
            samples, the first batch waits for its own bytes only.
        retry: How to repeat failed requests.
        timeout: Timeout in seconds, for the requests of one batch or of 32 MiB of a download to the cache.
        lookahead: Bytes of coming batches that each worker of a `ResumableLoader` prefetches; 0 turns it off. Only for
            shards that are read by ranges.
        obstore: Options of the library obstore's store for this URL, `{}` if it needs none.
            Workers then prefetch with obstore, which takes a fraction of the CPU time. None: they prefetch with fsspec.
            Everything else is read with fsspec, so give credentials to both.
        max_connections: Number of ranges that each process reads at the same time. The processes of a node are the
            workers of all its ranks.
        index_dir: Directory of this machine for the indexes of tar files that others host without; `url` is that of
            one or several tar files then. `index_shards` writes the indexes.

    Raises:
        ImportError: `obstore` is given, but not installed.
        TypeError: `lookahead` or `max_connections` is not an int.
        ValueError: An argument is not allowed.

    >>> Remote("s3://bucket/train", {"key": "secret"})  # doctest: +ELLIPSIS
    Remote(url=('s3://bucket/train',), cache_dir=None, cache_bytes=..., lookahead=67108864)
    """

    url: str | Sequence[str] | Store = field(repr=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int = _CACHE_BYTES
    cache_unit: CacheUnit = "auto"
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float = 120.0
    lookahead: int = 64 << 20
    obstore: Mapping[str, Any] | None = field(default=None, repr=False)
    max_connections: int = field(default=MAX_CONNECTIONS, repr=False)
    index_dir: str | os.PathLike[str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        if isinstance(self.url, Store):
            for name in ("storage_options", "obstore", "index_dir"):
                if getattr(self, name):
                    raise ValueError(f"{name} must be left out for a Store, which has its own options")
        else:
            urls = _checked_urls(self.url)
            object.__setattr__(self, "url", urls)
            self._check_places(urls)

    def _check_numbers(self) -> None:
        checked_int("max_connections", self.max_connections, 1, cure="1 reads one range after another")
        checked_int("lookahead", self.lookahead, 0, cure="0 fetches a batch when it is read")
        check_seconds("timeout", self.timeout, above=True)
        if self.cache_unit not in (units := get_args(CacheUnit)):
            raise ValueError(f"cache_unit must be one of {', '.join(map(repr, units))}, got {self.cache_unit!r}")
        if not isinstance(self.retry, RetryPolicy):
            raise ValueError(f"retry must be a RetryPolicy, got {self.retry!r}")
        if self.cache_dir is None and (self.cache_bytes, self.cache_unit) != (_CACHE_BYTES, "auto"):
            raise ValueError("cache_bytes and cache_unit need cache_dir, got none: give a directory, or leave them out")
        if self.cache_dir is not None:
            Cache(os.fspath(self.cache_dir), self.cache_bytes)

    def _check_places(self, urls: Sequence[str]) -> None:
        names = self.names
        if self.index_dir is not None:
            self.indexes  # noqa: B018 - a wrong place is an error here
            files = [file_name(name) for name in names]
            if not all(name.lower().endswith(".tar") for name in files):
                raise ValueError(f"url must be tar files where there is index_dir, got {names[0]!r}: list their URLs")
            if repeated := _repeated(files):
                message = "url must be tar files of different names where there is index_dir"
                raise ValueError(f"{message}, got several of {repeated!r}")
        if self.obstore is not None:
            if not self.lookahead:
                raise ValueError("obstore must be None with lookahead=0, it is for look-ahead: leave one of them out")
            make_store(urls[0], self.obstore)  # so that wrong options are an error here

    def __repr__(self) -> str:
        shown = {"url": self.names, **{one.name: getattr(self, one.name) for one in fields(self) if one.repr}}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __getstate__(self) -> dict[str, Any]:
        for name, value in self.storage_options.items():
            try:
                pickle.dumps(value)
            except Exception as error:  # each class raises its own
                cure = (
                    "fork them (multiprocessing_context='fork'), or let each make it: 'get_client' may name a function"
                )
                if name == "ssl":
                    cure = f"{cure}, and the environment variable SSL_CERT_FILE a file of certificates"
                message = f"storage_options[{name!r}] cannot be sent to workers that are spawned"
                raise TypeError(f"{message} ({type(error).__name__}: {error}): {cure}") from error
        return vars(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The URLs without what is secret in them."""
        return (self.url.url,) if isinstance(self.url, Store) else tuple(Secrets(url).name for url in self.url)

    @property
    def ahead(self) -> ObstoreFirst | CheckedStore:
        """Reads ranges for look-ahead; through obstore in workers only, as none can be forked after its use."""
        return self.files if multiprocessing.parent_process() is None else self._obstore_first

    @cached_property
    def _obstore_first(self) -> ObstoreFirst | CheckedStore:
        if self.obstore is None or isinstance(self.url, Store):
            return self.files
        store = ObstoreStore(self.url[0], self.obstore, self.timeout, self.max_connections)
        return ObstoreFirst(store, self.files)

    @cached_property
    def cache(self) -> Cache | None:
        """Keeps shards or samples; None when nothing is kept."""
        return None if self.cache_dir is None else Cache(os.fspath(self.cache_dir), self.cache_bytes)

    @property
    def indexes(self) -> Path | None:
        """The directory of indexes."""
        if self.index_dir is None:
            return None
        return output_directory("index_dir", self.index_dir, cure="give a directory of this machine").absolute()

    def index_shards(self, *, split_at: str = "first", drop_columns: bool = False, force: bool = False) -> Manifest:
        """Index the tar files at `url`: write indexes and manifest into `index_dir`.

        Each tar file is downloaded into `index_dir`, indexed and deleted. Those that have an index, and did not change,
        are left out, so a run that was stopped is continued by the next one.

        Args:
            split_at: As in `headrace.webdatamodule.index_shards`.
            drop_columns: As in `headrace.webdatamodule.index_shards`.
            force: Whether to download and index all again.

        Returns:
            The manifest.

        Raises:
            ManifestError: The columns of an earlier manifest no longer fit the shards.
            ShardError: A tar file cannot be read, is damaged, or cannot be indexed.
            ValueError: There is no `index_dir`, or an argument is not allowed.
        """
        if (folder := self.indexes) is None:
            raise ValueError("index_shards needs index_dir, got none: give Remote a directory for the indexes")
        folder.mkdir(parents=True, exist_ok=True)
        each = partial(index_tars, self.files, self.names, folder, split_at=split_at, force=force)
        return index_each(each, folder, split_at=split_at, drop_columns=drop_columns, force=force)

    @cached_property
    def files(self) -> CheckedStore:
        """Reads files there."""
        if isinstance(self.url, Store):
            return CheckedStore(self.url, self.retry, self.timeout)
        store = FsspecStore(self.url, self.storage_options, self.timeout, self.max_connections)
        return CheckedStore(store, self.retry, self.timeout)


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


def _checked_urls(place: str | Sequence[str]) -> tuple[str, ...]:
    several = not isinstance(place, str) and isinstance(place, Iterable)
    given: tuple[str, ...] = tuple(place) if several else (str(place),)
    wrong = [url for url in given if not is_url(url)]
    if not given or wrong:
        got = redacted(repr(wrong or place))
        raise ValueError(f"url must be one or more such as 's3://bucket/directory', got {got}")
    urls = tuple(url for one in given for url in expand_braces(one))
    for url in urls:
        if "*" in url.partition("?")[0]:
            cure = "give the directory's URL, or numbers in braces such as a-{000000..000041}.tar"
            raise ValueError(f"url must be one or more without '*', got {Secrets(url).name!r}: {cure}")
    if repeated := _repeated([Secrets(url).name for url in dict.fromkeys(urls)]):
        raise ValueError(f"url must be one or more that differ before a query, got several of {repeated!r}")
    return urls


def _repeated(names: Sequence[str]) -> str | None:
    """A name that occurs more than once."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


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
