"""The index of a whole set: the indexes of all its shards in one file, `manifest.hrs`, beside the manifest.

A reader of a thousand shards opens, maps or fetches this one file instead of a thousand. It repeats the shards' own
indexes, so readers can do without it, and it is used only where it fits the manifest.

====================  ============================================================================
8 bytes               magic: `89 48 52 53 0D 0A 1A 0A`
4 bytes               version of the format, 1 (all numbers are little-endian)
4 bytes               number of shards, n
16 bytes              the fingerprint of the manifest without its columns
8 bytes for each      where each shard's index ends, in bytes of this file
8 bytes               XXH3 of all before
the indexes           the bytes of the shards' `.hri` files, in the order of the manifest
====================  ============================================================================

The first index begins after the head. Each has checksums of its own, and the manifest names the checksum of each: an
index that does not match it is never read for that of the shard.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.webdatamodule.shards.errors import DamagedIndexError, IndexVersionError, StaleIndexError
from headrace.webdatamodule.shards.format.files import read_or_map, read_plain, staged_file
from headrace.webdatamodule.shards.index.checksums import checksum64
from headrace.webdatamodule.shards.index.container import INDEX_VERSION, check_version, index_checksum
from headrace.webdatamodule.shards.index.manifest import Manifest
from headrace.webdatamodule.shards.index.shard_index import READ_BYTES, ShardIndex, index_path

SET_INDEX_NAME = "manifest.hrs"
SET_INDEX_MAGIC = b"\x89HRS\r\n\x1a\n"
_HEAD = struct.Struct("<8sII16s")


class Listed(NamedTuple):
    """What a manifest says of a set, which the index of the set has to fit."""

    fingerprint: bytes  # 16 bytes of the manifest without its columns: they change with any byte of any shard
    checksums: tuple[int, ...]  # of the shards' indexes

    @classmethod
    def of(cls, manifest: Manifest) -> Listed:
        """What this manifest says."""
        alone = replace(manifest, columns=()) if manifest.columns else manifest  # which may know its fingerprint
        return cls(bytes.fromhex(alone.fingerprint), tuple(int(entry.index, 16) for entry in manifest.shards))


class SetIndex:
    """The indexes of a set's shards, each parsed on first use from `data`, the bytes of all."""

    def __init__(self, data: bytes | mmap.mmap | memoryview, listed: Listed) -> None:
        self.data, self._listed = memoryview(data), listed
        count = len(listed.checksums)
        begin = head_bytes(count)
        if len(self.data) < _HEAD.size or bytes(self.data[:8]) != SET_INDEX_MAGIC:
            raise DamagedIndexError(f"this is no index of a set: it begins with {bytes(self.data[:16])!r}")
        _, version, found, fingerprint = _HEAD.unpack(self.data[: _HEAD.size])
        check_version(version)
        if (found, fingerprint) != (count, listed.fingerprint):
            raise StaleIndexError("the index of the set belongs to another manifest: index the directory again")
        head = bytes(self.data[: begin - 8])
        if checksum64(head) != int.from_bytes(self.data[begin - 8 : begin], "little"):
            raise DamagedIndexError("the head of the set's index is damaged: its checksum does not fit")
        self._bounds = [begin, *np.frombuffer(head, "<u8", count, _HEAD.size).tolist()]
        if self._bounds[-1] != len(self.data):
            raise DamagedIndexError(
                f"the index of the set has {len(self.data)} bytes, not {self._bounds[-1]}: it is cut"
            )

    @classmethod
    def open(cls, directory: str | Path, listed: Listed) -> SetIndex | None:
        """Open the one that lies beside a manifest, None when there is none that fits; large ones are mapped."""
        path = Path(directory) / SET_INDEX_NAME
        try:
            return cls(read_or_map(path, DamagedIndexError, most_read=READ_BYTES), listed)
        except (FileNotFoundError, StaleIndexError):
            return None
        except (DamagedIndexError, IndexVersionError) as error:
            error.message = f"{path}: {error.message}"
            raise

    def __len__(self) -> int:
        return len(self._listed.checksums)

    def shard(self, number: int, path: str) -> ShardIndex:
        """The index of one shard."""
        begin, end = self._bounds[number : number + 2]
        whole = self.data.obj
        if isinstance(whole, mmap.mmap) and whole.size() < end:  # to look past its end would kill the process
            raise DamagedIndexError("the index of the set was cut since it was opened", shard=path)
        index = ShardIndex(self.data[begin:end], shard=path, end=end)
        if index.checksum != self._listed.checksums[number]:
            message = "the shard's index in that of the set does not match the manifest: index the directory again"
            raise StaleIndexError(message, shard=path)
        return index


def head_bytes(count: int) -> int:
    """Where the first index begins in the index of a set."""
    return _HEAD.size + 8 * count + 8


def write_set_index(folder: Path, manifest: Manifest, *, force: bool = False) -> None:
    """Write the index of a set, before its manifest, unless there is one that fits. A set of one shard needs none."""
    if len(manifest.shards) < 2:
        (folder / SET_INDEX_NAME).unlink(missing_ok=True)
        return
    listed = Listed.of(manifest)
    with suppress(DamagedIndexError):
        if not force and SetIndex.open(folder, listed) is not None:
            return
    with staged_file(folder / SET_INDEX_NAME) as stream:
        stream.write(bytes(head_bytes(len(manifest.shards))))
        ends = list[int]()
        for entry in manifest.shards:
            shard = folder / entry.name
            data = read_plain(index_path(shard), DamagedIndexError, most=sys.maxsize)
            if f"{index_checksum(data):016x}" != entry.index:
                raise StaleIndexError("the index does not match the manifest", shard=str(shard))
            stream.write(data)
            ends.append(stream.tell())
        stream.seek(0)
        stream.write(_head(listed, ends))


def _head(listed: Listed, ends: Sequence[int]) -> bytes:
    head = _HEAD.pack(SET_INDEX_MAGIC, INDEX_VERSION, len(ends), listed.fingerprint) + np.array(ends, "<u8").tobytes()
    return head + checksum64(head).to_bytes(8, "little")
