"""``headrace-shards info``: how much there is, and how large."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.webdatamodule.commands.opening import a_path, is_set, open_shards
from headrace.webdatamodule.commands.output import emit_json, emit_lines, table
from headrace.webdatamodule.shards.index.manifest import Manifest
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path

HELP = "print counts and sizes"
DESCRIPTION = "Print how many shards, samples and bytes there are, and how large the members are."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("source", type=a_path, metavar="DIR|TAR", help="an indexed directory, or one tar file")


def run(options: argparse.Namespace) -> int:
    """Print the tables."""
    document = described(options.source)
    if options.json:
        emit_json(document)
    else:
        emit_lines(_lines(document))
    return 0


def described(source: Path) -> dict[str, Any]:
    """All that the command knows of some shards.

    Args:
        source: An indexed directory, its manifest, or a tar file.

    Returns:
        What `json` can write.

    Raises:
        FileNotFoundError: There is nothing at the path.
        ShardError: Something is missing or damaged.
    """
    shards, sizes = [], dict[str, list[Any]]()
    for index in open_shards(source):
        shards.append(_shard(index))
        for member in index.member_keys:
            sizes.setdefault(member, []).append(_sizes(index, member))
    folder = source if source.is_dir() else source.parent
    manifest = Manifest.load(folder) if is_set(source) else None
    return {
        "source": str(source),
        "samples": sum(shard["samples"] for shard in shards),
        "bytes": sum(shard["bytes"] for shard in shards),
        "members": {member: _spread(sizes[member]) for member in sorted(sizes)},
        "columns": [{"name": one.name, "dtype": one.dtype} for one in manifest.columns] if manifest else [],
        "fingerprint": manifest.fingerprint if manifest else None,
        "shards": shards,
    }


def _shard(index: ShardIndex) -> dict[str, Any]:
    beside = index_path(index.shard)
    return {
        "name": Path(index.shard).name,
        "samples": index.n_samples,
        "bytes": index.shard_bytes,
        "index_bytes": beside.stat().st_size if beside.exists() else None,
        "skipped": index.n_skipped,
        "skipped_names": list(index.skipped_names),
    }


def _sizes(index: ShardIndex, member: str) -> Any:
    positions = index.positions(member)
    return index.sizes[positions[positions >= 0]]


def _spread(parts: Sequence[Any]) -> dict[str, int | float]:
    sizes = np.concatenate(parts).astype(np.uint64)
    middle = float(np.median(sizes))
    return {
        "samples": sizes.size,
        "bytes": int(sizes.sum()),
        "min": int(sizes.min()),
        "median": int(middle) if middle.is_integer() else middle,
        "max": int(sizes.max()),
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    shards = document["shards"]
    yield f"{len(shards):,} shards, {document['samples']:,} samples, {document['bytes']:,} bytes"
    heads = ("samples", "bytes", "min", "median", "max")
    members = document["members"].items()
    yield ""
    yield from table([("member", *heads), *((name, *(one[head] for head in heads)) for name, one in members)])
    if document["columns"]:
        yield ""
        yield from table([("column", "dtype"), *((one["name"], one["dtype"]) for one in document["columns"])])
    counts = ("samples", "bytes", "skipped")
    yield ""
    yield from table([("shard", *counts), *((one["name"], *(one[count] for count in counts)) for one in shards)])
