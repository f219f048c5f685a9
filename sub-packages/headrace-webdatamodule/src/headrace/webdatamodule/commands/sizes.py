"""``headrace-shards sizes``: a number for each sample, as `headrace-batches` and others read them."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.commands.opening import a_path
from headrace.webdatamodule.commands.output import emit_json, emit_lines
from headrace.webdatamodule.shards.reading.dataset import IndexedShards

HELP = "print the size of each sample"
DESCRIPTION = (
    "Print the bytes of one member of each sample, or the values of a column, one line a sample in the order of the"
    " shards: `headrace-shards sizes out/ seq.txt > lengths.txt`, for `headrace-batches lengths.txt --budget N`. A"
    " column comes before a member of the same name; columns of several numbers have spaces between."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("source", type=a_path, metavar="DIR|TAR", help="an indexed directory, or one indexed tar file")
    parser.add_argument("name", metavar="MEMBER|COLUMN", help="what to print; `info` lists them")


def run(options: argparse.Namespace) -> int:
    """Print the sizes."""
    sizes = sizes_of(IndexedShards(options.source), options.name)
    if options.json:
        emit_json({"source": str(options.source), "name": options.name, "sizes": sizes.tolist()})
    else:
        rows = sizes.reshape(len(sizes), -1).tolist()
        emit_lines(" ".join(map(repr, row)) for row in rows)
    return 0


def sizes_of(shards: IndexedShards, name: str) -> npt.NDArray[Any]:
    """A column's values, or the bytes of a member.

    Args:
        shards: The samples.
        name: Of the column or the member.

    Returns:
        Shape [n_samples] or [n_samples, k].

    Raises:
        ValueError: There is neither; or the column holds no numbers.
    """
    if name not in shards.columns:
        if name.lower() not in shards.member_keys:
            have = ", ".join([*shards.member_keys, *sorted(shards.columns)])
            raise ValueError(f"there is neither a member nor a column {name!r}, but {have}: name one of these")
        return shards.sizes(name)
    values = np.asarray(shards.column(name))
    if values.dtype.kind not in "iuf" or values.ndim > 2 or 0 in values.shape[1:]:
        raise ValueError(f"column {name!r} holds {values.dtype} of shape {list(values.shape[1:])}, not sizes")
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))
            raise ValueError(f"column {name!r} holds {values[at]} for sample {shards.key(at)!r}, not a size")
    return values
