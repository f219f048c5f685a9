"""Indexes, on this machine, of tars on another one: each tar is downloaded, indexed and deleted."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from headrace.webdatamodule.shards.errors import DamagedIndexError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import read_plain
from headrace.webdatamodule.shards.index.build import Indexed, index_shard, indexed_as
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.remote.cache import check_shard, fetch_whole
from headrace.webdatamodule.shards.stores.checked import CheckedStore
from headrace.webdatamodule.shards.stores.store import StoreError
from headrace.webdatamodule.shards.urls import file_name


def index_tars(
    files: CheckedStore, names: tuple[str, ...], folder: Path, *, split_at: str, force: bool
) -> list[Indexed]:
    """Write the index of each tar into a folder, unless there is one that fits."""
    bar = tqdm(names, desc="indexing", unit="shard", disable=None)
    return [_index(files, name, folder / file_name(name), split_at=split_at, force=force) for name in bar]


def _index(files: CheckedStore, name: str, place: Path, *, split_at: str, force: bool) -> Indexed:
    if not force and (index := _fitting(files, name, place)) is not None and index.split_at == split_at:
        return indexed_as(index)
    with TemporaryDirectory(prefix=".", dir=place.parent) as temporary:
        tar = Path(temporary) / place.name
        try:
            with tar.open("wb") as file:
                fetch_whole(files, name, files.size(name), file)
            indexed = index_shard(tar, split_at=split_at)
        except ShardError as error:
            error.shard = name
            raise
        index_path(tar).replace(index_path(place))
    return indexed


def _fitting(files: CheckedStore, name: str, place: Path) -> ShardIndex | None:
    """The index of a tar; None when there is none, or it is damaged, or of another tar, or nobody knows."""
    try:
        index = ShardIndex(read_plain(index_path(place), DamagedIndexError, most=sys.maxsize), shard=name)
        index.check_self()
        check_shard(files, index)
    except (FileNotFoundError, DamagedIndexError, StaleIndexError):
        return None
    except StoreError as error:
        if not error.lacks_ranges:
            raise
        return None
    return index
