"""How to read shards on another machine: the options of a URL or a store."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.format.files import output_directory
from headrace.webdatamodule.shards.index.build import index_each
from headrace.webdatamodule.shards.index.manifest import (
    Manifest,
)
from headrace.webdatamodule.shards.reading.local_shards import (
    expand_braces,
    is_url,
)
from headrace.webdatamodule.shards.remote.cache import (
    Cache,
)
from headrace.webdatamodule.shards.remote.indexing import index_tars
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.fsspec import MAX_CONNECTIONS, FsspecStore
from headrace.webdatamodule.shards.stores.obstore import ObstoreFirst, ObstoreStore, make_store
from headrace.webdatamodule.shards.stores.retries import RetryPolicy, check_seconds
from headrace.webdatamodule.shards.stores.store import Store
from headrace.webdatamodule.shards.urls import Secrets, file_name, redacted

_CACHE_BYTES = 100 << 30
CacheUnit: TypeAlias = Literal["auto", "shard", "sample"]


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
