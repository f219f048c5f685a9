"""Indexing: the bytes of a shard to the bytes of its index, and a directory to its indexes and manifest."""

from __future__ import annotations

import errno
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Never, TypeVar

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from headrace.webdatamodule._shared.display import counted
from headrace.webdatamodule.shards.errors import (
    Damage,
    DamagedIndexError,
    DamagedShardError,
    ManifestError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.files import (
    Bytes,
    FileBytes,
    atomic_write,
    directory_lock,
    expanded,
    read_plain,
)
from headrace.webdatamodule.shards.format.pack import read_samples
from headrace.webdatamodule.shards.format.tar import Samples, compressed_beside, few_samples
from headrace.webdatamodule.shards.index.checksums import content_fingerprint, fingerprint_ranges, shard_checksums
from headrace.webdatamodule.shards.index.consolidated import write_set_index
from headrace.webdatamodule.shards.index.container import pack
from headrace.webdatamodule.shards.index.keys import describe_keys
from headrace.webdatamodule.shards.index.manifest import (
    Manifest,
    ShardEntry,
    kept_columns,
    refuse_foreign,
    store_column,
    unfinished_write,
)
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path

_NAMED = 16
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_Result = TypeVar("_Result")


class SkippedMembersWarning(UserWarning):
    """Some members of the shards belong to no sample."""


class ChangedShardWarning(UserWarning):
    """The data of members differ from those that an earlier index of the shard describes."""


class Indexed(NamedTuple):
    """What came of indexing one shard."""

    entry: ShardEntry
    members: tuple[str, ...]
    skipped: tuple[str, ...]
    changed: str  # what differs from the earlier index, in words
    dotted: int  # members with dots in their keys
    dotted_name: str  # of one of them


def index_shards(
    directory: str | Path,
    *,
    executor: Executor | None = None,
    split_at: str = "first",
    drop_columns: bool = False,
    force: bool = False,
) -> Manifest:
    """Index the tar files of a directory: write a `.hri` file beside each one, and `manifest.json` last.

    The file `manifest.hrs` holds the indexes of all shards, so that readers need to open only one file.

    Indexes of unchanged shards are kept. A shard counts as unchanged if its size and three pieces of its content match
    the index, and the index is newer than the shard; `verify_shards` reads everything. If nothing has changed, nothing
    is written, so the directory may be read-only.

    Args:
        directory: Directory of the tar files; all `.tar` files are used, in the order of their names.
        executor: Indexes shards in parallel, such as a `ProcessPoolExecutor`; None: one after another.
        split_at: "first" or "last": the dot of a member's name that ends the sample's key and begins the member's.
            webdataset cuts at the first one; "last" is for ids with dots, and keeps these in the keys.
        drop_columns: Whether to drop the columns of an earlier manifest if the shards have changed. Sizes that a data
            module computed with a function are always dropped then, and computed again.
        force: Whether to read and index all shards again, even if they are unchanged.

    Returns:
        The manifest.

    Raises:
        FileNotFoundError: The directory does not exist or has no tar files.
        FileExistsError: The directory has a `manifest.json` of another program.
        PermissionError: The directory is read-only: index a folder of symbolic links to the tar files.
        IndexVersionError: An index was written by another release, and `force` is False.
        ShardError: A shard is damaged, or cannot be indexed; the manifest stays as it was.
        ManifestError: The columns of an earlier manifest no longer fit the shards, or `write_shards` was stopped before
            it had written all planned shards.

    Warns:
        SkippedMembersWarning: Some members belong to no sample.
        UserWarning: The members make unusually few samples, as they do where ids have dots.
        ChangedShardWarning: A shard has the members of its earlier index, but other data in some of them. That may be
            damage: the new index describes the data as they are, so that no later check finds it.
    """
    folder = expanded(directory)
    unfinished = unfinished_write(folder)
    if unfinished:  # a part of a set is not taken for all of it
        raise ManifestError(unfinished)
    paths = _tar_files(folder)
    index = partial(index_shard, split_at=split_at, force=force)
    each = partial(spread, index, paths, executor, what="indexing")
    return index_each(each, folder, split_at=split_at, drop_columns=drop_columns, force=force)


def index_each(
    each: Callable[[], Sequence[Indexed]], folder: Path, *, split_at: str, drop_columns: bool, force: bool
) -> Manifest:
    """Write the manifest of the shards that `each` indexes into a folder, and warn of what was found."""
    if split_at not in ("first", "last"):
        raise ValueError(f"split_at must be 'first' or 'last', got {split_at!r}")
    refuse_foreign(folder)
    with directory_lock(folder):  # others may add columns to the manifest at the same time
        done = each()
        described = [(indexed.entry, indexed.members) for indexed in done]
        cure = "Pass drop_columns=True, and add them again"
        with _explaining_read_only(folder):
            manifest = save_manifest(folder, described, cure=cure, drop_columns=drop_columns, force=force)
    _warn(done)
    return manifest


def save_manifest(
    folder: Path,
    shards: Sequence[tuple[ShardEntry, Iterable[str]]],
    columns: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    *,
    cure: str,
    drop_columns: bool = False,
    force: bool = False,
) -> Manifest:
    """Write new columns, the index of the set, then the manifest; nothing where all is there already.

    Columns of an earlier manifest of the same shards stay; of other shards they are refused, with the cure.
    """
    members = sorted({member for _, some in shards for member in some})
    manifest = Manifest(tuple(entry for entry, _ in shards), tuple(members))
    earlier = kept_columns(folder, manifest, replaced=columns, drop=drop_columns, cure=cure)
    manifest = replace(manifest, columns=earlier)
    for name, array in columns.items():
        manifest = manifest.with_column(store_column(folder, name, array))
    try:
        write_set_index(folder, manifest, force=force)
    except OSError as error:
        # Readers can do without it: a set that lacks only this may lie where nothing can be written.
        if error.errno not in _READ_ONLY:
            raise
    manifest.save(folder)
    return manifest


@contextmanager
def _explaining_read_only(folder: Path) -> Iterator[None]:
    """Name the way out where nothing can be written into a directory."""
    try:
        yield
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        raise PermissionError(
            f"the indexes cannot be written beside the shards, as {str(folder)!r} is read-only ({error.strerror}): "
            "make a folder of symbolic links to the .tar files, and index that"
        ) from error


def index_shard(path: Path, *, split_at: str = "first", force: bool = False) -> Indexed:
    """Write the index of one shard, unless there is one that fits."""
    index, changed = None if force else fitting_index(path), ""
    if index is None or index.split_at != split_at:
        data = build_index(open_shard_bytes(path), shard=str(path), split_at=split_at)
        index = ShardIndex(data, shard=str(path))
        changed = _changed(path, index)
        if not _holds(index_path(path), data):  # also where a copy has other times, and cannot be written to
            with _explaining_read_only(path.parent):
                atomic_write(index_path(path), data, name_later=True)  # with all others, before the manifest is written
    return indexed_as(index, changed)


def indexed_as(index: ShardIndex, changed: str = "") -> Indexed:
    """What an index says of its shard."""
    return Indexed(ShardEntry.of(index), index.member_keys, index.skipped_names, changed, *_dotted(index))


def _dotted(index: ShardIndex) -> tuple[int, str]:
    """How many members have dots in their keys, and the name of one of them."""
    of_layouts = np.array([sum("." in suffix for suffix in layout) for layout in index.suffixes], np.int64)
    counts = of_layouts[index.layout_numbers]
    if not counts.any():
        return 0, ""
    sample = int(counts.argmax())
    suffixes = index.suffixes[int(index.layout_numbers[sample])]
    return int(counts.sum()), f"{index.key(sample)}.{next(suffix for suffix in suffixes if '.' in suffix)}"


def _changed(path: Path, new: ShardIndex) -> str:
    """Which members of a shard have other data than in its earlier index, if that has the same members."""
    try:
        old = ShardIndex.open(path, mapped=False)
        old.check_self()
    except (FileNotFoundError, ShardError):
        return ""
    same = old.layouts == new.layouts and np.array_equal(old.layout_numbers, new.layout_numbers)
    same = same and np.array_equal(old.offsets, new.offsets) and np.array_equal(old.sizes, new.sizes)
    if not same or list(old.keys) != list(new.keys):
        return ""
    others = np.flatnonzero(old.checksums != new.checksums)
    if not others.size:
        return ""
    _, first = new.locate(int(others[0]))
    return f"member {first!r}" if others.size == 1 else f"{others.size:,} members, the first of them {first!r}"


def fitting_index(path: Path) -> ShardIndex | None:
    """The index of a shard; None when there is none, or it is damaged, older than the shard or of another shard.

    One of another release is an error, and never taken for damage, which would be overwritten.
    """
    try:
        if path.stat().st_mtime_ns > index_path(path).stat().st_mtime_ns:
            return None
        index = ShardIndex.open(path, mapped=False)
        index.check_self()
        shard = FileBytes(path)
        index.check_shard(len(shard), shard.between)
    except (FileNotFoundError, DamagedIndexError, StaleIndexError):
        return None
    return index if len(shard) else None


def build_index(data: Bytes, *, shard: str = "", split_at: str = "first") -> bytes:
    """Read a whole shard, check its structure and make its index; the same for the same shard."""
    view = data if isinstance(data, FileBytes) else memoryview(data)
    try:
        samples = read_samples(view, shard=shard, split_at=split_at)
        checksums, gap_checksums = shard_checksums(view, samples.offsets, samples.sizes)
        return pack_index(samples, len(view), checksums, gap_checksums, lambda begin, end: view[begin:end])
    except ShardError as error:
        error.shard = error.shard or shard or None
        raise


def pack_index(
    samples: Samples,
    shard_bytes: int,
    checksums: Sequence[int],
    gap_checksums: npt.ArrayLike,
    read: Callable[[int, int], bytes | memoryview],
) -> bytes:
    """Make an index of what is known of a shard."""
    layouts = list(samples.layouts)
    pieces = [read(begin, end) for begin, end in fingerprint_ranges(shard_bytes, samples.end)]
    keys, key_arrays = describe_keys(samples.keys)
    arrays: dict[str, npt.NDArray[Any]] = {
        "offsets": _narrow(np.array(samples.offsets, np.uint64)),
        "sizes": _narrow(np.array(samples.sizes, np.uint64)),
        "checksums": np.array(checksums, np.uint32),
        "gap_checksums": np.array(gap_checksums, np.uint64),
    }
    if len(layouts) > 1:
        arrays["layout_of"] = np.array(samples.layout_of, np.uint16 if len(layouts) <= 1 << 16 else np.uint32)
    if len({len(layout) for layout in layouts}) > 1:
        widths = [len(layouts[number]) for number in samples.layout_of]
        arrays["starts"] = _narrow(np.array([0, *accumulate(widths[:-1])], np.uint64))
    description = {
        "samples": len(samples.keys),
        "shard_bytes": shard_bytes,
        "end": samples.end,
        "content": content_fingerprint(shard_bytes, pieces),
        "layouts": layouts,
        "keys": keys,
        "skipped": Counter(member.reason for member in samples.skipped),
        "skipped_names": [member.name for member in samples.skipped if member.reason not in ("directory", "label")][
            :_NAMED
        ],
        "packs": samples.packs,
        "split_at": samples.split_at,
    }
    return pack(description, {**arrays, **key_arrays})


def _narrow(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    # 4 bytes each where they fit, which they do for shards below 4 GiB.
    return numbers if numbers.size and int(numbers.max()) >> 32 else numbers.astype(np.uint32)


def open_shard_bytes(path: Path) -> FileBytes:
    """The bytes of a shard, read when they are asked for, so that the file may be cut meanwhile; it is not empty."""
    file = FileBytes(path)
    if not len(file):
        raise DamagedShardError(Damage.EMPTY, shard=str(path), offset=0)
    return file


def open_listed_shard(path: Path) -> FileBytes:
    """The bytes of a shard that a manifest lists."""
    try:
        return open_shard_bytes(path)
    except FileNotFoundError as error:
        raise DamagedShardError(Damage.MISSING, shard=str(path)) from error


def spread(
    function: Callable[[Path], _Result], paths: Sequence[Path], executor: Executor | None, *, what: str
) -> list[_Result]:
    """Call a function with each file, in order, with a progress bar; the first error cancels the rest."""
    sizes = {path: path.stat().st_size if path.exists() else 0 for path in paths}
    bar: tqdm[Never]
    with tqdm(total=sum(sizes.values()), desc=what, unit="B", unit_scale=True, disable=None) as bar:
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


def _holds(path: Path, data: bytes) -> bool:
    try:
        return read_plain(path, DamagedIndexError, most=len(data)) == data
    except (OSError, ShardError):
        return False


def _tar_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))
    if paths:
        return paths
    if not folder.exists():
        raise FileNotFoundError(f"there is no directory {str(folder)!r}: give the one that the .tar files lie in")
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is no directory: give the one that the .tar files lie in")
    inside = sorted({path.parent for path in folder.glob("*/*.tar") if not path.name.startswith(".")})
    beside = f", only in folders of it: index each by itself, such as {str(inside[0])!r}" if inside else ""
    raise FileNotFoundError(f"there are no .tar files in {str(folder)!r}{compressed_beside(folder) or beside}")


