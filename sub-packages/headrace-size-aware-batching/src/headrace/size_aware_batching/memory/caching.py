"""A simulated caching allocator: what torch keeps of a CUDA device, with its fragments."""

import math
from dataclasses import dataclass

BLOCK = 512  # bytes to which CUDA's caching allocator rounds
SEGMENT = 2**21  # and the least that it asks the driver for


@dataclass
class _Block:
    """A part of a segment; neighbours by their places."""

    size: int
    small: bool
    free: bool = True
    before: int | None = None
    after: int | None = None


class CachingAllocator:
    """Places blocks as torch's CUDA allocator does, without expandable segments (``CUDACachingAllocator.cpp``).

    The smallest cached block that is large enough serves a request; its rest is split off. Without one, a new segment
    is reserved. If that exceeds the limit, all segments without a block in use are released: a retry.

    Args:
        limit: Bytes that may be reserved.
        segment: Least bytes of a segment; the allocator's other figures have the ratio to it that CUDA's have.

    >>> memory = CachingAllocator(11 * 2**20, segment=2**20)
    >>> first, second = memory.allocate(6 * 2**20), memory.allocate(5 * 2**20)
    >>> memory.free(first)
    >>> memory.reserved, memory.allocate(7 * 2**20) is None, memory.reserved, memory.retries
    (11534336, True, 5242880, 1)
    """

    def __init__(self, limit: float = math.inf, segment: int = SEGMENT) -> None:
        self.limit, self.segment = limit, segment
        self.reserved = self.peak = self.retries = 0
        self._blocks: dict[int, _Block] = {}  # by place
        self._free: set[int] = set()
        self._next = 0  # the place of the next segment

    def allocate(self, size: int, beyond: bool = False) -> int | None:
        """Return the place of a block, or None if there is none; with ``beyond`` the limit may be exceeded."""
        small = 2 * size <= self.segment
        place = self._cached(size, small)
        if place is None:
            place = self._reserve(size, small, beyond)
        if place is None:
            self.retries += 1
            self.empty_cache()
            place = self._reserve(size, small, beyond)
        if place is not None:
            self._take(place, size)
        return place

    def free(self, place: int) -> None:
        """Keep a block for later requests, together with free neighbours."""
        block = self._blocks[place]
        block.free = True
        self._free.add(place)
        if block.after is not None and self._blocks[block.after].free:
            self._merge(place, block.after)
        if block.before is not None and self._blocks[block.before].free:
            self._merge(block.before, place)

    def empty_cache(self) -> None:
        """Release the segments that have no block in use."""
        for place in [*self._free]:
            block = self._blocks[place]
            if block.before is None and block.after is None:
                self.reserved -= block.size
                self._free.discard(place)
                del self._blocks[place]

    def reset_peak(self) -> None:
        """Set the peak to what is reserved now."""
        self.peak = self.reserved

    def _cached(self, size: int, small: bool) -> int | None:
        fitting = [place for place in self._free if self._blocks[place].small == small]
        large_enough = [(self._blocks[place].size, place) for place in fitting if self._blocks[place].size >= size]
        return min(large_enough)[1] if large_enough else None

    def _reserve(self, size: int, small: bool, beyond: bool) -> int | None:
        """Return the place of a new segment: some large ones are of ten times the least size, the largest as needed."""
        whole = self.segment if small else 10 * self.segment if size < 5 * self.segment else size
        whole = -(-whole // self.segment) * self.segment
        if self.reserved + whole > self.limit and not beyond:
            return None
        place = self._next
        self._next += whole
        self._blocks[place] = _Block(whole, small)
        self._free.add(place)
        self.reserved += whole
        self.peak = max(self.peak, self.reserved)
        return place

    def _take(self, place: int, size: int) -> None:
        """Use a block, and split off its rest if that is worth keeping."""
        block = self._blocks[place]
        block.free = False
        self._free.discard(place)
        rest = block.size - size
        if rest < BLOCK or (not block.small and 2 * rest <= self.segment):
            return
        after = _Block(rest, block.small, before=place, after=block.after)
        if block.after is not None:
            self._blocks[block.after].before = place + size
        block.size, block.after = size, place + size
        self._blocks[place + size] = after
        self._free.add(place + size)

    def _merge(self, place: int, following: int) -> None:
        """Let one free block take over the next one."""
        first, second = self._blocks[place], self._blocks.pop(following)
        self._free.discard(following)
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            self._blocks[second.after].before = place
