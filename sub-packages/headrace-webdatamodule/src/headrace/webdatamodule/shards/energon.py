"""The `.tar.idx` index of Megatron-Energon: where each sample begins and the last one ends, as 64-bit integers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import DamagedIndexError, StaleIndexError
from headrace.webdatamodule.shards.format.grouping import META
from headrace.webdatamodule.shards.format.headers import BLOCK
from headrace.webdatamodule.shards.format.plain_files import read_plain
from headrace.webdatamodule.shards.format.walking import Member, walk
from headrace.webdatamodule.shards.index.indexing import index_shard, map_file
from headrace.webdatamodule.shards.index.shard_index import ShardIndex

_MOST_BYTES = 1 << 30


def energon_path(shard: str | Path) -> Path:
    """Where Energon puts the index of a shard.

    >>> energon_path("data/a-000000.tar").name
    'a-000000.tar.idx'
    """
    return Path(shard).with_suffix(".tar.idx")


def import_energon(shard: str | Path, listing: str | Path | None = None) -> ShardIndex:
    """Index a shard that comes with an index of Energon's, and see that both say the same.

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
    path = energon_path(shard) if listing is None else Path(listing)
    told = parse_energon(read_plain(path, DamagedIndexError, most=_MOST_BYTES), name=str(path))
    members = list(walk(map_file(Path(shard)), shard=str(shard)))
    real = np.array(sample_offsets(members), np.int64)
    if not np.array_equal(told, real):
        common = min(told.size, real.size)
        first = int(np.argmin(np.append(told[:common] == real[:common], False)))
        message = f"{path} belongs to another shard: its entry {first} of {told.size} is wrong, of {real.size}"
        raise StaleIndexError(message, shard=str(shard), offset=int(real[min(first, real.size - 1)]))
    index_shard(Path(shard))
    return ShardIndex.open(shard)


def parse_energon(data: bytes, *, name: str = "") -> npt.NDArray[np.int64]:
    """Read an index of Energon's.

    Args:
        data: The bytes of the file.
        name: Path of the file, named in errors.

    Returns:
        Where each sample's first header begins, and where the last sample's blocks end; shape [n_samples + 1].

    Raises:
        DamagedIndexError: The bytes are cut, or the numbers do not increase in steps of blocks.

    >>> parse_energon(np.array([0, 1024, 2048], "<u8").tobytes()).tolist()
    [0, 1024, 2048]
    """
    if not data or len(data) % 8:
        raise DamagedIndexError(f"{name} has {len(data)} bytes, no multiple of 8: it is cut, or no index of Energon's")
    found = np.frombuffer(data, "<u8")
    if found[-1] >> 62 or (found % BLOCK).any() or (found[1:] <= found[:-1]).any():
        raise DamagedIndexError(f"{name} is no index of Energon's: its numbers are no increasing multiples of {BLOCK}")
    return found.astype(np.int64)


def sample_offsets(members: Iterable[Member]) -> list[int]:
    """Where samples begin by Energon's rule, and where the last member ends.

    Args:
        members: As of `walk`.

    Returns:
        `n_samples + 1` offsets in bytes.

    >>> sample_offsets([Member("a.x", 512, 1, 0, "file"), Member("b.x", 1536, 0, 1024, "file")])
    [0, 1024, 1536]
    """
    starts, last, end = [], None, 0
    for member in members:
        end = member.offset + member.size + -member.size % BLOCK
        key = sample_key(member.name)
        if member.kind != "file" or key is None or META.match(member.name):
            continue
        if key != last:
            starts.append(member.start)
            last = key
    return [*starts, end]


def sample_key(name: str) -> str | None:
    r"""The sample that a member belongs to by Energon's rule, `((?:.*/|)[^.]+)[.]([^/]*)$`, in linear time.

    Args:
        name: Path of the member.

    Returns:
        What stands before the dot; None when the rule does not fit.

    >>> [sample_key(name) for name in ("a.d/b.x.y", "a/.x", "a.d/.x", "a/b")]
    ['a.d/b', 'a/', None, None]
    """
    dot = name.find(".", name.rfind("/") + 1)
    begin = name.rfind(".", 0, max(dot, 0)) + 1
    newline = name.find("\n")
    slash = name.find("/", begin, dot - 1 if newline < 0 else max(0, min(dot - 1, newline)))
    return name[:dot] if dot > 0 and (begin == 0 or slash >= 0) else None
