"""One shard on another machine, of which only what is asked for is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DamagedShardError
from headrace.webdatamodule.shards.format.tar import BLOCK
from headrace.webdatamodule.shards.index.shard_index import ShardIndex
from headrace.webdatamodule.shards.reading.mapped import Mapped
from headrace.webdatamodule.shards.reading.rows import Sample
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard
from headrace.webdatamodule.shards.remote.coalescing import Offsets, Pieces, coalesce
from headrace.webdatamodule.shards.remote.transport import Transport

_REQUEST, _WINDOW = 4 << 20, 16 << 20


class Fetched(Mapped):
    """Pieces of a shard in the place of a map of all of it.

    Args:
        pieces: Those that are going to be read.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.data: Any = pieces

    def check_size(self) -> None:
        """What is here stays as it is."""


class RangedShard(OpenShard):
    """A shard and its index; members that lie close together come in one request, several requests at a time.

    Args:
        index: Of the shard; it names the URL.
        transport: Reads there.
        keys: Which members to read, in lower case; all when None.
        verify: Whether to check the checksum of each member that is read.
        gap: Bytes between two members that may be read in vain.
        max_bytes: Most bytes that a member may have.

    Raises:
        ShardError: The shard cannot be read.
        StaleIndexError: It is another one than was indexed.
    """

    def __init__(
        self,
        index: ShardIndex,
        transport: Transport,
        keys: Sequence[str] | None,
        *,
        verify: bool,
        gap: int,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(index, Fetched(Pieces([], [])), keys, verify=verify, max_bytes=max_bytes)
        self._transport, self._gap = transport, gap
        check_far(index, transport)

    def some(self, samples: Sequence[int], into: list[Sample]) -> None:
        """As of `OpenShard`; what was damaged on the way is read once more."""
        self._check_sizes(samples)
        before = len(into)
        try:
            self._over(self._fetch(samples)).some(samples, into)
        except DamagedShardError:
            del into[before:]
            self._over(self._fetch(samples)).some(samples, into)

    def between(self, start: int, stop: int) -> Iterator[list[Sample]]:
        """As of `OpenShard`; while a few samples are looked at, the next ones come."""
        small = self._small_until(start, stop)
        spans = windows(self._bytes(range(start, small)), _WINDOW)
        parts = [range(start + begin, start + end) for begin, end in spans]
        with ThreadPoolExecutor(1) as pool:
            coming = [pool.submit(self._fetch, part) for part in parts[:1]]
            for number, part in enumerate(parts):
                pieces = coming.pop().result()
                coming.extend(pool.submit(self._fetch, later) for later in parts[number + 1 : number + 2])
                yield from self._window(part, pieces)
        self._check_sizes(range(small, stop)[:1])

    def _whole(self) -> OpenShard:
        whole = copy.copy(self)
        super(RangedShard, whole).__init__(
            self.index, self._mapped, None, verify=True, max_bytes=self.index.shard_bytes
        )
        return whole

    def _piece(self, begin: int, end: int) -> bytes:
        return self._transport.ranges(self.index.shard, [(begin, end)])[0]

    def _window(self, part: range, pieces: Pieces) -> Iterator[list[Sample]]:
        at = part.start
        try:
            for read in self._over(pieces).between(part.start, part.stop):
                at += len(read)
                yield read
        except DamagedShardError:
            again = range(at, part.stop)
            yield from self._over(self._fetch(again)).between(again.start, again.stop)

    def _over(self, pieces: Pieces) -> OpenShard:
        near = object.__new__(OpenShard)  # plans of many layouts are not made anew for each batch
        vars(near).update(vars(self), _mapped=Fetched(pieces))
        return near

    def _positions(self, samples: Sequence[int]) -> list[tuple[Offsets, Offsets]]:
        # Pairs of where samples of one layout stand in `samples`, shape [n], and their positions, shape [n, members].
        starts = np.fromiter(self.index.starts_of(samples), np.int64, len(samples))
        several = len(self._plans) > 1
        layouts = np.fromiter(self.index.layouts_of(samples), np.int64, starts.size) if several else starts * 0
        order = np.argsort(layouts, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(layouts[order])) + 1) if order.size else []
        plans = [self._plans[int(layouts[group[0]])] or () for group in groups]
        columns = [np.array([column for _, column in members], np.int64) for members in plans]
        return [(group, starts[group, None] + column) for group, column in zip(groups, columns, strict=True)]

    def _bytes(self, samples: range) -> npt.NDArray[np.int64]:
        made = np.zeros(len(samples), np.int64)
        for group, positions in self._positions(samples):
            made[group] = self.index.sizes[positions].astype(np.int64).sum(1)
        return made

    def _fetch(self, samples: Sequence[int]) -> Pieces:
        found = [positions.ravel() for _, positions in self._positions(samples)]
        wanted = np.concatenate([np.empty(0, np.int64), *found])
        begins = self.index.blocks[wanted].astype(np.int64) * BLOCK
        return self._read(begins, begins + self.index.sizes[wanted].astype(np.int64))

    def _read(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Pieces:
        spans = coalesce(begins, ends, gap=self._gap, most=_REQUEST)
        return Pieces(spans, self._transport.ranges(self.index.shard, spans))


def check_far(index: ShardIndex, transport: Transport) -> None:
    """See by its size and three short pieces whether a shard on another machine is the one that was indexed.

    Args:
        index: Of the shard; it names the URL.
        transport: Reads there.

    Raises:
        ShardError: It cannot be read.
        StaleIndexError: It is another one.
    """
    size = transport.size(index.shard)
    begins, ends = np.array(index.spot_ranges() if size == index.shard_bytes else [(0, 0)], np.int64).T
    spans = coalesce(begins, ends, gap=0, most=_REQUEST)
    pieces = Pieces(spans, transport.ranges(index.shard, spans))
    index.check_shard(size, lambda begin, end: pieces[begin:end])


def windows(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Cut a row of samples into parts of about as many bytes.

    Args:
        sizes: Bytes of each, shape [n].
        most: Bytes of a part, less than one sample more at most.

    Returns:
        Begin and end of each part.

    >>> windows(np.array([4, 4, 4, 100, 0, 1]), 8)
    [(0, 2), (2, 4), (4, 6)]
    """
    if not sizes.size:
        return []
    numbers = (np.cumsum(sizes) - sizes) // most
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, sizes.size], strict=True))
