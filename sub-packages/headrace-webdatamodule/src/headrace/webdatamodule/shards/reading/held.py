"""Shards held open: a limited number, each process its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
_FULL = (errno.EMFILE, errno.ENFILE)


def default_limit() -> int:
    """How many shards to hold open: each takes two file descriptors, and half of them are left to others."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit
    except ImportError:  # not on Windows
        return 512
    soft = getrlimit(RLIMIT_NOFILE)[0]
    return max(1, min(soft // 4, 4096)) if soft >= 0 else 4096


class Held(Generic[Thing]):
    """Opens things by their numbers, and lets go of those that were not used for the longest time.

    Safe in threads: what is let go is closed when its last user has finished.

    Args:
        open_one: Opens one.
        limit: How many to hold; found out when None.

    >>> held = Held(lambda number: print("open", number) or -number, 1)
    >>> held.get(3), held.get(3)
    open 3
    (-3, -3)
    """

    def __init__(self, open_one: Callable[[int], Thing], limit: int | None = None) -> None:
        self._open, self._limit = open_one, limit or default_limit()
        self._held: dict[int, Thing] = {}  # the least recently used first
        self._process = os.getpid()

    def get(self, number: int) -> Thing:
        """One of them, opened if need be.

        Args:
            number: Of the thing.

        Raises:
            OSError: It cannot be opened; for want of file descriptors only when none is held here.
        """
        if self._process != os.getpid():  # forked: leave the parent's alone
            self._held, self._process = {}, os.getpid()
        thing = self._held.pop(number, None)
        if thing is None:
            self._leave(self._limit - 1)
            thing = self._open_anyhow(number)
        self._held[number] = thing
        return thing

    def close(self) -> None:
        """Let go of all."""
        self._leave(0)

    def _leave(self, most: int) -> None:
        for number in list(self._held)[: max(0, len(self._held) - most)]:
            self._held.pop(number, None)

    def _open_anyhow(self, number: int) -> Thing:
        while True:
            try:
                return self._open(number)
            except OSError as error:
                if error.errno not in _FULL or not self._held:
                    raise
                self._limit = max(1, len(self._held) // 2)
                self._leave(self._limit // 2)
