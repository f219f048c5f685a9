"""The manifest of a directory of shards, which readers trust and writers write last; and its columns.

A column is one number or row for each sample of the directory, such as its tokens, as a memory-mapped array.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import text_digest
from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule.shards.decoding.decode import load_npy
from headrace.webdatamodule.shards.errors import LostColumnsError, ManifestError, ShardError
from headrace.webdatamodule.shards.format.files import (
    atomic_write,
    directory_lock,
    expanded,
    read_or_map,
    read_plain,
    sync_directory,
)
from headrace.webdatamodule.shards.format.tar import compressed_beside
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.container import INDEX_VERSION
from headrace.webdatamodule.shards.index.keys import is_utf8
from headrace.webdatamodule.shards.index.shard_index import ShardIndex

NAME = "manifest.json"
NOTE = ".plan.json"
MOST_MANIFEST_BYTES = 1 << 26  # some 400,000 shards
# Columns of such names hold what a function says of each sample: they are made anew when they are missing.
DERIVED = "sizes-"
_MAX_NOTE_BYTES = 1 << 20
# How a manifest of this release begins, damaged or not; another program's file may have the same name.
_OURS = re.compile(rb'\s*{\s*"format":\s*"headrace-shards",\s*"version":\s*%d\b' % INDEX_VERSION)
_FOREIGN = "move it away, or make a folder of symbolic links to the .tar files, and use that"
_READ_BYTES = 1 << 20  # larger columns are mapped
_MAX_NAME_BYTES = 255  # on all usual file systems
_Entry = TypeVar("_Entry", "ShardEntry", "ColumnEntry")


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a manifest.

    Args:
        name: File name of the tar file, in the manifest's directory.
        nbytes: Size of the tar file in bytes.
        samples: Number of samples.
        index: Checksum of the index, 16 hexadecimal digits; it covers every byte of the shard.
        skipped: Number of members that belong to no sample, directories not counted.
    """

    name: str
    nbytes: int
    samples: int
    index: str
    skipped: int = 0

    @classmethod
    def of(cls, index: ShardIndex) -> ShardEntry:
        """The entry of a shard that was indexed."""
        name, checksum = Path(index.shard).name, f"{index.checksum:016x}"
        return cls(name, index.shard_bytes, index.n_samples, checksum, index.n_skipped)

    def __post_init__(self) -> None:
        _require(is_plain_name(self.name), f"the shard name {self.name!r:.99} leads elsewhere, or is no file name")


@dataclass(frozen=True)
class ColumnEntry:
    """One column of a manifest: an array with one row for each sample, over all shards.

    Args:
        name: Name of the column.
        dtype: Data type of the array, as numpy writes it.
        file: File name of the `.npy` file, in the manifest's directory.
        checksum: Checksum of the file, 16 hexadecimal digits.
    """

    name: str
    dtype: str
    file: str
    checksum: str

    def __post_init__(self) -> None:
        _require(is_plain_name(self.file), f"the file {self.file!r} of a column leads elsewhere, or is no file name")


