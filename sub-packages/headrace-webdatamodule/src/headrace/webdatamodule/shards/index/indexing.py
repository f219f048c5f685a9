"""All shards of a directory to their indexes and a manifest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import NamedTuple, Never, TypeVar

from tqdm import tqdm

from headrace.webdatamodule.shards.errors import DamagedIndexError, DamagedShardError, StaleIndexError
from headrace.webdatamodule.shards.format.plain_files import FileBytes, expanded
from headrace.webdatamodule.shards.format.whole import write_whole
from headrace.webdatamodule.shards.index.building import build_index
from headrace.webdatamodule.shards.index.columns import columns_that_stay
from headrace.webdatamodule.shards.index.manifest import Manifest, ShardEntry
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.writing.locking import alone
from headrace.webdatamodule.shards.writing.stopped import refuse_stopped

_Result = TypeVar("_Result")


class SkippedMembersWarning(UserWarning):
    """Some members of the shards are no part of a sample."""


class Indexed(NamedTuple):
    """What came of indexing one shard.

    Args:
        entry: For the manifest.
        members: The member keys that occur.
        skipped: Names of some members that are no part of a sample.
    """

    entry: ShardEntry
    members: tuple[str, ...]
    skipped: tuple[str, ...]


def index_shards(directory: str | Path, *, executor: Executor | None = None, drop_columns: bool = False) -> Manifest:
    """Index the tar files of a directory: a `.hri` file beside each one, and `manifest.json` last.

    An index that is there already and fits its shard is kept: a shard counts as the same when its size, three
    pieces of its content and the order of the two files' times say so. `verify_shards` reads everything.

    Args:
        directory: Where the tar files lie; all that end with `.tar`, in the order of their names.
        executor: Indexes shards in parallel, such as a `ProcessPoolExecutor`; one after another when None.
        drop_columns: Forget the columns of an earlier manifest when the shards are others than then. Sizes that a
            data module asked a function for are forgotten in any case, and asked for again.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: There is no such directory, or there are no tar files in it.
        ShardError: A shard is damaged, or cannot be indexed; the manifest stays as it was.
        ManifestError: The columns of an earlier manifest do not fit the shards any more; or `write_shards` was stopped
            before all shards that it had planned were there.

    Warns:
        SkippedMembersWarning: Members of the shards are no part of a sample.
    """
    folder = expanded(directory)
    refuse_stopped(folder)
    with alone(folder):  # others may add columns to the manifest at the same time
        done = spread(index_shard, _found(folder), executor, what="indexing")
        members = sorted({member for indexed in done for member in indexed.members})
        manifest = Manifest(tuple(indexed.entry for indexed in done), tuple(members))
        cure = "Pass drop_columns=True, and add them again"
        columns = columns_that_stay(folder, manifest, drop=drop_columns, cure=cure)
        manifest = Manifest(manifest.shards, manifest.members, columns)
        manifest.save(folder)
    _warn(done)
    return manifest


def index_shard(path: Path) -> Indexed:
    """Write the index of one shard, unless there is one that fits.

    Args:
        path: The tar file.

    Raises:
        ShardError: The shard is damaged, or cannot be indexed.
    """
    index = fitting_index(path)
    if index is None:
        data = build_index(map_file(path), shard=str(path))
        write_whole(index_path(path), data)
        index = ShardIndex(data, shard=str(path))
    return Indexed(ShardEntry.of(index), index.member_keys, index.skipped_names)


def fitting_index(path: Path) -> ShardIndex | None:
    """The index of a shard; None when there is none, or it is damaged or older than the shard, or of another one.

    Args:
        path: The tar file.
    """
    try:
        if path.stat().st_mtime_ns > index_path(path).stat().st_mtime_ns:
            return None
        index = ShardIndex.open(path, mapped=False)
        index.check_self()
        shard = FileBytes(path)
        index.check_shard(len(shard), lambda begin, end: shard[begin:end])
    except (FileNotFoundError, DamagedIndexError, StaleIndexError):
        return None
    return index if len(shard) else None


def map_file(path: Path) -> FileBytes:
    """The bytes of a file by their places; each is read when it is asked for, so that the file may be cut meanwhile.

    Args:
        path: The file.

    Raises:
        DamagedShardError: It is empty, or no plain file.
    """
    file = FileBytes(path)
    if not len(file):
        raise DamagedShardError("the shard is empty: it has 0 bytes", shard=str(path), offset=0)
    return file


def spread(
    function: Callable[[Path], _Result], paths: Sequence[Path], executor: Executor | None, *, what: str
) -> list[_Result]:
    """Call a function with each file, with a progress bar over their bytes.

    Args:
        function: Can be pickled when the executor is one of processes.
        paths: The files; those that are missing count as empty.
        executor: Where to call it; here when None.
        what: Stands before the bar.

    Returns:
        The results, in the order of the files. The first error cancels what has not begun.
    """
    sizes = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    total = sum(sizes.values())
    bar: tqdm[Never]
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        if executor is None:
            results = []
            for path in paths:
                results.append(function(path))
                bar.update(sizes[path])
            return results
        futures = {executor.submit(function, path): path for path in paths}
        try:
            for future in as_completed(futures):
                future.result()
                bar.update(sizes[futures[future]])
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]


def _found(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))
    if paths:
        return paths
    if not folder.exists():
        raise FileNotFoundError(f"there is no directory {str(folder)!r}: give the one that the .tar files lie in")
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is no directory: give the one that the .tar files lie in")
    raise FileNotFoundError(f"there are no .tar files in {str(folder)!r}")


def _warn(done: Sequence[Indexed]) -> None:
    count = sum(indexed.entry.skipped for indexed in done)
    if count:
        first = next(indexed for indexed in done if indexed.entry.skipped)
        names = ", ".join(repr(name) for name in first.skipped[:3])
        message = f"{count} members are no part of a sample and will not be read, such as {names} in {first.entry.name}"
        warnings.warn(f"{message}: give them a name with an extension if they are", SkippedMembersWarning, stacklevel=3)
