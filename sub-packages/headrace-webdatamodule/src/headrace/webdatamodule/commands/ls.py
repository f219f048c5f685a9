"""``headrace-shards ls``: the samples of shards, their members and bytes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.webdatamodule.commands.opening import a_path, is_set, open_shards
from headrace.webdatamodule.commands.output import emit_json_list, emit_lines
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.interop import Component, indexed_components

HELP = "list samples"
DESCRIPTION = (
    "List samples, one a line: key, members and bytes of data, with tabs between. With --long, list members, one a"
    " line: shard, offset of the data, bytes, XXH3 checksum (32 bits) and name. Control characters are escaped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("source", type=a_path, metavar="DIR|TAR", help="an indexed directory, or one tar file")
    parser.add_argument("--long", action="store_true", help="a line for each member")


def run(options: argparse.Namespace) -> int:
    """Print the samples; nothing when a shard is damaged."""
    indexes = whole(options.source)
    if options.json:
        emit_json_list({"source": str(options.source)}, "samples", (one for index in indexes for one in _plain(index)))
    else:
        lines = _long if options.long else _short
        emit_lines(line for index in indexes for line in lines(index))
    return 0


def whole(source: Path) -> Iterable[ShardIndex]:
    """The indexes of shards, all of which were seen to be whole before the first one is given.

    Args:
        source: As of `open_shards`.
    """
    if not is_set(source):  # held, as an index that was made of the tar file took long
        return list(open_shards(source))
    for _ in open_shards(source):
        pass
    return open_shards(source)


def _samples(index: ShardIndex) -> Iterator[tuple[str, list[tuple[Component, str]]]]:
    checksums = iter(index.checksums.tolist())
    for key, components in zip(index.keys, indexed_components(index), strict=True):
        yield key, [(one, f"{next(checksums):08x}") for one in components]


def _short(index: ShardIndex) -> Iterator[str]:
    for key, components in zip(index.keys, indexed_components(index), strict=True):
        yield f"{_cell(key)}\t{_cell(','.join(one.key for one in components))}\t{sum(one.size for one in components)}"


def _long(index: ShardIndex) -> Iterator[str]:
    shard = _cell(Path(index.shard).name)
    for _, members in _samples(index):
        for one, checksum in members:
            yield f"{shard}\t{one.offset}\t{one.size}\t{checksum}\t{_cell(one.name)}"


def _plain(index: ShardIndex) -> Iterator[dict[str, Any]]:
    for key, members in _samples(index):
        parts = [
            {"member": one.key.lower(), "name": one.name, "offset": one.offset, "bytes": one.size, "xxh3": checksum}
            for one, checksum in members
        ]
        nbytes = sum(one.size for one, _ in members)
        yield {"key": key, "shard": index.shard, "bytes": nbytes, "members": parts}


def _cell(text: str) -> str:
    # A tab inside a name would look like the one between columns.
    return text.replace("\t", "\\t")
