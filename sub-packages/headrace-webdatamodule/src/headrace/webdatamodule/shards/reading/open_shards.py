"""How many shards a reader keeps open, and which one it closes first."""

from __future__ import annotations

import errno
from collections.abc import Callable
from resource import RLIMIT_NOFILE, getrlimit
from typing import Generic, TypeVar

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_Thing = TypeVar("_Thing")


class LruCache(Generic[_Thing]):
    """Opens things by their numbers, and evicts the least recently used ones.

    Safe in threads: what is evicted is closed when its last user has finished.
    """

    def __init__(self, open_one: Callable[[int], _Thing], limit: int) -> None:
        self._open, self.limit = open_one, limit
        self.things: dict[int, _Thing] = {}  # the least recently used first

    def get(self, number: int) -> _Thing:
        """One of them, opened if need be; an OSError for want of file descriptors comes only when none is kept."""
        things = self.things
        thing = things.get(number)
        if thing is not None and len(things) < self.limit:  # which was used last matters only when one has to go
            return thing
        things.pop(number, None)
        if thing is None:
            self._evict(self.limit - 1)
            thing = self._open_with_room(number)
        things[number] = thing
        return thing

    def clear(self) -> None:
        """Evict all."""
        self._evict(0)

    def _evict(self, most: int) -> None:
        for number in list(self.things)[: max(0, len(self.things) - most)]:
            self.things.pop(number, None)

    def _open_with_room(self, number: int) -> _Thing:
        while True:
            try:
                return self._open(number)
            except OSError as error:
                if error.errno not in NO_DESCRIPTORS or not self.things:
                    raise
                self.limit = max(1, len(self.things) // 2)
                self._evict(self.limit // 2)


def default_limit() -> int:
    """How many shards to keep open: each takes two file descriptors, and half of them are left to others."""
    soft = getrlimit(RLIMIT_NOFILE)[0]
    return max(1, min(soft // 4, 4096)) if soft >= 0 else 4096