def _warn(done: Sequence[Indexed]) -> None:
    count = sum(indexed.entry.skipped for indexed in done)
    if count:
        first = next(indexed for indexed in done if indexed.entry.skipped)
        names = ", ".join(repr(name) for name in first.skipped[:3])
        members = f"{counted(count, 'member')} will not be read, as no part of a sample"
        message = f"{members}, such as {names} in {first.entry.name}"
        warnings.warn(f"{message}: give them a name with an extension if they are", SkippedMembersWarning, stacklevel=4)
    dotted, samples = (sum(counts) for counts in zip(*((one.dotted, one.entry.samples) for one in done), strict=True))
    name = next((indexed.dotted_name for indexed in done if indexed.dotted), "")
    if name and (message := few_samples("members", dotted, samples, name)):
        warnings.warn(message, UserWarning, stacklevel=4)
    changed = [indexed for indexed in done if indexed.changed]
    if changed:
        more = f" (such shards: {len(changed):,})" if len(changed) > 1 else ""
        warnings.warn(
            f"{changed[0].entry.name} has other data than when it was indexed before: {changed[0].changed}{more}. The "
            "new index describes the data as they are now. If nobody changed them on purpose, they are damaged: "
            "restore the shard from a copy, and index it again",
            ChangedShardWarning,
            stacklevel=4,
        )
