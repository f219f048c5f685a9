"""``headrace-shards export-dali``: NVIDIA DALI's text indexes of indexed shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from headrace.webdatamodule.commands.opening import a_path, open_shards
from headrace.webdatamodule.commands.output import emit_json, emit_lines
from headrace.webdatamodule.shards.interop import dali_path, export_dali

HELP = "write NVIDIA DALI's indexes"
DESCRIPTION = "Write the v1.2 text index of NVIDIA DALI for each shard, and print the paths."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("directory", type=a_path, metavar="DIR", help="an indexed directory")
    parser.add_argument("--out", type=a_path, metavar="DIR", help="where to write (default: beside the shards)")


def run(options: argparse.Namespace) -> int:
    """Write the indexes, and print their paths."""
    if not options.directory.is_dir():
        raise NotADirectoryError(f"{str(options.directory)!r} is no directory: give one of indexed shards")
    shards = [index.shard for index in open_shards(options.directory)]
    targets = listings(shards, options.out)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    for shard, target in zip(shards, targets, strict=True):
        export_dali(shard, target)
    if options.json:
        pairs = zip(shards, targets, strict=True)
        emit_json({"exported": [{"shard": shard, "index": str(target)} for shard, target in pairs]})
    else:
        emit_lines(map(str, targets))
    return 0


def listings(shards: Iterable[str], out: Path | None) -> list[Path]:
    """Where DALI's indexes go.

    Args:
        shards: Paths of tar files.
        out: A directory; beside the shards when None.

    Returns:
        A path for each shard.

    Raises:
        ValueError: Two would get the same one.
    """
    taken: dict[Path, str] = {}
    for shard in shards:
        target = dali_path(shard) if out is None else out / dali_path(shard).name
        if target in taken:
            both = f"{Path(taken[target]).name!r} and {Path(shard).name!r}"
            raise ValueError(f"the shards {both} both get the index {target.name!r}: rename one before its first dot")
        taken[target] = shard
    return list(taken)
