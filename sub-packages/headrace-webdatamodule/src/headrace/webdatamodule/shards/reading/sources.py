"""Which shards a reader reads, in which order, and what it expects of each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy.typing as npt
import xxhash

from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import ManifestError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import expanded
from headrace.webdatamodule.shards.index.manifest import NAME, Manifest, open_column
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.reading.shard_reader import Mapped, OpenShard

_PATTERN = re.compile(r"[*?\[]|\{[^{}]*(\.\.|,)[^{}]*\}")

_FAR_PATTERN = re.compile(r"\*[^/?#]*\.tar|\{[0-9]+\.\.[0-9]+\}")


def missing(path: Path) -> FileNotFoundError:
    """The error of a path where nothing is.

    Args:
        path: As it was given.
    """
    if _PATTERN.search(str(path)):
        cure = "patterns and braces are not expanded; give the directory, or a list of tar files"
        return FileNotFoundError(f"there is no {str(path)!r}: {cure}")
    return FileNotFoundError(f"there is no {str(path)!r}: give a directory of shards, its manifest.json or tar files")


def refuse_patterns(urls: Sequence[str]) -> None:
    """Refuse patterns of URLs.

    Args:
        urls: Of shards.

    Raises:
        ValueError: One has braces or asterisks.

    >>> refuse_patterns(["s3://bucket/a-{000000..000005}.tar"])
    Traceback (most recent call last):
    ValueError: 's3://bucket/a-{000000..000005}.tar' is a pattern, and none is expanded: give the directory's URL
    """
    for url in urls:
        if _FAR_PATTERN.search(url):
            raise ValueError(f"{url!r} is a pattern, and none is expanded: give the directory's URL")


def refuse_others(paths: Sequence[Path]) -> None:
    """Refuse a list of shards that holds something else.

    Args:
        paths: As they were given, at least one.

    Raises:
        FileNotFoundError: A pattern.
        ValueError: A directory, or a file that is no tar.
    """
    for path in paths:
        if path.is_dir():
            cure = "a list is one of tar files; for several sources give IndexedWebDataModule {name: directory}"
            raise ValueError(f"{str(path)!r} is a directory: {cure}")
        if not path.exists() and _PATTERN.search(str(path)):
            raise missing(path)
        if path.exists() and not path.name.lower().endswith(".tar") and not _has_index(path):
            raise ValueError(f"{str(path)!r} is not a tar: headrace-shards pack makes shards of files, FASTA and LMDBs")


def _has_index(path: Path) -> bool:
    return os.path.exists(f"{path}.hri")  # noqa: PTH110 - a text


if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote.shards import Remote

Head = tuple[int, int, tuple[str, ...]]

Source: TypeAlias = Union[str, os.PathLike[str], "Remote", Sequence[str | os.PathLike[str]]]

_One = TypeVar("_One")

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class ShardSet:
    """Some shards; small enough to be sent to each worker.

    Args:
        folder: Where the manifest lies; empty when there is none.
        names: Paths of the tar files, seen from there.
        samples: Number of samples in each.
        checksums: Of their indexes.
        members: The member keys that occur, sorted.
        columns: Names of the manifest's columns.
        fingerprint: Stands for all bytes of all shards.
    """

    folder: str
    names: tuple[str, ...]
    samples: tuple[int, ...]
    checksums: tuple[int, ...]
    members: tuple[str, ...]
    columns: tuple[str, ...]
    fingerprint: str

    def path(self, number: int) -> str:
        """Where a shard lies."""
        return os.path.join(self.folder, self.names[number])  # noqa: PTH118 - the paths are texts

    def open_index(self, number: int, *, check: bool) -> ShardIndex:
        """Map the index of a shard.

        Args:
            number: Of the shard.
            check: Whether to read all of it and check it against its checksum.

        Raises:
            ShardError: It is missing, damaged, or another one than expected.
        """
        path = self.path(number)
        index = self.read_index(number)
        if (index.checksum, index.n_samples) != (self.checksums[number], self.samples[number]):
            message = "the index is another one than when this dataset was made, or than the manifest names"
            raise StaleIndexError(f"{message}: call index_shards, and make the dataset again", shard=path)
        if check:
            index.check_self()
        return index

    def read_index(self, number: int) -> ShardIndex:
        """Map the index of a shard, whichever it is."""
        return open_index(self.path(number))

    def open_shard(
        self, index: ShardIndex, keys: Sequence[str] | None, *, verify: bool, max_bytes: int = MAX_BYTES
    ) -> OpenShard:
        """Map a shard; the arguments are those of `OpenShard`."""
        return OpenShard(index, Mapped(index, verified=verify), keys, verify=verify, max_bytes=max_bytes)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Map a column of the manifest.

        Args:
            name: Its name.

        Raises:
            ManifestError: There is no such column.
            StaleIndexError: The manifest was replaced since.
        """
        if not self.folder:
            raise ManifestError(f"there is no column {name!r}: a list of shards has none; give their directory")
        manifest = Manifest.load(self.folder)
        if manifest.fingerprint != self.fingerprint:
            raise StaleIndexError(f"the manifest in {self.folder!r} was replaced: make the dataset again")
        return open_column(self.folder, manifest, name)

    @staticmethod
    def each(function: Callable[[_One], _Made], things: Iterable[_One]) -> Iterator[_Made]:
        """Call a function for some things, one after another."""
        return map(function, things)


