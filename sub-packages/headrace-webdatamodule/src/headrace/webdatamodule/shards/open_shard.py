"""One shard, mapped: samples by their numbers, undecoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NoReturn

from xxhash import xxh3_64_intdigest

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.index import BLOCK, ShardIndex
from headrace.webdatamodule.shards.mapped import Mapped
from headrace.webdatamodule.shards.naming import namer
from headrace.webdatamodule.shards.rows import MASK, Plan, Rows, Sample, place, plan, refuse

_FEW = 64


class OpenShard:
    """A shard and its index.

    Args:
        index: Of the shard.
        mapped: The shard's bytes.
        keys: Which members to read, in lower case; all when None.
        verify: Whether to check the checksum of each member that is read.
    """

    def __init__(self, index: ShardIndex, mapped: Mapped, keys: Sequence[str] | None, *, verify: bool) -> None:
        self.index = index
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
            ShardError: The bytes are not those that were indexed, or a sample lacks a member.
        """
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
        if self._rows is None:
            yield from self._few_by_few(start, stop)
        else:
            yield from self._rows.read(self._mapped, start, stop)

    def check_all(self) -> None:
        """Check the checksum of each member of the shard.

        Raises:
            ShardError: The bytes are not those that were indexed.
        """
        for _ in OpenShard(self.index, self._mapped, None, verify=True).between(0, self.index.n_samples):
            pass

    def place(self, sample: int, member: str) -> dict[str, Any]:
        """Where a member stands, in the words of a ShardError.

        Args:
            sample: Number of the sample.
            member: The member's key, in lower case.
        """
        return place(self.index, self.index.span(sample)[0] + self.index.layout(sample).index(member))

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
        rows = zip(self._names(samples), self._starts(samples), self._plans_of(samples), strict=False)
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

    def _starts(self, samples: Sequence[int]) -> Iterable[int]:
        if self.index._starts is None:
            return map(self.index._width.__mul__, samples)
        return map(self.index._starts.data.__getitem__, samples)

    def _plans_of(self, samples: Sequence[int]) -> Iterable[Plan | None]:
        if self.index._layout_of is None:
            return repeat(self._plans[0])
        return map(self._plans.__getitem__, map(self.index._layout_of.data.__getitem__, samples))

    def _lacking(self, at: int) -> NoReturn:
        sample, _ = self.index.locate(at)
        held = ", ".join(map(repr, self.index.layout(sample)))
        message = f"the sample lacks a member that keys asks for, it has only {held}: correct keys, or the shard"
        raise ShardError(message, shard=self.index.shard, sample=self.index.key(sample))
