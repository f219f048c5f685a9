"""NVIDIA DALI's text index, written from our own.

DALI's webdataset reader takes it in place of what its tool `wds2idx` writes. The first line is "v1.2" and the number of
samples; each other line is a sample, with four words for each member: its key, the offset of its data, its size and its
name, all separated by spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.files import atomic_write, expanded
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.local_shards import open_index

DALI_VERSION = "v1.2"  # of DALI's format
_SPACE = frozenset(" \t\n\v\f\r")


class Component(NamedTuple):
    """One member of a sample."""

    key: str
    offset: int
    size: int
    name: str


def dali_path(shard: str | Path) -> Path:
    """Where `wds2idx` puts the index of a shard."""
    path = Path(shard)
    return path.with_name(path.name[: path.name.find(".", 1)] + ".idx")


def export_dali(shard: str | Path, listing: str | Path | None = None) -> Path:
    """Write DALI's index of an indexed shard.

    Args:
        shard: Path of the tar file; its own index lies beside it.
        listing: Where to write; where DALI's tool would when None.

    Returns:
        The path of the file.

    Raises:
        ShardError: The shard's index is missing or damaged; or a name holds white space, which DALI's format cannot
            tell from its separators, a member key is empty, there are no samples, or they are in packs.
        OSError: The text cannot be written.
    """
    path = expanded(dali_path(shard) if listing is None else listing)
    index = open_index(str(expanded(shard)))
    index.check_self()
    if index.packs:
        message = "DALI reads members where a block of 512 bytes begins, and this shard has packs: write it again"
        raise ShardError(f"{message} without bytes_per_pack", shard=str(shard))
    samples = list(indexed_components(index))
    if not samples:
        raise ShardError("DALI reads no shard without samples", shard=str(shard))
    lines = [_line(sample, str(shard)) for sample in samples]
    text = "".join(f"{line}\n" for line in (f"{DALI_VERSION} {len(samples)}", *lines))
    atomic_write(path, text.encode("utf-8", "surrogateescape"))
    return path


def indexed_components(index: ShardIndex) -> Iterator[list[Component]]:
    """The samples of an index, as DALI describes them."""
    offsets, sizes, layouts = index.offsets.tolist(), index.sizes.tolist(), index.layout_numbers.tolist()
    at = 0
    for key, layout in zip(index.keys, layouts, strict=True):
        suffixes = index.suffixes[layout]
        yield [Component(s, offsets[at + i], sizes[at + i], f"{key}.{s}") for i, s in enumerate(suffixes)]
        at += len(suffixes)


def _line(sample: Sequence[Component], shard: str) -> str:
    for part in sample:
        if not part.key or not _SPACE.isdisjoint(part.name):
            message = "DALI's index cannot hold this name: it is empty after the dot, or has white space"
            raise ShardError(message, shard=shard, member=part.name, offset=part.offset - 512)
    return " ".join(f"{part.key} {part.offset} {part.size} {part.name}" for part in sample)
