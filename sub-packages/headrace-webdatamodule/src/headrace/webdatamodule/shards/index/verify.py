"""Reading everything again: each damage of a directory of shards, with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    ManifestError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.format.plain_files import FileBytes, expanded
from headrace.webdatamodule.shards.index.building import build_index
from headrace.webdatamodule.shards.index.checksums import checksum_between
from headrace.webdatamodule.shards.index.columns import open_column
from headrace.webdatamodule.shards.index.indexing import map_file, spread
from headrace.webdatamodule.shards.index.locating import differences
from headrace.webdatamodule.shards.index.manifest import NAME, Manifest, ShardEntry, read_manifest
from headrace.webdatamodule.shards.index.shard_index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.writing.stopped import stopped_write


@dataclass(frozen=True)
class Fault:
    """One damage.

    Args:
        message: What is wrong.
        shard: Path of the tar file.
        sample: Key of the sample.
        member: Name of the member.
        offset: Byte in the tar file: of the member's header, or where the damage begins.
    """

    message: str
    shard: str | None = None
    sample: str | None = None
    member: str | None = None
    offset: int | None = None

    @classmethod
    def of(cls, error: ShardError) -> Fault:
        """The fault that an error tells of.

        Args:
            error: Any error about shards.
        """
        return cls(error.message, error.shard, error.sample, error.member, error.offset)

    def __str__(self) -> str:
        place = {"shard": self.shard, "sample": self.sample, "member": self.member}
        return str(ShardError(self.message, offset=self.offset, **place))


def verify_shards(directory: str | Path, *, executor: Executor | None = None) -> list[Fault]:
    """Read all bytes of a directory's shards, indexes, columns and manifest, and find each damage.

    Args:
        directory: Where they lie.
        executor: Reads shards in parallel, such as a `ProcessPoolExecutor`; one after another when None.

    Returns:
        The faults, those of the manifest first, then in the order of the shards; empty when all is well.

    Raises:
        NotADirectoryError: There is no such directory.
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
        stopped = stopped_write(folder)
        faults = [Fault(f"{folder / NAME}: {stopped}")] if stopped else []
        faults += [*_manifest_faults(folder, manifest), *_strangers(folder, manifest, tars)]
        entries = {entry.name: entry for entry in manifest.shards}
    paths = [folder / name for name in entries]
    found = spread(partial(verify_shard, entries=entries), paths, executor, what="verifying")
    if manifest is not None:
        faults += _member_faults(folder, manifest, found)
    return faults + [fault for one in found for fault in one.faults]


class Verified(NamedTuple):
    """What came of verifying one shard.

    Args:
        faults: All that is wrong.
        members: The member keys that occur; None when that cannot be told.
    """

    faults: list[Fault]
    members: tuple[str, ...] | None


def verify_shard(path: Path, entries: Mapping[str, ShardEntry | None]) -> Verified:
    """Compare each byte of a shard with its index, and the index with the manifest.

    Args:
        path: The tar file.
        entries: What the manifest says, by the names of the shards.

    Returns:
        The faults, and the member keys.
    """
    faults, members = list[Fault](), None
    try:
        for found in _shard_errors(path, entries[path.name]):
            if isinstance(found, ShardError):
                faults.append(Fault.of(found))
            else:
                members = found.member_keys
    except ShardError as error:  # the shard was cut while it was read
        faults.append(Fault.of(error))
    except OSError as error:
        faults.append(Fault(f"the shard or its index cannot be read: {error}", str(path)))
    return Verified(faults, members)


def _shard_errors(path: Path, entry: ShardEntry | None) -> Iterator[ShardError | ShardIndex]:
    try:
        view = map_file(path)
    except FileNotFoundError:
        yield DamagedShardError("the shard is missing: restore it, or index the directory again", shard=str(path))
        return
    except ShardError as error:
        yield error
        return
    try:
        index = ShardIndex.open(path, mapped=False)
        index.check_self()
    except FileNotFoundError:
        yield DamagedIndexError("the index is missing: index the shard", shard=str(path))
    except ShardError as error:
        yield error
    else:
        if entry is not None and not _is_of(index, entry):
            message = "the index is another one than the manifest's: index the directory again"
            yield StaleIndexError(message, shard=str(path))
        if not _same(view, index):
            yield from _differences(view, index)
        yield index
        return
    yield from _unindexed(view, path, entry)


def _differences(view: FileBytes, index: ShardIndex) -> Iterator[ShardError]:
    found = False
    for error in differences(view, index):
        found = True
        yield error
    if not found:
        message = "the index is another one than indexing gives, though all members are where it says: index the shard"
        yield StaleIndexError(f"{message} again", shard=index.shard)


def _same(view: FileBytes, index: ShardIndex) -> bool:
    # The quick way through a whole shard: its index is a function of its bytes.
    try:
        return ShardIndex(build_index(view)).checksum == index.checksum
    except ShardError:
        return False


def _unindexed(view: FileBytes, path: Path, entry: ShardEntry | None) -> Iterator[ShardError | ShardIndex]:
    # Without an index, the manifest still tells whether the shard is the one that was indexed.
    try:
        again = ShardIndex(build_index(view, shard=str(path)))
    except ShardError as error:
        yield error
        return
    if entry is not None and not _is_of(again, entry):
        yield DamagedShardError("the shard is another one than the manifest's", shard=str(path))
    yield again


def _is_of(index: ShardIndex, entry: ShardEntry) -> bool:
    found = (index.shard_bytes, index.n_samples, f"{index.checksum:016x}", index.n_skipped)
    return found == (entry.nbytes, entry.samples, entry.index, entry.skipped)


def _manifest_faults(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    if read_manifest(folder) != manifest.to_json().encode():
        yield Fault(f"{folder / NAME}: the text was changed, though not what it says")
    for column in manifest.columns:
        path = folder / column.file
        if not path.is_file():
            yield Fault(f"{path}: the file of the column {column.name!r} is missing")
        elif f"{_checksum(path):016x}" != column.checksum:
            yield Fault(f"{path}: the column {column.name!r} is damaged: its checksum does not fit")
        else:
            yield from _column_faults(folder, manifest, column.name)


def _column_faults(folder: Path, manifest: Manifest, name: str) -> Iterator[Fault]:
    try:
        open_column(folder, manifest, name)
    except ManifestError as error:
        yield Fault(f"{folder / NAME}: {error.message}")


def _member_faults(folder: Path, manifest: Manifest, found: Sequence[Verified]) -> Iterator[Fault]:
    # A shard of unknown members may have any: then only those are wrong that the manifest lacks.
    known = [one.members for one in found if one.members is not None]
    real, told = sorted(set().union(*known)), sorted(manifest.members)
    if not set(real) <= set(told) or (len(known) == len(found) and real != told):
        yield Fault(f"{folder / NAME}: the manifest names the members {told}, but the shards have {real}")


def _checksum(path: Path) -> int:
    data = FileBytes(path)
    return checksum_between(data, 0, len(data))


def _strangers(folder: Path, manifest: Manifest, tars: set[str]) -> Iterator[Fault]:
    known = {entry.name for entry in manifest.shards}
    for name in sorted(tars - known):
        message = "the shard is not in the manifest, and no reader reads it: index the directory again"
        yield Fault(message, str(folder / name))
    either = known | tars
    for path in sorted(folder.glob(f"*.tar{SUFFIX}")):
        if path.name.removesuffix(SUFFIX) not in either:
            yield Fault(f"{path}: the index has no shard: restore the shard, or remove the index")
