"""How many shards a reader keeps open, and which one it closes first."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from resource import RLIMIT_NOFILE, getrlimit
from typing import Generic, TypeVar

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_THREADS = 16
_Thing = TypeVar("_Thing")
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class LruCache(Generic[_Thing]):
    """Opens things by their numbers, and evicts the least recently used ones.

    Safe in threads: what is evicted is closed when its last user has finished.

    Args:
        open_one: Opens one of them.
        limit: Most of them that are kept.
        counts: Whether one counts, and may be evicted; None: all.
    """

    def __init__(
        self, open_one: Callable[[int], _Thing], limit: int, counts: Callable[[int], bool] | None = None
    ) -> None:
        self._open, self.limit, self._counts = open_one, limit, counts
        self.things: dict[int, _Thing] = {}  # the least recently used first
        self.is_full = False

    def get(self, number: int) -> _Thing:
        """One of them, opened if need be; an OSError for want of file descriptors comes only when none is kept."""
        things = self.things
        thing = things.get(number)
        if thing is not None and not self.is_full:  # which was used last matters only when one has to go
            return thing
        things.pop(number, None)
        if thing is None:
            self._evict(self.limit - 1)
            thing = self._open_with_room(number)
        things[number] = thing
        self.is_full = (len(things) if self._counts is None else len(self._counted())) >= self.limit
        return thing

    def clear(self) -> None:
        """Evict all."""
        self.things.clear()
        self.is_full = False

    def _counted(self) -> list[int]:
        numbers = list(self.things)
        return numbers if self._counts is None else list(filter(self._counts, numbers))

    def _evict(self, most: int) -> None:
        counted = self._counted()
        for number in counted[: max(0, len(counted) - most)]:
            self.things.pop(number, None)

    def _open_with_room(self, number: int) -> _Thing:
        while True:
            try:
                return self._open(number)
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS or not (counted := self._counted()):
                    raise
                self.limit = max(1, len(counted) // 2)
                self._evict(self.limit // 2)


def default_limit() -> int:
    """How many shards to keep open: each takes two file descriptors, and half of them are left to others."""
    soft = getrlimit(RLIMIT_NOFILE)[0]
    return max(1, min(soft // 4, 4096)) if soft >= 0 else 4096


def concurrently(function: Callable[[_Item], _Made], items: Sequence[_Item]) -> Iterator[_Made]:
    """Call a function for some items in threads; the results come in order."""
    if len(items) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        yield from pool.map(function, items)
