"""What comes last: the columns and the manifest."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.checksums import checksum64
from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.indexing import Indexed
from headrace.webdatamodule.shards.manifest import NAME, ColumnEntry, Manifest, is_plain_name
from headrace.webdatamodule.shards.tar import sync_directory
from headrace.webdatamodule.shards.whole import write_whole
from headrace.webdatamodule.shards.writing.parts import write_locked
from headrace.webdatamodule.shards.writing.task import Written

Arrays = dict[str, npt.NDArray[Any]]


def check_columns(columns: Mapping[str, npt.ArrayLike], n_samples: int) -> Arrays:
    """Refuse columns that cannot be kept, before anything is written.

    Args:
        columns: {name: array}.
        n_samples: Rows that each has to have.

    Raises:
        ValueError: A name or an array is not allowed.
    """
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    for name, array in arrays.items():
        if not is_plain_name(name) or name.startswith("."):
            raise ValueError(f"the name of a column must be a part of a file name, got {name!r}")
        if array.dtype.hasobject or array.dtype.names or array.shape[:1] != (n_samples,):
            allowed = f"plain numbers or texts of shape [{n_samples}, ...], one row for each sample"
            raise ValueError(f"columns[{name!r}] must be {allowed}, got {array.dtype} of shape {list(array.shape)}")
    return arrays


def save_manifest(directory: Path, written: Sequence[Written] | Sequence[Indexed], columns: Arrays) -> Manifest:
    """Write the columns, then the manifest.

    Args:
        directory: Where the shards lie.
        written: The shards.
        columns: As of `check_columns`.

    Returns:
        The manifest; columns of an earlier one of the same shards stay.

    Raises:
        ManifestError: An earlier manifest has columns that belong to other shards.
    """
    members = sorted({member for one in written for member in one.members})
    manifest = Manifest(tuple(one.entry for one in written), tuple(members))
    manifest = Manifest(manifest.shards, manifest.members, _earlier(directory, manifest, set(columns)))
    for name, array in columns.items():
        manifest = manifest.with_column(_save_column(directory, name, array))
    path, data = directory / NAME, manifest.to_json().encode()
    if not path.is_file() or path.read_bytes() != data:  # a directory that is complete need not be writable
        write_locked(path, data)
    return manifest


def only_manifest(directory: Path, done: Sequence[Indexed]) -> Manifest | None:
    """Write the manifest of a set that may have to share its directory.

    A manifest speaks for its whole directory: who opens that by its name would get several sets as one, such as
    training and validation. So it is only written where no other tar files lie. Otherwise a manifest of one of the sets
    alone is removed, and one of all tar files, which somebody asked for, stays.

    Args:
        directory: Where the shards lie.
        done: What is known of each.

    Returns:
        The manifest; None when there are other tar files.

    Raises:
        ManifestError: The columns of an earlier manifest would be lost.
    """
    tars = {path.name for path in directory.glob("*.tar") if not path.name.startswith(".")}
    if tars == {one.entry.name for one in done}:
        return save_manifest(directory, done, {})
    try:
        before = Manifest.load(directory)
    except ManifestError:
        return None
    if {entry.name for entry in before.shards} == tars:
        return None
    if before.columns:
        columns = ", ".join(column.name for column in before.columns)
        message = f"{str(directory)!r} holds tar files beside those of its manifest, which has columns: {columns}"
        raise ManifestError(f"{message}. Choose another directory for one of the sets, or remove manifest.json")
    (directory / NAME).unlink(missing_ok=True)
    sync_directory(directory)
    return None


def _save_column(directory: Path, name: str, array: npt.NDArray[Any]) -> ColumnEntry:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    checksum = f"{checksum64(stream.getbuffer()):016x}"
    column = ColumnEntry(name, array.dtype.str, f"{name}.{checksum[:8]}.npy", checksum)
    write_whole(directory / column.file, stream.getvalue())
    return column


def _earlier(directory: Path, manifest: Manifest, replaced: set[str]) -> tuple[ColumnEntry, ...]:
    try:
        before = Manifest.load(directory)
    except ManifestError:
        return ()
    if before.shards == manifest.shards:
        return before.columns
    lost = [column.name for column in before.columns if column.name not in replaced]
    if lost:
        message = f"the shards of {str(directory)!r} are others than when these columns were made: {', '.join(lost)}"
        raise ManifestError(f"{message}. Remove manifest.json, call again, and add them again")
    return ()
