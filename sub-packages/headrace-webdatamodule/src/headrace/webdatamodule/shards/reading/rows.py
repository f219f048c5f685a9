"""Samples that all have the same members: read column by column."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from headrace.webdatamodule.shards.errors import DamagedShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.keys import Namer
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.mapped import Mapped

Sample = dict[str, Any]
Plan = tuple[tuple[str, int], ...]
MASK = 0xFFFFFFFF
# What is made at once stays in the processor's cache, and the memory that a consumer let go of is used again.
_BYTES, _SAMPLES = 1 << 18, 1 << 10


class Rows:
    """Reads such samples, column by column.

    Args:
        index: Of a shard whose samples all have the same members.
        members: Which of them to take; not empty.
        names: Makes the keys of samples.
        verify: Whether to check checksums.
    """

    def __init__(self, index: ShardIndex, members: Plan, names: Namer, *, verify: bool) -> None:
        self._index, self._names, self._verify = index, names, verify
        self._members = [name for name, _ in members]
        self._width, self._columns = len(index.layouts[0]), [column for _, column in members]
        # An item of a memoryview is a Python integer, at a third of the cost of one of an array.
        self._pointers = index.blocks.data, index.sizes.data, index.checksums.data
        self._empty = dict.fromkeys(("__key__", *self._members))

    def some(self, data: bytes | mmap.mmap, samples: Sequence[int]) -> list[Sample]:
        """Read some samples, in any order.

        Args:
            data: The shard's bytes.
            samples: Their numbers.

        Returns:
            For each one its key under "__key__", and its members' bytes under their keys.
        """
        blocks, sizes, checksums = self._pointers
        width, verify = self._width, self._verify
        made: list[Sample] = [{"__key__": key} for key in self._names(samples)]
        starts = [width * sample for sample in samples]
        # Loops without calls, because each call costs as much as reading a member.
        for name, column in zip(self._members, self._columns, strict=True):
            for sample, start in zip(made, starts, strict=True):
                at = start + column
                begin = blocks[at] * BLOCK
                sample[name] = read = data[begin : begin + sizes[at]]
                if verify and xxh3_64_intdigest(read) & MASK != checksums[at]:
                    refuse(self._index, at)
        return made

    def read(self, mapped: Mapped, start: int, stop: int) -> Iterator[list[Sample]]:
        """Read samples that stand in a row, faster than `some`.

        Args:
            mapped: The shard's bytes.
            start: The first sample.
            stop: The one after the last.

        Yields:
            A few samples at once; when there is an error, those that come before it first.
        """
        for begin in range(start, stop, _SAMPLES):
            self._index.check_size()
            where = self._where(begin, min(begin + _SAMPLES, stop))
            begins = self._index.blocks[where].astype(np.int64) * BLOCK
            ends = begins + self._index.sizes[where].astype(np.int64)  # 64-bit sizes are unsigned
            step = self._step(begins, ends)
            bounds = list(zip(begins.tolist(), ends.tolist(), strict=True))
            for first in range(0, len(bounds), step):
                mapped.check_size()
                data = mapped.data
                read = [data[a:b] for a, b in bounds[first : first + step]]
                yield from self._made(read, begin + first // len(self._columns), where[first : first + step])

    def _where(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        where: npt.NDArray[np.int64] = np.arange(start, stop)[:, None] * self._width + np.array(self._columns)
        return where.ravel()

    def _step(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
        samples = begins.size // len(self._columns)
        most = _BYTES * samples // max(1, int((ends - begins).sum()))
        return max(1, most) * len(self._columns)

    def _made(self, read: list[bytes], start: int, where: npt.NDArray[np.int64]) -> Iterator[list[Sample]]:
        width = len(self._columns)
        samples = self._dicts(read, start, len(read) // width)
        wrong = self._first_wrong(read, where) if self._verify else len(read)
        if wrong < len(read):
            yield samples[: wrong // width]
            refuse(self._index, int(where[wrong]))
        yield samples

    def _first_wrong(self, read: list[bytes], where: npt.NDArray[np.int64]) -> int:
        wrong = checksums32(read) != self._index.checksums[where]
        return int(wrong.argmax()) if wrong.any() else len(read)

    def _dicts(self, read: list[bytes], start: int, count: int) -> list[Sample]:
        samples: list[Sample] = list(map(dict.copy, repeat(self._empty, count)))
        for sample, key in zip(samples, self._names(range(start, start + count)), strict=True):
            sample["__key__"] = key
        for column, name in enumerate(self._members):
            for sample, data in zip(samples, read[column :: len(self._members)], strict=True):
                sample[name] = data
        return samples


def plan(layout: Sequence[str], keys: Sequence[str] | None) -> Plan | None:
    """Which members to take from samples of a layout: pairs of a key and its column.

    Args:
        layout: The member keys of the samples.
        keys: Which of them to take; all when None.

    Returns:
        The pairs; None when the samples lack one.

    >>> plan(["txt", "cls"], ["cls"]), plan(["txt"], ["cls"])
    ((('cls', 1),), None)
    """
    wanted = layout if keys is None else keys
    if not set(wanted) <= set(layout):
        return None
    columns = {key: column for column, key in enumerate(layout)}  # not layout.index, for layouts of many members
    return tuple((key, columns[key]) for key in wanted)


def checksums32(pieces: Iterable[bytes]) -> npt.NDArray[np.uint32]:
    """`checksum32` of many pieces at once.

    Args:
        pieces: Bytes.

    Returns:
        The checksums, shape [number of pieces].

    >>> from headrace.webdatamodule.shards.index.container import checksum32
    >>> checksums32([b"abc", b""]).tolist() == [checksum32(b"abc"), checksum32(b"")]
    True
    """
    digests = np.frombuffer(b"".join(map(xxh3_64_digest, pieces)), ">u4")
    return digests[1::2].astype(np.uint32)


def place(index: ShardIndex, at: int) -> dict[str, Any]:
    """Where a member stands, in the words of a ShardError.

    Args:
        index: Of the shard.
        at: The member's position in the index's arrays.
    """
    sample, member = index.locate(at)
    offset = int(index.blocks[at]) * BLOCK - BLOCK
    return {"shard": index.shard, "sample": index.key(sample), "member": member, "offset": offset}


def refuse(index: ShardIndex, at: int) -> NoReturn:
    """Raise the error of a member whose checksum does not fit.

    Args:
        index: Of the shard.
        at: The member's position in the index's arrays.

    Raises:
        DamagedShardError: Always.
    """
    message = "the member's bytes are not those that were indexed: restore the shard, or write it again"
    raise DamagedShardError(message, **place(index, at))
