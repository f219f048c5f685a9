"""Which shards a reader reads: from a path, a pattern, a list or a URL to a `ShardSet`."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias, Union
from urllib.parse import urlsplit
from urllib.request import url2pathname

from headrace.webdatamodule.shards.format.files import expanded
from headrace.webdatamodule.shards.format.tar import is_compressed_name
from headrace.webdatamodule.shards.index.manifest import NAME, Manifest
from headrace.webdatamodule.shards.index.shard_index import index_path
from headrace.webdatamodule.shards.reading.local_shards import (
    ShardSet,
    expand_braces,
    head,
    is_url,
    of_heads,
    of_manifest,
    open_index,
)

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.remote.remote import Remote
    from headrace.webdatamodule.shards.stores.store import Store

ShardPlaces: TypeAlias = Union[str, os.PathLike[str], "Remote", "Store", Sequence[str | os.PathLike[str]]]
_PLACES = "a directory of shards, its manifest.json, tar files, or a pattern of these"


def find_shards(source: ShardPlaces) -> ShardSet:
    """Find out what there is to read."""
    if isinstance(source, Mapping):
        raise ValueError(f"a place of shards must be {_PLACES}, got the mapping {source!r:.80}: name sources once")
    if not isinstance(source, (str, os.PathLike)):
        if not isinstance(source, Iterable):
            return _remote(source)
        places = [_local(place) for place in source]
        if any(map(is_url, places)):
            return _remote(list(map(str, places)))
        return _listed([path for place in places for path in _matches(expanded(place).absolute())])
    place = _local(source)
    if is_url(place):
        return _remote(str(place))
    path = expanded(place).absolute()
    if not path.exists():
        return _listed(_matches(path))
    if path.is_dir() or path.name == NAME:
        folder = path if path.is_dir() else path.parent
        return of_manifest(str(folder), Manifest.load(folder))
    return _listed([path])


def _matches(path: Path) -> list[Path]:
    """The path itself where it exists, else what it means as a pattern."""
    if path.exists():
        return [path]
    found = list[Path]()
    for one in expand_braces(str(path)):
        matches = sorted(glob.glob(one)) if glob.has_magic(one) else [one]  # noqa: PTH207 - an absolute path
        if not matches or not os.path.exists(matches[0]):  # noqa: PTH110 - a text
            raise FileNotFoundError(f"there is no {one!r}: give {_PLACES}")
        found += map(Path, matches)
    return found


def _listed(paths: Sequence[Path]) -> ShardSet:
    if not paths:
        raise ValueError("the list of shards is empty: give the path of at least one tar file")
    for path in paths:
        if path.is_dir():
            cure = "a list is one of tar files; several sources are a mapping {name: directory}"
            raise ValueError(f"{str(path)!r} is a directory: {cure}")
        if not path.name.lower().endswith(".tar") and not index_path(path).exists():
            if is_compressed_name(path.name):
                raise ValueError(f"{str(path)!r} is a compressed tar file: decompress it, and call index_shards")
            raise ValueError(f"{str(path)!r} is not a tar: headrace-shards pack makes shards of files, FASTA and LMDBs")
    names = list(map(str, paths))
    return of_heads(names, (head(open_index(name)) for name in names))


def _remote(source: object) -> ShardSet:
    from headrace.webdatamodule.shards.remote.remote import Remote  # local reading does not wait for it
    from headrace.webdatamodule.shards.remote.remote_set import find_remote
    from headrace.webdatamodule.shards.stores.store import Store

    return find_remote(source) if isinstance(source, str | Remote | Store | list) else _refuse(source)


def _refuse(source: object) -> NoReturn:
    raise ValueError(f"source must be {_PLACES}, or a URL or Remote of them, got {source!r:.80}")


def _local(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if not isinstance(place, str | os.PathLike):
        _refuse(place)
    if isinstance(place, str) and place.lower().startswith("file://"):
        return Path(url2pathname(urlsplit(place).path))
    return place
