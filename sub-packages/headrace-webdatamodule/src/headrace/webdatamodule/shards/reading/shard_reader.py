"""One shard and its index: samples by their numbers, undecoded."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import Damage, DamagedShardError, DecodeError, ShardError, StaleIndexError
from headrace.webdatamodule.shards.index.checksums import MEMBER_BITS, checksum32, member_checksums
from headrace.webdatamodule.shards.index.keys import NumberedKeys
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.stores.local import LocalStore
from headrace.webdatamodule.shards.stores.store import KnownParts, Span

Sample: TypeAlias = dict[str, Any]
Read: TypeAlias = Callable[[int], Sample]
# Files that are mapped: what tells the size of each now, and the size that it must have.
Mapped: TypeAlias = tuple[tuple[Callable[[], int], int], ...]
MemberColumns = tuple[tuple[str, int], ...]
# What is made at once stays in the processor's cache, and the memory that a consumer has freed is used again.
_BYTES, _SAMPLES = 1 << 18, 1 << 10
_FEW = 64


class ShardBytes:
    """Where the bytes of a shard come from."""

    data: Any = b""  # the bytes; a slice of them is a copy
    mapped: Mapped = ()
    by_ranges: bool = False  # whether `data` is empty, so that what is read has to be fetched before

    def fetch(self, spans: Sequence[Span]) -> KnownParts:  # noqa: ARG002 - for those that are read by ranges
        """Some ranges; of a shard that is here as a whole, none."""
        return KnownParts({})

    def check_size(self) -> None:
        """Refuse a file that was cut since it was opened."""

    def fetch_again(self, begin: int, end: int) -> bytes | None:  # noqa: ARG002 - for those that can
        """Some bytes once more from where the shard comes from; None where there is no such place."""
        return None

    def diagnose(self) -> None:
        """Raise a StaleIndexError when it is another shard."""


class MappedShard(ShardBytes):
    """The bytes of a shard, mapped; they stay what they are when the file is replaced under its name.

    Where reads compare checksums (`verified`), damage is left to them, so that samples without damage stay readable.
    """

    def __init__(self, index: ShardIndex, data: bytes | mmap.mmap, *, verified: bool = False) -> None:
        self.index, self.data = index, data
        self.mapped = ((data.size, index.shard_bytes),) if isinstance(data, mmap.mmap) else ()
        self.stale: StaleIndexError | None = None
        try:
            index.check_shard(len(data), lambda begin, end: data[begin:end])
        except StaleIndexError as error:
            if not verified or len(data) != index.shard_bytes:
                raise
            self.stale = error

    def check_size(self) -> None:
        """Refuse a file that was cut since: to read past its end would kill the process.

        This comes before each read of a few samples. A cut in the microseconds between is not seen; it needs someone
        who writes into the file itself, as replacing it under its name leaves the map as it was.
        """
        if isinstance(self.data, mmap.mmap) and self.data.size() != self.index.shard_bytes:
            message = f"the shard had {self.index.shard_bytes} bytes when it was opened, and has {self.data.size()} now"
            cure = "restore it, and open it again (a new IndexedShards)"
            raise StaleIndexError(f"{message}: {cure}", shard=self.index.shard)

    def diagnose(self) -> None:
        """See `ShardBytes`."""
        if self.stale is not None:
            raise StaleIndexError(self.stale.message, shard=self.stale.shard)


def map_shard(index: ShardIndex, *, verified: bool = False) -> MappedShard:
    """Map the file that an index names."""
    return MappedShard(index, LocalStore("").map(index.shard), verified=verified)


class ShardReader:
    """Reads samples of one shard."""

    def __init__(
        self,
        index: ShardIndex,
        source: ShardBytes,
        keys: Sequence[str] | None,
        *,
        verify: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.index, self.source = index, source
        self._mapped: Mapped = (*index.mapped, *source.mapped)
        self.batch = -1  # for `IndexedShards`: the number of the last one that needed this shard
        self._verify, self._max_bytes = verify, max_bytes
        self._plans = [_plan(layout, keys) for layout in index.layouts]
        self._too_large = _too_large(index, keys, max_bytes)
        alike = len(self._plans) == 1 and not self._too_large
        self._members = self._plans[0] if alike else None  # of all samples, where these are alike
        self._width = len(index.layouts[0]) if index.layouts else 0

    def check_size(self) -> None:
        """Refuse files that were cut since they were opened."""
        for size, expected in self._mapped:
            if size() != expected:
                self.index.check_size()
                self.source.check_size()

    def bind(self, data: Any) -> Read:
        """A function of a sample's number that reads it from these bytes, fast; call `check_size` before some reads."""
        # An item of a memoryview is a Python integer, at a third of the cost of one of an array.
        begins, sizes, checksums = self.index.begins.data, self.index.sizes.data, self.index.checksums.data
        keys = self.index.keys
        # One "%" is the fastest way to a key of a number.
        template, parts = (keys.template, keys.numbers) if isinstance(keys, NumberedKeys) else ("%s", keys)
        alike, width, verify, again, locate = self._members, self._width, self._verify, self._again, self._locate

        def read(number: int) -> Sample:
            start, members = (width * number, alike) if alike else locate(number)
            sample: Sample = {"__key__": template % parts[number]}
            for name, column in members:
                at = start + column
                begin = begins[at]
                sample[name] = piece = data[begin : begin + sizes[at]]
                if verify and digest64(piece) & MEMBER_BITS != checksums[at]:
                    sample[name] = again(at)
            return sample

        return read

    def read_many(self, numbers: Sequence[int]) -> list[Sample]:
        """Some samples; see `bind`."""
        self.check_size()
        return list(map(self.bind(self.source.data), numbers))

    def between(self, start: int, stop: int) -> Iterator[list[Sample]]:
        """Read samples that stand in a row, a few at once; those before an error come first.

        Twice as fast as `bind` where all have the same members.
        """
        source = self.source
        if self._members:
            yield from self._columns(source, start, stop)
            return
        read = self.bind(source.data)
        for first in range(start, stop, _FEW):
            self.index.check_size()
            source.check_size()
            samples: list[Sample] = []
            try:
                for number in range(first, min(first + _FEW, stop)):
                    samples.append(read(number))  # noqa: PERF401 - those before an error are kept
            except ShardError:
                yield samples
                raise
            yield samples

    def check_all(self) -> None:
        """Check the checksum of each member of the shard."""
        index, data = self.index, self.source.data
        for at, (begin, size, expected) in enumerate(zip(index.offsets, index.sizes, index.checksums, strict=True)):
            if not at % _SAMPLES:
                self.check_size()
            if checksum32(data, int(begin), int(begin) + int(size)) != expected:
                self._refuse(at)

    def place(self, number: int, member: str) -> dict[str, Any]:
        """Where a member of a sample stands, in the words of a ShardError."""
        return _place(self.index, self.index.span(number)[0] + self.index.layout(number).index(member))

    def positions(self, numbers: Sequence[int]) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Where the members of some samples stand in the index's arrays.

        For each layout that occurs: places in `numbers`, shape [n], and positions, shape [n, members].
        """
        starts = np.fromiter(self.index.starts_of(numbers), np.int64, len(numbers))
        layouts = np.fromiter(self.index.layouts_of(numbers), np.int64, len(numbers))
        found = []
        for layout in np.unique(layouts).tolist():
            chosen = np.flatnonzero(layouts == layout)
            columns = np.array([column for _, column in self._plans[layout] or ()], np.int64)
            found.append((chosen, starts[chosen, None] + columns))
        return found

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """The ranges of the members of a sample, in the order in which they are read."""
        start, members = (self._width * number, self._members) if self._members else self._locate(number)
        begins, sizes, found = self.index.begins.data, self.index.sizes.data, []
        for _, column in members:
            begin = begins[start + column]
            found.append((begin, begin + sizes[start + column]))
        return found

    def spans(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """The ranges of the members of some samples; an error where one is too large to be fetched."""
        if len(numbers) <= _FEW:  # faster than arrays
            return [span for number in numbers for span in self.ranges(number)]
        for number in self._too_large.keys() & set(numbers):
            self._locate(number)
        found = [positions.ravel() for _, positions in self.positions(numbers)]
        wanted = np.concatenate([np.empty(0, np.int64), *found])
        begins = self.index.begins[wanted].astype(np.int64)
        ends = begins + self.index.sizes[wanted].astype(np.int64)
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def first_too_large(self, start: int, stop: int) -> int:
        """The first of some samples that has a larger member than `max_bytes`; `stop` if none has."""
        return min((number for number in self._too_large if start <= number < stop), default=stop)

    def nbytes(self, numbers: range) -> npt.NDArray[np.int64]:
        """The bytes that are read of some samples, shape [n]."""
        made = np.zeros(len(numbers), np.int64)
        for chosen, positions in self.positions(numbers):
            made[chosen] = self.index.sizes[positions].astype(np.int64).sum(1)
        return made

    def _locate(self, number: int) -> tuple[int, MemberColumns]:
        """Where a sample's members begin in the index's arrays, and which of them to read."""
        if number in self._too_large:
            at = self._too_large[number]
            message = (
                f"the member has {int(self.index.sizes[at])} bytes, which is more than max_bytes={self._max_bytes}"
            )
            cure = "raise max_bytes if that is meant to be, or leave it out of keys"
            raise DecodeError(f"{message}: {cure}", **_place(self.index, at))
        [start], [layout] = self.index.starts_of((number,)), self.index.layouts_of((number,))
        members = self._plans[layout]
        if members is None:
            there = ", ".join(map(repr, self.index.layout(number)))
            message = f"the sample lacks a member that keys asks for, it has only {there}: correct keys, or the shard"
            raise ShardError(message, shard=self.index.shard, sample=self.index.key(number))
        return start, members

    def _columns(self, source: ShardBytes, start: int, stop: int) -> Iterator[list[Sample]]:
        """Read samples with the same members column by column."""
        index, members = self.index, self._members or ()
        columns, names = np.array([column for _, column in members], np.int64), [name for name, _ in members]
        keys, empty = index.keys.many, dict.fromkeys(("__key__", *names))
        for first in range(start, stop, _SAMPLES):
            index.check_size()
            where = (np.arange(first, min(first + _SAMPLES, stop))[:, None] * self._width + columns).ravel()
            begins = index.begins[where].astype(np.int64)
            ends = begins + index.sizes[where].astype(np.int64)  # 64-bit sizes are unsigned
            bounds = list(zip(begins.tolist(), ends.tolist(), strict=True))
            most = _BYTES * (len(bounds) // len(names)) // max(1, int((ends - begins).sum()))
            step = max(1, most) * len(names)
            for at in range(0, len(bounds), step):
                source.check_size()
                data = source.data
                pieces = [data[begin:end] for begin, end in bounds[at : at + step]]
                number, count = first + at // len(names), len(pieces) // len(names)
                failed = self._compare(pieces, where[at : at + step]) if self._verify else None
                samples: list[Sample] = list(map(dict.copy, repeat(empty, count)))
                for sample, key in zip(samples, keys(range(number, number + count)), strict=True):
                    sample["__key__"] = key
                for column, name in enumerate(names):
                    for sample, piece in zip(samples, pieces[column :: len(names)], strict=True):
                        sample[name] = piece
                if failed is not None:
                    yield samples[: failed[0] // len(names)]
                    raise failed[1]
                yield samples

    def _compare(self, pieces: list[bytes], where: npt.NDArray[np.int64]) -> tuple[int, ShardError] | None:
        """Compare checksums, and fetch again what differs; the first one that stays wrong, and the error."""
        for at in np.flatnonzero(member_checksums(pieces) != self.index.checksums[where]).tolist():
            try:
                pieces[at] = self._again(int(where[at]))
            except ShardError as error:
                return at, error
        return None

    def _again(self, at: int) -> bytes:
        """A member whose checksum differs, fetched again where that is possible."""
        begin = int(self.index.begins[at])
        data = self.source.fetch_again(begin, begin + int(self.index.sizes[at]))
        if data is None or digest64(data) & MEMBER_BITS != self.index.checksums[at]:
            self._refuse(at)
        return data

    def _refuse(self, at: int) -> NoReturn:
        self.source.diagnose()
        raise DamagedShardError(Damage.MEMBER, **_place(self.index, at))


def _plan(layout: Sequence[str], keys: Sequence[str] | None) -> MemberColumns | None:
    """Which members to take from samples of a layout: pairs of a key and its column; None when one is missing."""
    columns = {key: column for column, key in enumerate(layout)}  # not layout.index, for layouts of many members
    wanted = layout if keys is None else keys
    return tuple((key, columns[key]) for key in wanted) if set(wanted) <= set(layout) else None


def _too_large(index: ShardIndex, keys: Sequence[str] | None, max_bytes: int) -> dict[int, int]:
    """The samples that have too large a member, and the position of the first one in the index's arrays."""
    if not index.sizes.size or int(index.sizes.max()) <= max_bytes:
        return {}
    found: dict[int, int] = {}
    for at in np.flatnonzero(index.sizes > max_bytes).tolist():
        number, _ = index.locate(at)
        if keys is None or index.layout(number)[at - index.span(number)[0]] in keys:
            found.setdefault(number, at)
    return found


def _place(index: ShardIndex, at: int) -> dict[str, Any]:
    """Where a member stands, in the words of a ShardError."""
    number, member = index.locate(at)
    return {"shard": index.shard, "sample": index.key(number), "member": member, "offset": index.place(at)}
