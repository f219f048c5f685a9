"""What comes last: the columns and the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.format.files import sync_directory
from headrace.webdatamodule.shards.index.build import Indexed
from headrace.webdatamodule.shards.index.manifest import (
    NAME,
    Manifest,
    added,
    check_column,
    columns_that_stay,
    store_column,
)
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
    return {name: check_column(name, values, n_samples, what=f"columns[{name!r}]") for name, values in columns.items()}


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
    cure = "Remove manifest.json, call again, and add them again"
    earlier = columns_that_stay(directory, manifest, replaced=columns, cure=cure)
    manifest = Manifest(manifest.shards, manifest.members, earlier)
    for name, array in columns.items():
        manifest = manifest.with_column(store_column(directory, name, array))
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
    lost = ", ".join(added(before))
    if lost:
        message = f"{str(directory)!r} holds tar files beside those of its manifest, which has columns: {lost}"
        raise ManifestError(f"{message}. Choose another directory for one of the sets, or remove manifest.json")
    (directory / NAME).unlink(missing_ok=True)
    sync_directory(directory)
    return None