@dataclass(frozen=True, repr=False)
class Manifest:
    """Contents of a directory of shards.

    Args:
        shards: The shards, in the order in which their samples are numbered.
        members: Member keys of all samples, sorted.
        columns: Arrays with one row for each sample.

    >>> manifest = Manifest((ShardEntry("a.tar", 2048, 3, "0" * 16),), ("txt",))
    >>> Manifest.from_json(manifest.to_json()) == manifest
    True
    """

    shards: tuple[ShardEntry, ...]
    members: tuple[str, ...]
    columns: tuple[ColumnEntry, ...] = ()

    @never_raises
    def __repr__(self) -> str:
        columns = f"; columns {', '.join(column.name for column in self.columns)}" if self.columns else ""
        return (
            f"{type(self).__name__}({counted(self.n_samples, 'sample')} in {counted(len(self.shards), 'shard')}, "
            f"members {', '.join(self.members)}{columns})"
        )

    @property
    def n_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all shards and columns, 32 hexadecimal digits."""
        return text_digest(json.dumps(self._table, separators=(",", ":")))

    @property
    def _table(self) -> dict[str, Any]:  # `asdict` copies each value, which takes ten times as long
        shards, columns = ([vars(entry) for entry in entries] for entries in (self.shards, self.columns))
        return {"shards": shards, "members": self.members, "columns": columns}

    def with_column(self, column: ColumnEntry) -> Manifest:
        """Return a copy with this column; it replaces a column of the same name."""
        others = [entry for entry in self.columns if entry.name != column.name]
        return replace(self, columns=(*others, column))

    def to_json(self) -> str:
        """Return the text of the file; equal manifests give equal texts."""
        table = {
            "format": "headrace-shards",
            "version": INDEX_VERSION,
            **self._table,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a text that `to_json` has returned.

        Raises:
            ManifestError: The text is not a manifest, has another version, or does not match its fingerprint.
        """
        if len(text) > MOST_MANIFEST_BYTES:
            raise ManifestError(f"the manifest has {len(text)} bytes, more than the {MOST_MANIFEST_BYTES} allowed")
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"the manifest is no JSON ({error})") from error
        _require(isinstance(table, dict) and table.get("format") == "headrace-shards", "this is no manifest of shards")
        version = table.get("version")
        is_ours = type(version) is int and version == INDEX_VERSION
        _require(is_ours, f"the manifest has version {version!r:.40}, this release reads version {INDEX_VERSION}")
        members = tuple(_list(table, "members"))
        made = cls(_entries(ShardEntry, table, "shards"), members, _entries(ColumnEntry, table, "columns"))
        _require(table.get("fingerprint") == made.fingerprint, "the fingerprint does not fit the rest of the manifest")
        return made

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read the manifest of a directory of shards; raise a ManifestError if it is missing or damaged."""
        folder = expanded(directory)
        path, data = folder / NAME, b""
        try:
            data = read_manifest(folder)
            return cls.from_json(data)
        except FileNotFoundError as error:
            raise ManifestError(_missing(folder)) from error
        except OSError as error:
            raise ManifestError(f"{path} cannot be read ({error}): restore it, or index the directory again") from error
        except ManifestError as error:
            cure = "index the directory again" if _OURS.match(data) else _FOREIGN
            error.message = f"{path}: {error.message}: {cure}"
            raise

    def save(self, directory: str | Path) -> None:
        """Write the manifest to the directory of the shards atomically, unless an equal one is there.

        Raises:
            FileExistsError: A `manifest.json` of another program lies there.
        """
        path, data = expanded(directory) / NAME, self.to_json().encode()
        refuse_foreign(path.parent)
        if not (path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data):
            sync_directory(path.parent)  # the names of what it lists reach the disk first
            atomic_write(path, data)


def read_manifest(directory: str | Path) -> bytes:
    """The bytes of a directory's manifest."""
    return read_plain(Path(directory) / NAME, ManifestError, most=MOST_MANIFEST_BYTES)


def refuse_foreign(directory: Path) -> None:
    """Refuse to write where a file of another program, or of another release, has the manifest's name."""
    with suppress(FileNotFoundError):
        if not _OURS.match(read_manifest(directory)):
            message = f"{directory / NAME} would be overwritten, but is no manifest that this release writes"
            raise FileExistsError(f"{message}: {_FOREIGN}")


