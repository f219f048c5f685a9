"""Verify a directory of shards: read everything, and report each fault with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.webdatamodule.shards.errors import (
    Damage,
    DamagedIndexError,
    DamagedShardError,
    IndexVersionError,
    ManifestError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.files import Bytes, FileBytes, expanded
from headrace.webdatamodule.shards.format.pack import is_pack_name, read_samples
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.build import build_index, open_listed_shard, spread
from headrace.webdatamodule.shards.index.checksums import (
    GAPS_PER_CHECKSUM,
    checksum32,
    checksum_spans,
    gaps,
    shard_checksums,
)
from headrace.webdatamodule.shards.index.consolidated import SET_INDEX_NAME, Listed, SetIndex
from headrace.webdatamodule.shards.index.manifest import (
    NAME,
    Manifest,
    ShardEntry,
    open_column,
    read_manifest,
    unfinished_write,
)
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex


@dataclass(frozen=True)
class Fault:
    """A fault that `verify_shards` found.

    Args:
        message: Description of the fault.
        shard: Path of the tar file.
        sample: Key of the sample.
        member: Name of the member.
        offset: Byte offset in the tar file of the member's header, or of the first damaged byte.
    """

    message: str
    shard: str | None = None
    sample: str | None = None
    member: str | None = None
    offset: int | None = None

    @classmethod
    def of(cls, error: ShardError) -> Fault:
        """The fault that an error describes."""
        return cls(error.message, error.shard, error.sample, error.member, error.offset)

    def __str__(self) -> str:
        return str(ShardError(**vars(self)))


def verify_shards(directory: str | Path, *, executor: Executor | None = None) -> list[Fault]:
    """Read all bytes of a directory's shards, indexes, columns and manifest, and report every fault.

    Args:
        directory: Directory of the shards.
        executor: Reads shards in parallel, such as a `ProcessPoolExecutor`; None: one after another.

    Returns:
        The faults, first those of the manifest, then those of each shard in order; empty if there are none.

    Raises:
        NotADirectoryError: The directory does not exist.
    """
    folder = expanded(directory)
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is no directory")
    tars = {path.name for path in folder.glob("*.tar") if not path.name.startswith(".")}
    manifest = None
    try:
        manifest = Manifest.load(folder)
    except ManifestError as error:
        faults, entries = [Fault.of(error)], dict.fromkeys(sorted(tars))
    else:
        unfinished = unfinished_write(folder)
        faults = [Fault(f"{folder / NAME}: {unfinished}")] if unfinished else []
        faults += [*_manifest_faults(folder, manifest), *_set_index_faults(folder, manifest)]
        faults += _unlisted_files(folder, manifest, tars)
        entries = {entry.name: entry for entry in manifest.shards}
    paths = [folder / name for name in entries]
    found = spread(partial(_verify_shard, entries=entries), paths, executor, what="verifying")
    if manifest is not None:
        faults += _member_faults(folder, manifest, found)
    return faults + [fault for verified in found for fault in verified.faults]


class _Verified(NamedTuple):
    faults: list[Fault]
    members: tuple[str, ...] | None  # the member keys that occur; None when that cannot be known


def _verify_shard(path: Path, entries: Mapping[str, ShardEntry | None]) -> _Verified:
    """Compare each byte of a shard with its index, and the index with the manifest."""
    faults, members = list[Fault](), None
    try:
        for found in _shard_errors(path, entries[path.name]):
            if isinstance(found, ShardError):
                faults.append(Fault.of(found))
            else:
                members = found.member_keys
    except ShardError as error:  # nothing more can be said of the shard
        faults.append(Fault.of(error))
    except OSError as error:
        faults.append(Fault(f"the shard or its index cannot be read: {error}", str(path)))
    return _Verified(faults, members)


def _shard_errors(path: Path, entry: ShardEntry | None) -> Iterator[ShardError | ShardIndex]:
    view = open_listed_shard(path)
    try:
        index = ShardIndex.open(path, mapped=False)
        index.check_self()
    except FileNotFoundError:
        yield DamagedIndexError("the index is missing: index the shard", shard=str(path))
    except ShardError as error:
        yield error
        if isinstance(error, IndexVersionError):  # the manifest names the checksum of that index
            entry = None
    else:
        if entry is not None and entry != ShardEntry.of(index):
            message = "the index does not match the manifest: index the directory again"
            yield StaleIndexError(message, shard=str(path))
        if not _is_intact(view, index):
            yield from _differences(view, index)
        yield index
        return
    # Without an index, the manifest still says whether the shard is the one that was indexed.
    again = _indexed_again(view, path, entry)
    if entry is not None and entry != ShardEntry.of(again):
        yield DamagedShardError(Damage.OTHER_SHARD, shard=str(path))
    yield again


def _indexed_again(view: FileBytes, path: Path, entry: ShardEntry | None) -> ShardIndex:
    """The index of a shard that has none; names are cut at their last dot where that fits the manifest."""
    with suppress(ShardError):
        by_last_dot = ShardIndex(build_index(view, shard=str(path), split_at="last"), shard=str(path))
        if entry == ShardEntry.of(by_last_dot):
            return by_last_dot
    return ShardIndex(build_index(view, shard=str(path)), shard=str(path))


def _is_intact(view: FileBytes, index: ShardIndex) -> bool:
    # The quick way through a whole shard: when all checksums fit, the headers need not be parsed.
    if len(view) != index.shard_bytes:
        return False
    checksums, gap_checksums = shard_checksums(view, index.offsets.tolist(), index.sizes.tolist())
    return checksums == index.checksums.tolist() and np.array_equal(gap_checksums, index.gap_checksums)


def _differences(view: Bytes, index: ShardIndex) -> Iterator[ShardError]:
    """Each difference between a shard and its index, whose own bytes were checked, with its place."""
    if len(view) != index.shard_bytes:
        message = Damage.OTHER_LENGTH.format(nbytes=len(view), indexed=index.shard_bytes)
        yield DamagedShardError(message, shard=index.shard, offset=min(len(view), index.shard_bytes))
    structure = _structure_fault(view, index)
    if structure is not None:
        yield structure
    yield from _data_faults(view, index)
    yield from _gap_faults(view, index, known=structure.offset if structure else None)


def _structure_fault(view: Bytes, index: ShardIndex) -> ShardError | None:
    """The first fault of the tar file's structure, or the first member that does not match the index."""
    try:
        samples = read_samples(view, shard=index.shard, split_at=index.split_at)
    except ShardError as error:
        of_pack = error.member is not None and is_pack_name(error.member)  # not of one of its samples
        if error.sample is None and error.offset is not None and not of_pack:
            error.sample, member = _place(index, error.offset)
            error.member = error.member or member
        return error
    flat = (index.layout_numbers.tolist(), index.offsets.tolist(), index.sizes.tolist())
    indexed = _members(index.keys, index.suffixes, *flat)
    real = _members(samples.keys, list(samples.layouts), samples.layout_of, samples.offsets, samples.sizes)
    pairs = enumerate(zip_longest(indexed, real))
    position = next((position for position, (ours, found) in pairs if ours != found), None)
    if position is None:
        return None
    if position < index.n_members:
        return _at(index, position, Damage.OTHER_MEMBER)
    return DamagedShardError(Damage.OTHER_MEMBER, shard=index.shard, offset=samples.offsets[position] - BLOCK)


