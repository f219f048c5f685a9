"""``headrace-shards index``: an index beside each tar file of a directory, and a manifest."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from headrace.webdatamodule.commands.opening import a_path
from headrace.webdatamodule.commands.output import emit_json, emit_lines, warn
from headrace.webdatamodule.commands.working import add_workers, pool
from headrace.webdatamodule.shards.errors import ManifestError
from headrace.webdatamodule.shards.index.build import SkippedMembersWarning, index_shards
from headrace.webdatamodule.shards.index.manifest import Manifest

HELP = "index the tar files of a directory"
DESCRIPTION = "Write an index beside each tar file of a directory, and manifest.json last. Indexes that fit are kept."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("directory", type=a_path, metavar="DIR", help="where the tar files lie")
    parser.add_argument("--drop-columns", action="store_true", help="forget columns that belong to other shards")
    add_workers(parser)


def run(options: argparse.Namespace) -> int:
    """Index, and print what there is."""
    if not options.directory.is_dir():
        raise NotADirectoryError(f"{str(options.directory)!r} is no directory: give one that holds tar files")
    with warnings.catch_warnings(record=True) as caught, pool(options.workers) as executor:
        warnings.simplefilter("always", SkippedMembersWarning)
        try:
            manifest = index_shards(options.directory, executor=executor, drop_columns=options.drop_columns)
        except ManifestError as error:  # nothing is damaged: columns of earlier shards, or a write that was stopped
            raise ValueError(str(error)) from error
    for one in caught:
        warn(str(one.message))
    if options.json:
        emit_json(summary(options.directory, manifest))
    else:
        emit_lines([sentence("indexed", manifest)])
    return 0


def summary(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """A manifest in a few entries for JSON.

    Args:
        directory: Where it lies.
        manifest: The manifest.
    """
    return {
        "directory": str(directory),
        "shards": len(manifest.shards),
        "samples": manifest.n_samples,
        "bytes": sum(shard.nbytes for shard in manifest.shards),
        "skipped": sum(shard.skipped for shard in manifest.shards),
        "members": list(manifest.members),
        "columns": [column.name for column in manifest.columns],
        "fingerprint": manifest.fingerprint,
    }


def sentence(done: str, manifest: Manifest) -> str:
    """A manifest in a few words.

    Args:
        done: What was done.
        manifest: The manifest.
    """
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    counts = f"{len(manifest.shards):,} shards, {manifest.n_samples:,} samples, {nbytes:,} bytes"
    return f"{done} {counts}, members: {', '.join(manifest.members)}"