def is_plain_name(name: object) -> bool:
    """Whether a name is one of a file that lies in the directory itself, on each system."""
    if not is_utf8(name) or len(name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
        return False
    return bool(re.fullmatch(r"[^/\\:\0]+", name)) and name not in (".", "..")


def _missing(folder: Path) -> str:
    unfinished = unfinished_write(folder)
    if unfinished:
        return f"there is no {NAME}: {unfinished}"
    if folder.is_dir() and not any(folder.glob("*.tar")):
        cure = compressed_beside(folder) or ": give a directory of shards, or write some with write_shards"
        return f"there are no .tar files in {str(folder)!r}, and so there is no {NAME}{cure}"
    return f"there is no {NAME} in {str(folder)!r}: call index_shards on that directory first"


def _list(table: Mapping[str, Any], key: str) -> list[Any]:
    value = table.get(key)
    _require(isinstance(value, list), f"{key!r} is no list")
    return value if isinstance(value, list) else []


def _entries(kind: type[_Entry], table: Mapping[str, Any], key: str) -> tuple[_Entry, ...]:
    names = [field.name for field in fields(kind)]
    entries = _list(table, key)
    fit = all(isinstance(entry, dict) and sorted(entry) == sorted(names) for entry in entries)
    _require(fit, f"{key!r} is no list of objects with {', '.join(names)}")
    return tuple(kind(**entry) for entry in entries)


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ManifestError(message)


def add_column(directory: str | Path, name: str, values: npt.ArrayLike) -> Manifest:
    """Store an array with one row for each sample beside the shards, and update the manifest.

    Args:
        directory: Directory of the shards and their manifest.
        name: Name of the column, also used in the file name. An existing column of this name is replaced.
        values: The array, shape [n_samples, ...], in the order of the samples.

    Returns:
        The new manifest.

    Raises:
        ManifestError: The directory has no manifest.
        ValueError: The name or the array is not allowed.
    """
    folder = expanded(directory)
    with directory_lock(folder):  # others may add columns to the manifest at the same time
        manifest = Manifest.load(folder)
        array = check_column(name, values, manifest.n_samples, what=f"column {name!r}: values")
        made = manifest.with_column(store_column(folder, name, array))
        made.save(folder)
        for old in {entry.file for entry in manifest.columns} - {entry.file for entry in made.columns}:
            if old.endswith(".npy"):  # a shard or an index is never removed, whatever the manifest says
                (folder / old).unlink(missing_ok=True)
    return made


def check_column(name: str, values: npt.ArrayLike, n_samples: int, *, what: str) -> npt.NDArray[Any]:
    """Refuse a column that cannot be kept."""
    if not all(map(is_plain_name, (name, _column_file(name, "0" * 16)))) or name.startswith("."):
        raise ValueError(f"a column's name must be a part of a file name, got {name!r}")
    allowed = f"{what} must be plain numbers or texts of shape [{n_samples}, ...], one row for each sample"
    try:
        array = np.asarray(values)
    except (RuntimeError, TypeError, ValueError) as error:  # such as rows of unlike lengths
        raise ValueError(f"{allowed}, got what makes no array: {error}") from error
    if isinstance(values, np.ndarray) and np.any(getattr(values, "mask", False)):
        raise ValueError(f"{allowed}, got some that are masked: fill them")
    if array.dtype.hasobject or array.dtype.names or array.shape[:1] != (n_samples,):
        raise ValueError(f"{allowed}, got {array.dtype} of shape {list(array.shape)}")
    return array


def _column_file(name: str, checksum: str) -> str:
    # The checksum in the name keeps the old file whole until the new manifest names the new one.
    return f"{name}.{checksum[:8]}.npy"


def store_column(directory: Path, name: str, array: npt.NDArray[Any]) -> ColumnEntry:
    """Write the file of a column; no manifest names it yet."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    checksum = f"{checksum64(stream.getbuffer()):016x}"
    column = ColumnEntry(name, array.dtype.str, _column_file(name, checksum), checksum)
    atomic_write(directory / column.file, stream.getvalue())
    return column


def kept_columns(
    directory: Path, manifest: Manifest, *, replaced: Container[str] = (), drop: bool = False, cure: str
) -> tuple[ColumnEntry, ...]:
    """The columns of an earlier manifest that go into the next one."""
    try:
        before = Manifest.load(directory)
    except ManifestError:
        return ()
    if before.shards == manifest.shards:
        return before.columns
    lost = [name for name in added(before) if name not in replaced]
    if lost and not drop:
        message = f"the shards of {str(directory)!r} are others than when these columns were made: {', '.join(lost)}"
        error = LostColumnsError(f"{message}. {cure}")
        error.columns = tuple(lost)
        raise error
    return ()


def added(manifest: Manifest) -> list[str]:
    """Names of the columns that users added, which cannot be made anew."""
    return [column.name for column in manifest.columns if not column.name.startswith(DERIVED)]


def _opened(path: Path, checksum: str) -> npt.NDArray[Any]:
    data = read_or_map(path, ManifestError, most_read=_READ_BYTES)
    if isinstance(data, bytes):
        return read_column(data, checksum)
    _compare(memoryview(data), checksum)
    return np.lib.format.open_memmap(path, mode="r")


def _compare(data: bytes | memoryview, checksum: str) -> None:
    if f"{checksum64(data):016x}" != checksum:
        raise ValueError("its bytes are not those that were stored; restore the file, or add the column again")


def open_column(directory: str | Path, manifest: Manifest, name: str) -> npt.NDArray[Any]:
    """Map a column into memory, after its checksum is verified.

    Args:
        directory: Directory of the shards.
        manifest: Manifest of this directory.
        name: Name of the column.

    Returns:
        The read-only array, shape [n_samples, ...]. Processes share the memory map of a large array. Never truncate the
        file in place while it is in use, because this kills every process that reads it. Replace the file instead.

    Raises:
        ManifestError: There is no such column, or its file is damaged or has changed.
    """
    entry = column_entry(manifest, name)
    return checked_column(manifest, entry, lambda: _opened(expanded(directory) / entry.file, entry.checksum))


def column_entry(manifest: Manifest, name: str) -> ColumnEntry:
    """The entry of a column; a ManifestError when there is none."""
    columns = {entry.name: entry for entry in manifest.columns}
    if name not in columns:
        raise ManifestError(f"there is no column {name!r}, only {sorted(columns)}; make it with add_column")
    return columns[name]


def checked_column(manifest: Manifest, entry: ColumnEntry, read: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A column as the manifest describes it; a ManifestError when it cannot be read, or is something else."""
    try:
        array = read()
    except Exception as error:  # numpy raises half a dozen kinds for damaged headers
        raise ManifestError(f"the column {entry.name!r} cannot be read from {entry.file}: {error}") from error
    if array.dtype.str != entry.dtype or array.shape[:1] != (manifest.n_samples,):
        found = f"{array.dtype.str} of shape {list(array.shape)}"
        raise ManifestError(f"the column {entry.name!r} is {found}, not {entry.dtype} of [{manifest.n_samples}, ...]")
    return array


def read_column(data: bytes, checksum: str) -> npt.NDArray[Any]:
    """The array in the bytes of a column's file, read-only; a ValueError when they are others than were stored."""
    _compare(data, checksum)
    array = load_npy(data, len(data))
    array.flags.writeable = False
    return array


def unfinished_write(directory: Path) -> str | None:
    """What to say of a directory where shards of a plan are missing."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    for note in sorted(name for name in names if name.endswith(NOTE) and not name.startswith(".")):
        prefix = note.removesuffix(NOTE)
        table = dict[str, Any]()
        with suppress(OSError, ShardError):  # other programs may call what they have so
            table = _parsed_note(directory / note)
        if other := _other_release(directory / note, table):
            return other
        planned = table.get("shards", 0)
        if type(planned) is not int or planned < 1:
            continue
        of_stream = table.get("samples") == 0  # which has not ended
        found = (re.fullmatch(rf"{re.escape(prefix)}-([0-9]{{6,}})\.tar", name, re.ASCII) for name in names)
        there = sum(1 for match in found if match and (of_stream or int(match[1]) < planned))
        if of_stream or there < planned:
            cure = f"run it again, or remove {note} to keep what is there"
            of = "nobody knows how many" if of_stream else planned
            return f"a write was stopped at {there} of {of} shards in {str(directory)!r}: {cure}"
    return None


def read_note(path: Path) -> dict[str, Any]:
    """The plan of a write, as its note says; empty where there is none."""
    table = _parsed_note(path)
    if not table and path.exists():
        message = f"{path} would be overwritten with the plan of a write, but is another program's"
        raise FileExistsError(f"{message}: move it away, or choose another prefix")
    if other := _other_release(path, table):
        raise ManifestError(other)
    return table


def _other_release(path: Path, table: Mapping[str, Any]) -> str | None:
    """What to say of a plan that another release has noted."""
    version = table.get("version", INDEX_VERSION)
    if type(version) is int and version == INDEX_VERSION:
        return None
    reads = f"{path} has version {version!r:.40}, this release reads version {INDEX_VERSION}"
    return f"{reads}: complete the write with the release that began it, or remove {path.name} to keep what is there"


def _parsed_note(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_plain(path, ManifestError, most=_MAX_NOTE_BYTES))
    except (FileNotFoundError, RecursionError, ValueError):
        return {}
    return table if isinstance(table, dict) and table.get("format") == "headrace-plan" else {}