def open_index(path: str) -> ShardIndex:
    """Map the index of a shard.

    Args:
        path: Of the tar file.

    Raises:
        ShardError: It is missing or damaged.
    """
    try:
        return ShardIndex.open(path)
    except FileNotFoundError as error:
        message = f"there is no index {index_path(path).name!r} beside the shard: call index_shards on its directory"
        raise ShardError(message, shard=path) from error


def find_shards(source: Source) -> ShardSet:
    """Find out what there is to read.

    Args:
        source: A directory with a manifest, the path of a manifest, that of a tar file, or a list of such; or the
            URL of one, or a `Remote`.

    Raises:
        FileNotFoundError: There is nothing at that path.
        ManifestError: There is no manifest, or it is damaged.
        ShardError: A tar file of the list has no index, or a damaged one.
        ValueError: The list is empty or names a directory, or a file is no tar.
    """
    if isinstance(source, Mapping):
        raise ValueError("one source is read here: for several give IndexedWebDataModule {name: directory}")
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable):
            return _far(source)
        places = [_local(place) for place in source]
        far = any(map(is_url, places))
        return _far(list(map(str, places))) if far else _listed([expanded(path).absolute() for path in places])
    place = _local(source)
    if is_url(place):
        return _far(str(place))
    path = expanded(place).absolute()
    if not path.exists():
        raise missing(path)
    if path.is_dir() or path.name == NAME:
        folder = path if path.is_dir() else path.parent
        return of_manifest(str(folder), Manifest.load(folder))
    return _listed([path])


def is_url(place: object) -> bool:
    """Whether shards at a place are read through fsspec.

    Args:
        place: A path or a URL.

    >>> [is_url(place) for place in ("s3://bucket/a", "C:/data", "/data", "pipe:cat a.tar")]
    [True, False, False, False]
    """
    return isinstance(place, str) and bool(re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+(://|::)", place))


def of_manifest(folder: str, manifest: Manifest) -> ShardSet:
    """The shards that a manifest lists.

    Args:
        folder: Where it lies.
        manifest: The manifest.
    """
    return ShardSet(
        folder,
        tuple(shard.name for shard in manifest.shards),
        tuple(shard.samples for shard in manifest.shards),
        tuple(int(shard.index, 16) for shard in manifest.shards),
        manifest.members,
        tuple(column.name for column in manifest.columns),
        manifest.fingerprint,
    )


def of_heads(names: Sequence[str], heads: Iterable[Head]) -> ShardSet:
    """Shards without a manifest.

    Args:
        names: Where they lie, at least one.
        heads: The number of samples, the index's checksum and the member keys of each.
    """
    samples, checksums, members = zip(*heads, strict=True)
    every = tuple(sorted(set().union(*members)))
    fingerprint = xxhash.xxh3_128_hexdigest(repr((samples, checksums)).encode())
    return ShardSet("", tuple(names), samples, checksums, every, (), fingerprint)


def _listed(paths: Sequence[Path]) -> ShardSet:
    if not paths:
        raise ValueError("the list of shards is empty: give the path of at least one tar file")
    refuse_others(paths)
    names = list(map(str, paths))
    return of_heads(names, map(_head, names))


def _head(path: str) -> Head:
    index = open_index(path)
    return index.n_samples, index.checksum, index.member_keys


def _far(source: str | Remote | Sequence[str]) -> ShardSet:
    from headrace.webdatamodule.shards.remote.shards import find_remote  # who reads from the disk does not wait for it

    return find_remote(source)


def _local(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if isinstance(place, str) and place.lower().startswith("file://"):
        return Path(url2pathname(urlsplit(place).path))
    return place
