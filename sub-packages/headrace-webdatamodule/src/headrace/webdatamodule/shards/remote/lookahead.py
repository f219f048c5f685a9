"""Batches that are fetched before they are read, in threads, within so many bytes.

Whatever goes wrong here is forgotten: the batch is then read as if it had not been announced, and that read decides.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto

from headrace.webdatamodule.shards.stores.store import KnownParts, Span

_AT_ONCE = 8  # batches; with 64 small samples each three keep a processor busy, with fewer samples more
_LITTLE = 4 << 20  # bytes that are on their way at the same time without keeping the first batch waiting
_NAME = "look-ahead"
Wanted = Mapping[int, Sequence[Span]]  # ranges of shards, by the number of the shard
Parts = Mapping[int, KnownParts]


class _Stage(Enum):
    ANNOUNCED = auto()
    PLANNED = auto()
    FETCHING = auto()
    FETCHED = auto()
    FAILED = auto()


class _Batch:
    def __init__(self, indices: Sequence[int]) -> None:
        self.indices, self.stage = indices, _Stage.ANNOUNCED
        self.ranges: Wanted = {}
        self.nbytes = 0
        self.parts: Parts | None = None

    @property
    def is_held(self) -> bool:
        return self.stage in (_Stage.FETCHING, _Stage.FETCHED)


class LookAhead:
    """Fetches announced batches, in their order, while fewer than `limit` bytes are held.

    One thread plans batches, which opens their shards, and ends when nothing more fits; each batch is fetched in a
    thread of its own. So there is no thread where there is nothing to do; and nothing is begun but while a batch is
    announced or taken, so that a loop that is abandoned leaves only what is on its way.

    Args:
        limit: Bytes that are fetched, or being fetched; those of the batch that was taken last included.
        plan: The ranges of a batch's members, merged.
        fetch: Fetches ranges.
    """

    def __init__(
        self,
        limit: int,
        plan: Callable[[Sequence[int]], Wanted],
        fetch: Callable[[Wanted], Parts],
    ) -> None:
        self.process = os.getpid()  # threads do not survive a fork
        self._limit, self._plan, self._fetch = limit, plan, fetch
        self._changed = threading.Condition()
        self._batches: deque[_Batch] = deque()  # announced and not taken
        self._dropped: list[_Batch] = []  # whose requests are under way still
        self._used: _Batch | None = None  # taken last
        self._at_once = 1  # doubled by each batch that comes, so that a large first one has the server for itself
        self._failed = False  # the last batch, so that the next one is asked for alone
        self._planning = self._waiting = False

    @property
    def held(self) -> int:
        """Bytes that are fetched or being fetched."""
        used = () if self._used is None else (self._used,)
        return sum(batch.nbytes for batch in (*self._batches, *self._dropped, *used) if batch.is_held)

    def announce(self, batches: Iterable[Sequence[int]], *, restart: bool) -> None:
        """Say which batches are taken next; `restart` drops those that were announced before."""
        with self._changed:
            self._used = None
            if restart:
                self._drop(len(self._batches))
                self._at_once = 1
            self._batches.extend(map(_Batch, batches))
            self._go_on()

    def take(self, indices: Sequence[int]) -> Parts | None:
        """The fetched parts of a batch's shards; None where it is not known here, has no room, or failed.

        Batches that were announced before it are dropped.
        """
        with self._changed:
            self._used = None
            place = next((number for number, batch in enumerate(self._batches) if batch.indices == indices), None)
            if place is None:
                self._go_on()
                return None
            self._drop(place)
            batch = self._batches[0]
            self._go_on()
            self._waiting = True
            while batch.stage is _Stage.FETCHING or (
                batch.stage in (_Stage.ANNOUNCED, _Stage.PLANNED) and self._planning
            ):
                self._changed.wait()
            self._waiting = False
            self._used = self._batches.popleft()
            return batch.parts

    def _drop(self, count: int) -> None:
        dropped = [self._batches.popleft() for _ in range(count)]
        self._dropped += [batch for batch in dropped if batch.stage is _Stage.FETCHING]

    def _go_on(self) -> None:
        """Let a thread plan and begin what fits."""
        if not self._planning and self._next() is not None:
            self._planning = True
            try:
                threading.Thread(target=self._prepare, name=f"{_NAME} plan", daemon=True).start()
            except RuntimeError:  # no more threads
                self._planning = False

    def _next(self) -> _Batch | None:
        """The batch to plan, or to begin, next."""
        waiting = (_Stage.ANNOUNCED, _Stage.PLANNED)
        batch = next((batch for batch in self._batches if batch.stage in waiting), None)
        return batch if batch is None or batch.stage is _Stage.ANNOUNCED or self._fits(batch) else None

    def _fits(self, batch: _Batch) -> bool:
        running = [one.nbytes for one in (*self._batches, *self._dropped) if one.stage is _Stage.FETCHING]
        little = not self._failed and sum(running) + batch.nbytes <= _LITTLE
        at_once = _AT_ONCE if little else self._at_once
        return len(running) < at_once and self.held + batch.nbytes <= self._limit

    def _prepare(self) -> None:
        while True:
            with self._changed:
                batch = self._next()
                if batch is None:
                    self._planning = False
                    self._changed.notify_all()
                    return
                if batch.stage is _Stage.PLANNED:
                    self._begin(batch)
                    continue
            stage = _Stage.PLANNED
            try:
                batch.ranges = self._plan(batch.indices)
                batch.nbytes = sum(end - begin for spans in batch.ranges.values() for begin, end in spans)
            except BaseException:
                stage = _Stage.FAILED
            with self._changed:
                batch.stage = stage if batch.nbytes <= self._limit else _Stage.FAILED
                if batch.stage is _Stage.PLANNED and not batch.nbytes:  # all of it is in a cache
                    batch.stage, batch.parts = _Stage.FETCHED, {}
                self._changed.notify_all()

    def _begin(self, batch: _Batch) -> None:
        batch.stage = _Stage.FETCHING
        try:
            threading.Thread(target=self._fill, args=(batch,), name=_NAME, daemon=True).start()
        except RuntimeError:  # no more threads
            batch.stage = _Stage.FAILED

    def _fill(self, batch: _Batch) -> None:
        parts: Parts | None = None
        with suppress(BaseException):  # which the read of the batch finds, too
            parts = self._fetch(batch.ranges)
        with self._changed:
            if batch in self._dropped:
                self._dropped.remove(batch)
            else:
                batch.parts = parts
            batch.stage = _Stage.FAILED if parts is None else _Stage.FETCHED
            self._failed = parts is None
            self._at_once = 1 if parts is None else min(_AT_ONCE, 2 * self._at_once)
            self._changed.notify_all()
            if self._waiting:
                self._go_on()
