"""One shard, mapped: samples by their numbers, undecoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from xxhash import xxh3_64, xxh3_64_intdigest

from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.keys import namer
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.mapped import Mapped
from headrace.webdatamodule.shards.reading.oversize import oversized, refuse_size
from headrace.webdatamodule.shards.reading.rows import MASK, Rows, Sample, place, plan, refuse

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
