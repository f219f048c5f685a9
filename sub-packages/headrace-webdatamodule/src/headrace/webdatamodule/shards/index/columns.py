"""Columns: one number or row for each sample of a directory, such as its tokens, as a memory-mapped array."""

from __future__ import annotations

import io
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.arrays import load_npy
from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.format.plain_files import expanded, open_plain
from headrace.webdatamodule.shards.format.whole import write_whole
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.manifest import ColumnEntry, Manifest, is_plain_name
from headrace.webdatamodule.shards.writing.locking import alone

_READ = 1 << 20  # bytes; more are mapped

# Columns of such names hold what a function says of each sample: they are made anew when they are missing.
DERIVED = "sizes-"


def add_column(directory: str | Path, name: str, values: npt.ArrayLike) -> Manifest:
    """Store an array with one row for each sample beside the shards, and write the manifest anew.

    Args:
        directory: Where the shards and their manifest lie.
        name: Name of the column; it becomes a part of a file name. A column of the same name is replaced.
        values: The array, shape [n_samples, ...]; in the order of the manifest's shards and their samples.

    Returns:
        The new manifest.

    Raises:
        ManifestError: There is no manifest.
        ValueError: The name or the array is not allowed.
    """
    folder = expanded(directory)
    with alone(folder):  # others may add columns to the manifest at the same time
        manifest = Manifest.load(folder)
        array = check_column(name, values, manifest.n_samples, what=f"column {name!r}: values")
        made = manifest.with_column(store_column(folder, name, array))
        made.save(folder)
        # A manifest that was tampered with may give a shard or an index out for a column: those are not removed.
        kept = {entry.file for entry in made.columns} | {entry.name for entry in made.shards}
        for old in {entry.file for entry in manifest.columns} - kept:
            if old.endswith(".npy"):
                (folder / old).unlink(missing_ok=True)
    return made


def check_column(name: str, values: npt.ArrayLike, n_samples: int, *, what: str) -> npt.NDArray[Any]:
    """Refuse a column that cannot be kept.

    Args:
        name: Its name.
        values: What is to be its array.
        n_samples: Rows that it has to have.
        what: What the caller calls the values, for errors.

    Returns:
        The array, shape [n_samples, ...].

    Raises:
        ValueError: The name or the values are not allowed.
    """
    if not is_plain_name(name) or name.startswith("."):
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


def store_column(directory: Path, name: str, array: npt.NDArray[Any]) -> ColumnEntry:
    """Write the file of a column; no manifest names it yet.

    Args:
        directory: Where the shards lie.
        name: Of the column.
        array: As of `check_column`.

    Returns:
        The entry for the manifest.
    """
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    checksum = f"{checksum64(stream.getbuffer()):016x}"
    # The checksum in the name keeps the old file whole until the new manifest names the new one.
    column = ColumnEntry(name, array.dtype.str, f"{name}.{checksum[:8]}.npy", checksum)
    write_whole(directory / column.file, stream.getvalue())
    return column


def columns_that_stay(
    directory: Path, manifest: Manifest, *, replaced: Container[str] = (), drop: bool = False, cure: str
) -> tuple[ColumnEntry, ...]:
    """The columns of an earlier manifest that go into the next one.

    Args:
        directory: Where the shards lie.
        manifest: The next one.
        replaced: Names of columns that are made anew.
        drop: Whether all may be lost.
        cure: What to do so that they may.

    Returns:
        All, when the shards are the same; none otherwise.

    Raises:
        ManifestError: Columns that somebody added would be lost.
    """
    try:
        before = Manifest.load(directory)
    except ManifestError:
        return ()
    if before.shards == manifest.shards:
        return before.columns
    lost = [name for name in added(before) if name not in replaced]
    if lost and not drop:
        message = f"the shards of {str(directory)!r} are others than when these columns were made: {', '.join(lost)}"
        raise ManifestError(f"{message}. {cure}")
    return ()


def added(manifest: Manifest) -> list[str]:
    """Names of the columns that somebody added, and nobody makes anew.

    Args:
        manifest: Which has them.
    """
    return [column.name for column in manifest.columns if not column.name.startswith(DERIVED)]


def _opened(path: Path, checksum: str) -> npt.NDArray[Any]:
    with os.fdopen(open_plain(path, ManifestError), "rb") as file:
        if os.fstat(file.fileno()).st_size > _READ:
            _compare(np.memmap(path, np.uint8, "r").data, checksum)
            return np.lib.format.open_memmap(path, mode="r")
        data = file.read()
    _compare(data, checksum)
    array = load_npy(data, len(data))
    array.flags.writeable = False
    return array


def _compare(data: bytes | memoryview, checksum: str) -> None:
    if f"{checksum64(data):016x}" != checksum:
        raise ValueError("its bytes are not those that were stored; restore the file, or add the column again")


def open_column(directory: str | Path, manifest: Manifest, name: str) -> npt.NDArray[Any]:
    """Map a column; all of it is compared with its checksum.

    Args:
        directory: Where the shards lie.
        manifest: Their manifest.
        name: Name of the column.

    Returns:
        The array, read-only, shape [n_samples, ...]. A large one is a map, shared by all processes: to cut its file
        while it is used, instead of replacing it, kills whoever looks at it.

    Raises:
        ManifestError: There is no such column, or its file is damaged or another one.
    """
    columns = {entry.name: entry for entry in manifest.columns}
    if name not in columns:
        raise ManifestError(f"there is no column {name!r}, only {sorted(columns)}; make it with add_column")
    entry = columns[name]
    try:
        array = _opened(Path(directory) / entry.file, entry.checksum)
    except Exception as error:  # numpy raises half a dozen kinds for damaged headers
        raise ManifestError(f"the column {name!r} cannot be read from {entry.file}: {error}") from error
    if array.dtype.str != entry.dtype or array.shape[:1] != (manifest.n_samples,):
        found = f"{array.dtype.str} of shape {list(array.shape)}"
        raise ManifestError(f"the column {name!r} is {found}, not {entry.dtype} of [{manifest.n_samples}, ...]")
    return array
