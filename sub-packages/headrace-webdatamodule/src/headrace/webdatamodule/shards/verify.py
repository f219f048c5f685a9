"""Reading everything again: each damage of a directory of shards, with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.webdatamodule.shards.building import build_index
from headrace.webdatamodule.shards.checksums import checksum64
from headrace.webdatamodule.shards.errors import (
    DamagedIndexError,
    DamagedShardError,
    ManifestError,
    ShardError,
    StaleIndexError,
)
from headrace.webdatamodule.shards.index import SUFFIX, ShardIndex
from headrace.webdatamodule.shards.indexing import map_file, spread
from headrace.webdatamodule.shards.locating import differences
from headrace.webdatamodule.shards.manifest import NAME, Manifest, ShardEntry


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
    folder = Path(directory)
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is no directory")
    tars = {path.name for path in folder.glob("*.tar") if not path.name.startswith(".")}
    try:
        manifest = Manifest.load(folder)
    except ManifestError as error:
        faults, entries = [Fault.of(error)], dict.fromkeys(sorted(tars))
    else:
        faults = [*_manifest_faults(folder, manifest), *_strangers(folder, manifest, tars)]
        entries = {entry.name: entry for entry in manifest.shards}
    paths = [folder / name for name in entries]
    found = spread(partial(verify_shard, entries=entries), paths, executor, what="verifying")
    return faults + [fault for one in found for fault in one]


def verify_shard(path: Path, entries: Mapping[str, ShardEntry | None]) -> list[Fault]:
    """Compare each byte of a shard with its index, and the index with the manifest.

    Args:
        path: The tar file.
        entries: What the manifest says, by the names of the shards.

    Returns:
        The faults.
    """
    return [Fault.of(error) for error in _shard_errors(path, entries[path.name])]


def _shard_errors(path: Path, entry: ShardEntry | None) -> Iterator[ShardError]:
    try:
        view = map_file(path)
    except FileNotFoundError:
        yield DamagedShardError("the shard is missing: restore it, or index the directory again", shard=str(path))
        return
    except ShardError as error:
        yield error
        return
    try:
        index = ShardIndex.open(path)
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
            yield from differences(view, index)
        return
    yield from _unindexed(view, path, entry)


def _same(view: memoryview, index: ShardIndex) -> bool:
    # The quick way through a whole shard: its index is a function of its bytes.
    try:
        return ShardIndex(build_index(view)).checksum == index.checksum
    except ShardError:
        return False


def _unindexed(view: memoryview, path: Path, entry: ShardEntry | None) -> Iterator[ShardError]:
    # Without an index, the manifest still tells whether the shard is the one that was indexed.
    try:
        again = ShardIndex(build_index(view, shard=str(path)))
    except ShardError as error:
        yield error
        return
    if entry is not None and not _is_of(again, entry):
        yield DamagedShardError("the shard is another one than the manifest's", shard=str(path))


def _is_of(index: ShardIndex, entry: ShardEntry) -> bool:
    found = (index.shard_bytes, index.n_samples, f"{index.checksum:016x}", index.n_skipped)
    return found == (entry.nbytes, entry.samples, entry.index, entry.skipped)


def _manifest_faults(folder: Path, manifest: Manifest) -> Iterator[Fault]:
    if (folder / NAME).read_bytes() != manifest.to_json().encode():
        yield Fault(f"{folder / NAME}: the text was changed, though not what it says")
    for column in manifest.columns:
        path = folder / column.file
        if not path.is_file():
            yield Fault(f"{path}: the file of the column {column.name!r} is missing")
        elif f"{checksum64(path.read_bytes()):016x}" != column.checksum:
            yield Fault(f"{path}: the column {column.name!r} is damaged: its checksum does not fit")


def _strangers(folder: Path, manifest: Manifest, tars: set[str]) -> Iterator[Fault]:
    known = {entry.name for entry in manifest.shards}
    for name in sorted(tars - known):
        message = "the shard is not in the manifest, and no reader reads it: index the directory again"
        yield Fault(message, str(folder / name))
    for path in sorted(folder.glob(f"*.tar{SUFFIX}")):
        if path.name.removesuffix(SUFFIX) not in known | tars:
            yield Fault(f"{path}: the index has no shard: restore the shard, or remove the index")
