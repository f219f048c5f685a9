"""One shard, mapped: samples by their numbers, undecoded."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from tarfile import TarError, TarInfo
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_intdigest

from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DamagedShardError, DecodeError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.format.files import Bytes, open_plain
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.container import checksum_between
from headrace.webdatamodule.shards.index.keys import Namer, namer
from headrace.webdatamodule.shards.index.shard_index import ShardIndex


class Mapped:
    """A memory map of a shard; it stays what it is when the file is replaced under its name.

    Args:
        index: Of the shard; it names the file.
        verified: Whether the checksum of each member is compared when it is read: then damage of a few samples is
            left to those reads, and the others stay readable.

    Attributes:
        data: The bytes; a slice of them is a copy.

    Raises:
        OSError: The file cannot be opened.
        DamagedShardError: It is a directory, a FIFO or a device.
        StaleIndexError: It is another one than was indexed.
    """

    def __init__(self, index: ShardIndex, *, verified: bool = False) -> None:
        self.path, self.nbytes = index.shard, index.shard_bytes
        self.data: bytes | mmap.mmap = b""
        with os.fdopen(open_plain(self.path), "rb", buffering=0) as file:
            if file.seek(0, 2):  # an empty file cannot be mapped
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        check_belongs(index, self.data, verified=verified)

    def check_size(self) -> None:
        """See whether the file was cut since: to read behind its end would kill the process.

        This comes before each read of a few samples. A cut in the microseconds between is not seen; it needs someone
        who writes into the file itself, as replacing it under its name leaves the map as it was.

        Raises:
            StaleIndexError: It was.
        """
        if isinstance(self.data, mmap.mmap) and self.data.size() != self.nbytes:
            message = f"the shard had {self.nbytes} bytes when it was opened, and has {self.data.size()} now"
            raise StaleIndexError(f"{message}: restore it, and make the dataset again", shard=self.path)


_LOOKED_AT = 9

_NAME = 99  # bytes of a longer name may stand in a header before that of the member


def check_belongs(index: ShardIndex, data: Bytes, *, verified: bool) -> None:
    """See whether a shard is the one that was indexed; what is damaged in it is left to who reads that member.

    Args:
        index: Of the shard.
        data: The bytes of the shard.
        verified: Whether the checksum of each member is compared when it is read. Only then may damage pass here.

    Raises:
        StaleIndexError: It is another shard, or one that is damaged more than here and there.
    """
    try:
        index.check_shard(len(data), lambda begin, end: _piece(data, begin, end))
    except StaleIndexError:
        if not (verified and len(data) == index.shard_bytes and _is_the_same(index, data)):
            raise


def _is_the_same(index: ShardIndex, data: Bytes) -> bool:
    """Whether the first, the last and some samples between are where the index says, and most of them unharmed.

    Another set of the same shape has the same names and sizes, but other data in all samples.
    """
    last = index.n_samples - 1
    some = sorted({last * part // (_LOOKED_AT - 1) for part in range(_LOOKED_AT)}) if last >= 0 else []
    ends = {*some[:1], *some[len(some) // 2 :][:1], *some[-1:]}
    if not all(_is_named(index, data, index.span(sample)[0]) for sample in ends):
        return False
    return 2 * sum(_is_whole(index, data, sample) for sample in some) > len(some)


def _is_named(index: ShardIndex, data: Bytes, position: int) -> bool:
    begin = int(index.blocks[position] - 1) * BLOCK
    try:
        header = TarInfo.frombuf(_piece(data, begin, begin + BLOCK), "utf-8", "surrogateescape")
    except TarError:
        return False
    _, name = index.locate(position)
    cut = len(header.name.encode("utf-8", "surrogateescape")) >= _NAME and name.startswith(header.name)
    return (header.name == name or cut) and header.size == int(index.sizes[position])


def _is_whole(index: ShardIndex, data: Bytes, sample: int) -> bool:
    for position in range(*index.span(sample)):
        begin = int(index.blocks[position]) * BLOCK
        end = begin + int(index.sizes[position])
        if checksum_between(data, begin, end) & 0xFFFFFFFF != int(index.checksums[position]):
            return False
    return True


def _piece(data: Bytes, begin: int, end: int) -> bytes:
    return bytes(data[begin:end])


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


def oversized(index: ShardIndex, keys: Sequence[str] | None, max_bytes: int) -> dict[int, int]:
    """Find the samples that have too large a member.

    Args:
        index: Of the shard.
        keys: Which members count, in lower case; all when None.
        max_bytes: The most bytes that a member may have.

    Returns:
        Numbers of samples, ascending, and the position of the first such member of each in the index's arrays.
    """
    if not index.sizes.size or int(index.sizes.max()) <= max_bytes:
        return {}
    wanted = None if keys is None else frozenset(keys)
    found: dict[int, int] = {}
    for at in np.flatnonzero(index.sizes > max_bytes).tolist():
        sample, _ = index.locate(at)
        if wanted is None or index.layout(sample)[at - index.span(sample)[0]] in wanted:
            found.setdefault(sample, at)
    return found


def refuse_size(index: ShardIndex, at: int, max_bytes: int) -> NoReturn:
    """Raise the error of a member that is too large.

    Args:
        index: Of the shard.
        at: The member's position in the index's arrays.
        max_bytes: The most bytes that a member may have.

    Raises:
        DecodeError: Always.
    """
    message = f"the member has {int(index.sizes[at])} bytes, which is more than max_bytes={max_bytes}"
    raise DecodeError(f"{message}: raise max_bytes if that is meant to be, or leave it out of keys", **place(index, at))


_FEW = 64

_PIECE = 16 << 20  # of a large member whose checksum alone is wanted


class OpenShard:
    """A shard and its index.

    Args:
        index: Of the shard.
        mapped: The shard's bytes.
        keys: Which members to read, in lower case; all when None.
        verify: Whether to check the checksum of each member that is read.
        max_bytes: Most bytes that a member may have; a larger one is refused before it is read.
    """

    def __init__(
        self,
        index: ShardIndex,
        mapped: Mapped,
        keys: Sequence[str] | None,
        *,
        verify: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.index, self._max_bytes = index, max_bytes
        self._too_large = oversized(index, keys, max_bytes)
        self._mapped, self._verify = mapped, verify
        self._plans = [plan(layout, keys) for layout in index.layouts]
        self._names = namer(index.keys)
        # An item of a memoryview is a Python integer, at a third of the cost of one of an array.
        self._blocks, self._sizes = index.blocks.data, index.sizes.data
        self._checksums = index.checksums.data
        members = self._plans[0] if len(self._plans) == 1 else None
        self._rows = None if members is None else Rows(index, members, self._names, verify=verify)

    def some(self, samples: Sequence[int], into: list[Sample]) -> None:
        """Read some samples.

        Args:
            samples: Their numbers, which have to exist.
            into: Gets for each one its key under "__key__", and its members' bytes under their keys.

        Raises:
            DecodeError: A member is too large.
            ShardError: The bytes are not those that were indexed, or a sample lacks a member.
        """
        self._check_sizes(samples)
        self.index.check_size()
        self._mapped.check_size()
        if self._rows is None:
            self._different(samples, into)
        else:
            into += self._rows.some(self._mapped.data, samples)

    def between(self, start: int, stop: int) -> Iterator[list[Sample]]:
        """Read samples that stand in a row; faster than `some` where all have the same members.

        Args:
            start: The first one.
            stop: The one after the last.

        Yields:
            A few samples at once, as of `some`; when there is an error, those that come before it first.

        Raises:
            ShardError: As of `some`.
        """
        end = self._small_until(start, stop)
        if self._rows is None:
            yield from self._few_by_few(start, end)
        else:
            yield from self._rows.read(self._mapped, start, end)
        self._check_sizes(range(end, stop)[:1])

    def check_all(self) -> None:
        """Check the checksum of each member of the shard.

        Raises:
            ShardError: The bytes are not those that were indexed.
        """
        large = list(oversized(self.index, None, _PIECE))
        whole = self._whole()
        for start, stop in zip([0, *(sample + 1 for sample in large)], [*large, self.index.n_samples], strict=True):
            for _ in whole.between(start, stop):
                pass
        for sample in large:
            for at in range(*self.index.span(sample)):
                self._check_one(at)

    def place(self, sample: int, member: str) -> dict[str, Any]:
        """Where a member stands, in the words of a ShardError.

        Args:
            sample: Number of the sample.
            member: The member's key, in lower case.
        """
        return place(self.index, self.index.span(sample)[0] + self.index.layout(sample).index(member))

    def _whole(self) -> OpenShard:
        return OpenShard(self.index, self._mapped, None, verify=True, max_bytes=self.index.shard_bytes)

    def _piece(self, begin: int, end: int) -> bytes:
        self._mapped.check_size()
        return self._mapped.data[begin:end]

    def _check_one(self, at: int) -> None:
        digest, begin = xxh3_64(), self._blocks[at] * BLOCK
        end = begin + self._sizes[at]
        for first in range(begin, end, _PIECE):
            digest.update(self._piece(first, min(first + _PIECE, end)))
        if digest.intdigest() & MASK != self._checksums[at]:
            refuse(self.index, at)

    def _check_sizes(self, samples: Sequence[int]) -> None:
        if self._too_large:
            for sample in samples:
                if sample in self._too_large:
                    refuse_size(self.index, self._too_large[sample], self._max_bytes)

    def _small_until(self, start: int, stop: int) -> int:
        return min((sample for sample in self._too_large if start <= sample < stop), default=stop)

    def _few_by_few(self, start: int, stop: int) -> Iterator[list[Sample]]:
        for begin in range(start, stop, _FEW):
            made: list[Sample] = []
            try:
                self.some(range(begin, min(begin + _FEW, stop)), made)
            except ShardError:
                yield made
                raise
            yield made

    def _different(self, samples: Sequence[int], into: list[Sample]) -> None:
        data, blocks, sizes, checksums = self._mapped.data, self._blocks, self._sizes, self._checksums
        plans = map(self._plans.__getitem__, self.index.layouts_of(samples))
        rows = zip(self._names(samples), self.index.starts_of(samples), plans, strict=False)
        for key, start, members in rows:
            sample: Sample = {"__key__": key}
            if members is None:
                self._lacking(start)
            for name, column in members:
                at = start + column
                begin = blocks[at] * BLOCK
                sample[name] = read = data[begin : begin + sizes[at]]
                if self._verify and xxh3_64_intdigest(read) & MASK != checksums[at]:
                    refuse(self.index, at)
            into.append(sample)

    def _lacking(self, at: int) -> NoReturn:
        sample, _ = self.index.locate(at)
        held = ", ".join(map(repr, self.index.layout(sample)))
        message = f"the sample lacks a member that keys asks for, it has only {held}: correct keys, or the shard"
        raise ShardError(message, shard=self.index.shard, sample=self.index.key(sample))
