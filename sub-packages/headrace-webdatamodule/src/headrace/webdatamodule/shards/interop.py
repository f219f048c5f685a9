"""Indexes of other programs: NVIDIA DALI's text index, read and written, and Megatron-Energon's `.tar.idx`, read.

DALI's tool `wds2idx` writes the text, and its webdataset reader takes it. The first line is "v1.2" and the number of
samples; each other one is a sample, with four words for each member: its key, the offset of its data, its size and
its name, all separated by spaces. Energon's index says where each sample begins and the last one ends, as 64-bit
integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import DamagedIndexError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import atomic_write, expanded, read_plain
from headrace.webdatamodule.shards.format.tar import BLOCK, META, Member, padded, skip_reason, walk
from headrace.webdatamodule.shards.index.build import index_shard, open_shard_bytes
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.shard_set import open_index

VERSION = "v1.2"
_MOST_DALI = 1 << 28
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
            tell from its separators, a member key is empty, or there are no samples.
        OSError: The text cannot be written.
    """
    path = expanded(dali_path(shard) if listing is None else listing)
    index = open_index(str(expanded(shard)))
    index.check_self()
    samples = list(indexed_components(index))
    if not samples:
        raise ShardError("DALI reads no shard without samples", shard=str(shard))
    lines = [_line(sample, str(shard)) for sample in samples]
    text = "".join(f"{line}\n" for line in (f"{VERSION} {len(samples)}", *lines))
    atomic_write(path, text.encode("utf-8", "surrogateescape"))
    return path


def import_dali(shard: str | Path, listing: str | Path | None = None) -> ShardIndex:
    """Index a shard that comes with an index of DALI's, and check that both say the same.

    DALI's index has no checksums, so the shard is read once. Members that are no part of a sample here, such as
    those named `__x__`, may be in DALI's index. The offsets that `wds2idx` gives are too large for shards with PAX
    headers, as webdataset writes them by default: they are refused, and `export_dali` writes the right ones.

    Args:
        shard: Path of the tar file.
        listing: DALI's index; where its tool writes it when None.

    Returns:
        The shard's own index, written beside it.

    Raises:
        DamagedIndexError: The text has another form.
        StaleIndexError: It belongs to another shard; the first difference is named.
        ShardError: The shard is damaged, or cannot be indexed.
        FileNotFoundError: There is no such shard, or no such text.
    """
    shard, path = expanded(shard), expanded(dali_path(shard) if listing is None else listing)
    try:
        listed = parse_dali(read_plain(path, DamagedIndexError, most=_MOST_DALI).decode("utf-8", "surrogateescape"))
    except ShardError as error:
        error.message, error.shard = f"{path}: {error.message}", str(shard)
        raise
    index_shard(shard)
    index = ShardIndex.open(shard)
    members = [
        [part for part in sample if not skip_reason(Member(part.name, part.offset, part.size, 0, "file"))]
        for sample in listed
    ]
    for ours, theirs in zip_longest(indexed_components(index), filter(None, members)):
        if ours != theirs:
            where = (ours or theirs)[0]
            message = f"{path} belongs to another shard, or is wrong: made by wds2idx from a PAX file, maybe"
            raise StaleIndexError(message, shard=str(shard), member=where.name)
    return index


def parse_dali(text: str) -> list[list[Component]]:
    """Read an index of DALI's."""
    first, *lines = text.split("\n")
    words = first.split(" ")
    if words[0] != VERSION:
        raise DamagedIndexError(f"the index is of version {words[0][:24]!r}; only {VERSION} is read")
    if lines[-1:] != [""] or words[1:] != [str(len(lines) - 1)]:
        promised = " ".join(words[1:])[:60]
        raise DamagedIndexError(f"the index is cut: it promises {promised!r} samples, and has {len(lines) - 1} lines")
    return [list(_components(line, number)) for number, line in enumerate(lines[:-1], start=2)]


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
            message = "DALI's index cannot hold this name: it is empty behind the dot, or has white space"
            raise ShardError(message, shard=shard, member=part.name, offset=part.offset - 512)
    return " ".join(f"{part.key} {part.offset} {part.size} {part.name}" for part in sample)


def _components(line: str, number: int) -> Iterator[Component]:
    words = line.split(" ")
    for key, offset, size, name in zip(*(words[first::4] for first in range(4)), strict=False):
        if not (offset + size).isdecimal() or not offset or not size:
            break
        yield Component(key, int(offset), int(size), name)
    else:
        if len(words) % 4 == 0:
            return
    raise DamagedIndexError(f"line {number} of the index is not four words for each member: {line[:60]!r}")


_MOST_ENERGON = 1 << 30


def energon_path(shard: str | Path) -> Path:
    """Where Energon puts the index of a shard."""
    return Path(shard).with_suffix(".tar.idx")


def import_energon(shard: str | Path, listing: str | Path | None = None) -> ShardIndex:
    """Index a shard that comes with an index of Energon's, and check that both say the same.

    Energon's index has neither names nor checksums, so the shard is read once.

    Args:
        shard: Path of the tar file.
        listing: Energon's index; where Energon writes it when None.

    Returns:
        The shard's own index, written beside it.

    Raises:
        DamagedIndexError: The bytes have another form.
        StaleIndexError: It belongs to another shard; the first difference is named.
        ShardError: The shard is damaged, or cannot be indexed.
    """
    shard, path = expanded(shard), expanded(energon_path(shard) if listing is None else listing)
    listed = parse_energon(read_plain(path, DamagedIndexError, most=_MOST_ENERGON), name=str(path))
    members = list(walk(open_shard_bytes(shard), shard=str(shard)))
    real = np.array(sample_offsets(members), np.int64)
    if not np.array_equal(listed, real):
        common = min(listed.size, real.size)
        first = int(np.argmin(np.append(listed[:common] == real[:common], False)))
        message = f"{path} belongs to another shard: entry {first} of {listed.size} is wrong; the shard has {real.size}"
        raise StaleIndexError(message, shard=str(shard), offset=int(real[min(first, real.size - 1)]))
    index_shard(shard)
    return ShardIndex.open(shard)


def parse_energon(data: bytes, *, name: str = "") -> npt.NDArray[np.int64]:
    """Read an index of Energon's."""
    if not data or len(data) % 8:
        raise DamagedIndexError(f"{name} has {len(data)} bytes, no multiple of 8: it is cut, or no index of Energon's")
    found = np.frombuffer(data, "<u8")
    if found[-1] >> 62 or (found % BLOCK).any() or (found[1:] <= found[:-1]).any():
        raise DamagedIndexError(f"{name} is no index of Energon's: its numbers are no increasing multiples of {BLOCK}")
    return found.astype(np.int64)


def sample_offsets(members: Iterable[Member]) -> list[int]:
    """Where samples begin by Energon's rule, and where the last member ends."""
    starts, last, end = [], None, 0
    for member in members:
        end = member.offset + padded(member.size)
        key = sample_key(member.name)
        if member.kind != "file" or key is None or META.match(member.name):
            continue
        if key != last:
            starts.append(member.start)
            last = key
    return [*starts, end]


def sample_key(name: str) -> str | None:
    """The sample that a member belongs to by Energon's rule, `((?:.*/|)[^.]+)[.]([^/]*)$`, in linear time."""
    dot = name.find(".", name.rfind("/") + 1)
    begin = name.rfind(".", 0, max(dot, 0)) + 1
    newline = name.find("\n")
    slash = name.find("/", begin, dot - 1 if newline < 0 else max(0, min(dot - 1, newline)))
    return name[:dot] if dot > 0 and (begin == 0 or slash >= 0) else None
