"""What a path on the command line stands for: the shards of a directory, or one tar file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from headrace.webdatamodule.commands.output import warn
from headrace.webdatamodule.shards.errors import DamagedShardError
from headrace.webdatamodule.shards.index.build import build_index, fitting_index, map_file
from headrace.webdatamodule.shards.index.manifest import NAME
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.reading.sources import find_shards, is_url


def a_path(word: str) -> Path:
    """Read a path; an empty one, as of a variable that is not set, and a URL are refused.

    Args:
        word: From the command line.

    Raises:
        argparse.ArgumentTypeError: It is empty, or a URL.
    """
    if not word:
        raise argparse.ArgumentTypeError("got an empty path, expected the name of a file or directory")
    if is_url(word) and not Path(word).exists():
        cure = "commands work on this machine's files only: give a local path, or read it with IndexedShards in Python"
        raise argparse.ArgumentTypeError(f"got the URL {word!r}, but {cure}")
    return Path(word)


def is_set(where: Path) -> bool:
    """Whether a path stands for all shards of a directory, not for one tar file.

    Args:
        where: A directory, its manifest, or a tar file.
    """
    return where.is_dir() or where.name == NAME


def open_shards(where: Path) -> Iterator[ShardIndex]:
    """The indexes of shards, one after another, each seen to be whole and of its shard.

    Args:
        where: A directory with a manifest, the manifest, or a tar file. The index of a tar file is made in memory
            where there is none that fits.

    Yields:
        The indexes.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ShardError: A manifest, an index or a shard is missing or damaged.
    """
    if not is_set(where):
        yield open_tar(where)
        return
    shards = find_shards(where)
    for number in range(len(shards.names)):
        index = shards.open_index(number, check=True)
        _check(index, Path(shards.path(number)))
        yield index


def open_tar(path: Path) -> ShardIndex:
    """The index of one tar file: the one beside it where it fits, else a new one in memory.

    Args:
        path: The tar file.

    Raises:
        FileNotFoundError: There is none.
        ShardError: It is damaged, or no tar file.
    """
    index = fitting_index(path)
    if index is not None:
        return index
    if index_path(path).exists():
        warn(f"the index of {str(path)!r} is older, damaged or of another shard: the shard itself was read")
    return ShardIndex(build_index(map_file(path), shard=str(path)), shard=str(path))


def _check(index: ShardIndex, path: Path) -> None:
    try:
        view = map_file(path)
    except FileNotFoundError as error:
        raise DamagedShardError(
            "the shard is missing: restore it, or index the directory again", shard=str(path)
        ) from error
    index.check_shard(len(view), lambda begin, end: view[begin:end])