def _place(index: ShardIndex, offset: int) -> tuple[str | None, str | None]:
    """Which sample and member a byte belongs to: by its data, the padding after, or its headers; or to none."""
    position = int(np.searchsorted(index.ends, offset, "right"))
    if position == index.n_members:
        return None, None
    sample, member = index.locate(position)
    return index.key(sample), member


def _members(
    keys: Sequence[str],
    layouts: Sequence[Sequence[str]],
    layout_of: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each member."""
    names = [f"{key}.{suffix}" for key, n in zip(keys, layout_of, strict=True) for suffix in layouts[n]]
    return zip(names, offsets, sizes, strict=True)


def _data_faults(view: Bytes, index: ShardIndex) -> Iterator[ShardError]:
    offsets, sizes, checksums = index.offsets.tolist(), index.sizes.tolist(), index.checksums.tolist()
    for position, (offset, size, checksum) in enumerate(zip(offsets, sizes, checksums, strict=True)):
        if offset + size > len(view):
            yield _at(index, position, Damage.DATA_BEHIND_END.format(count=index.n_members - position))
            return
        if checksum32(view, offset, offset + size) != checksum:
            yield _at(index, position, Damage.DATA.format(size=size))


def _at(index: ShardIndex, position: int, message: str) -> ShardError:
    sample, member = index.locate(position)
    place = index.place(position)
    return DamagedShardError(message, shard=index.shard, sample=index.key(sample), member=member, offset=place)


def _gap_faults(view: Bytes, index: ShardIndex, *, known: int | None) -> Iterator[ShardError]:
    between = gaps(index.offsets.tolist(), index.sizes.tolist(), index.shard_bytes)
    for number, checksum in enumerate(index.gap_checksums.tolist()):
        parts = between[number * GAPS_PER_CHECKSUM : (number + 1) * GAPS_PER_CHECKSUM]
        begin, end = parts[0][0], parts[-1][1]
        if end > len(view) or checksum_spans(view, parts) == checksum:
            continue
        padding = [fault for part in parts for fault in _padding_faults(view, index, *part)]
        yield from padding
        if not padding and not (known is not None and begin <= known < end):
            sample, member = _place(index, begin)
            message = Damage.GAP.format(begin=begin, end=end)
            yield DamagedShardError(message, shard=index.shard, sample=sample, member=member, offset=begin)


def _padding_faults(view: Bytes, index: ShardIndex, begin: int, end: int) -> Iterator[ShardError]:
    # Writers fill up with zeros; what is not zero there is the damage itself.
    padding = bytes(view[begin : min(begin + -begin % BLOCK, end)])
    if padding.strip(b"\0"):
        offset = begin + len(padding) - len(padding.lstrip(b"\0"))
        sample, member = _place(index, offset)
        yield DamagedShardError(Damage.PADDING, shard=index.shard, sample=sample, member=member, offset=offset)


def _manifest_faults(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    if read_manifest(folder) != manifest.to_json().encode():
        yield Fault(f"{folder / NAME}: the text was changed, though not what it says")
    for column in manifest.columns:
        path = folder / column.file
        if not path.is_file():
            yield Fault(f"{path}: the file of the column {column.name!r} is missing")
            continue
        try:
            open_column(folder, manifest, column.name)
        except ManifestError as error:
            yield Fault(f"{path}: {error.message}")


def _set_index_faults(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    path = folder / SET_INDEX_NAME
    try:
        found = SetIndex.open(folder, Listed.of(manifest))
        if found is not None:
            for number, entry in enumerate(manifest.shards):
                found.shard(number, str(folder / entry.name)).check_self()
        elif path.exists() and len(manifest.shards) > 1:
            yield Fault(f"{path}: the index of the set belongs to another manifest: index the directory again")
    except ShardError as error:
        cure = "index the directory again with force=True (--force)"
        yield Fault(f"{path}: {error.message.removeprefix(f'{path}: ')}; {cure}", error.shard)


def _member_faults(folder: Path, manifest: Manifest, found: Sequence[_Verified]) -> Iterator[Fault]:
    # A shard of unknown members may have any: then only those are wrong that the manifest lacks.
    known = [verified.members for verified in found if verified.members is not None]
    real, listed = sorted(set().union(*known)), sorted(manifest.members)
    if not set(real) <= set(listed) or (len(known) == len(found) and real != listed):
        yield Fault(f"{folder / NAME}: the manifest names the members {listed}, but the shards have {real}")


def _unlisted_files(folder: Path, manifest: Manifest, tars: set[str]) -> Iterator[Fault]:
    known = {entry.name for entry in manifest.shards}
    for name in sorted(tars - known):
        message = "the shard is not in the manifest, and no reader reads it: index the directory again"
        yield Fault(message, str(folder / name))
    either = known | tars
    for path in sorted(folder.glob(f"*.tar{SUFFIX}")):
        if path.name.removesuffix(SUFFIX) not in either:
            yield Fault(f"{path}: the index has no shard: restore the shard, or remove the index")
