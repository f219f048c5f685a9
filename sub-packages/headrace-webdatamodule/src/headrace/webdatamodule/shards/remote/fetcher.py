"""Samples of shards that are read by ranges: what they need is fetched when they are read, or before."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.reading.local_shards import Upcoming
from headrace.webdatamodule.shards.reading.shard_reader import Sample, ShardReader
from headrace.webdatamodule.shards.remote.lookahead import LookAhead
from headrace.webdatamodule.shards.shard_table import Opened, ShardTable
from headrace.webdatamodule.shards.stores.store import KnownParts, Span, merge

_WINDOW = 16 << 20  # bytes of consecutive samples that are fetched at the same time
Wanted = Mapping[int, Sequence[Span]]  # ranges of shards, by the number of the shard
Parts = Mapping[int, KnownParts]
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


class _Group(NamedTuple):
    """Samples of a batch that lie in one shard."""

    shard: int
    places: list[int]  # in the batch
    numbers: Sequence[int]  # of the samples in the shard


class _Cached(NamedTuple):
    """Samples of a shard: members that a cache of samples has, and the samples that it lacks."""

    parts: dict[Span, bytes]
    lacking: Sequence[int]


class Fetcher:
    """Reads batches of samples, of which some lie on other machines.

    Args:
        table: The shards.
        open_readers: Opens some shards at the same time.
    """

    def __init__(self, table: ShardTable, open_readers: Callable[[Sequence[int]], list[Opened]]) -> None:
        self._table, self._open = table, open_readers
        self._sets = [source.shards for source in table.sources]
        self._caches = [source.sample_cache for source in table.sources if source.sample_cache is not None]
        self._ahead: LookAhead | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether announced batches are fetched before they are read."""
        return any(shards.lookahead for shards in self._sets)

    @property
    def ahead(self) -> LookAhead | None:
        """What fetches announced batches in this process; None before any was announced."""
        return self._ahead if self._ahead is not None and self._ahead.process == os.getpid() else None

    def expect(self, upcoming: Upcoming | None) -> None:
        """Say when the samples of the next batch are needed again."""
        if not self._caches:
            return
        windows: list[dict[int, int]] = [{} for _ in self._table.sources]
        for index, window in () if upcoming is None else upcoming.windows.items():
            number = self._table.source_of(index)
            windows[number][index - (self._table.source_ends[number - 1] if number else 0)] = window
        for source, own in zip(self._table.sources, windows, strict=True):
            if source.sample_cache is not None:
                source.sample_cache.expect(None if upcoming is None else upcoming._replace(windows=own))

    def announce(self, batches: Iterable[Sequence[int]], *, restart: bool) -> None:
        """Say which batches are read next; `restart` drops those that were announced before."""
        if restart:
            for cache in self._caches:
                cache.flush()
        if self.ahead is None and (limit := sum(shards.lookahead for shards in self._sets)):
            self._ahead = LookAhead(limit, self._plan, partial(self._fetch, ahead=True))
        if self.ahead is not None:
            self.ahead.announce(batches, restart=restart)

    def read(self, wanted: Sequence[int]) -> Iterator[tuple[Opened, list[int], Sequence[int], list[Sample]]]:
        """Read a batch: for each shard its reader, places in the batch, numbers of samples, and these."""
        known = None if self.ahead is None else self.ahead.take(wanted)
        groups = self._group(wanted)
        opened = self._open([group.shard for group in groups])
        parts, lacking = self._load(groups, opened, known)
        for (shard, places, numbers), one in zip(groups, opened, strict=True):
            reader, read, _ = one
            reader.check_size()
            if shard in parts:
                read = reader.bind(parts[shard])
            samples = list(map(read, numbers))
            if shard in lacking:
                self._keep(shard, numbers, samples, lacking[shard])
            if (traffic := self._table.places[shard].source.shards.traffic) is not None:
                traffic.add(used=sum(sum(map(len, sample.values())) - len(sample["__key__"]) for sample in samples))
            yield one, places, numbers, samples

    def between(self, shard: int, reader: ShardReader, start: int, stop: int) -> Iterator[list[Sample]]:
        """Read samples of a shard that stand in a row; while some are looked at, the next ones come."""

        def load(part: range) -> tuple[range, KnownParts, Sequence[int]]:
            parts, lacking = self._load([_Group(shard, [], part)], [(reader, reader.bind(b""), None)], None)
            return part, parts[shard], lacking[shard]

        for part, data, lacking in _one_ahead(load, _windows(reader, start, stop)):
            read, samples = reader.bind(data), list[Sample]()
            try:
                for number in part:
                    samples.append(read(number))
            except ShardError:
                yield samples
                raise
            self._keep(shard, part, samples, lacking)
            yield samples

    def check(self, reader: ShardReader) -> None:
        """Compare the checksum of each member of a shard."""
        index = reader.index
        every = ShardReader(index, reader.source, None, verify=True, max_bytes=index.shard_bytes)
        for part in _windows(every, 0, index.n_samples):
            for _ in map(every.bind(every.source.fetch(every.spans(part))), part):
                pass

    def _group(self, wanted: Sequence[int]) -> list[_Group]:
        starts = self._table.starts
        return [
            _Group(shard, places, [wanted[place] - starts[shard] for place in places])
            for shard, places in self._table.group(wanted)
        ]

    def _plan(self, wanted: Sequence[int]) -> Wanted:
        """The ranges that a batch needs, merged."""
        groups, spans = self._group(wanted), dict[int, list[Span]]()
        opened = self._open([group.shard for group in groups])
        for (shard, _, numbers), (reader, _, _) in zip(groups, opened, strict=True):
            if reader.source.by_ranges and self._table.places[shard].source.shards.lookahead:
                spans[shard] = reader.spans(self._missing(shard, reader, numbers))
        return merge({shard: some for shard, some in spans.items() if some})

    def _missing(self, shard: int, reader: ShardReader, numbers: Sequence[int]) -> Sequence[int]:
        """The samples that the cache of samples lacks; the system reads the others in the meantime."""
        place = self._table.places[shard]
        if (cache := place.source.sample_cache) is None:
            return numbers
        words = cache.find([place.first + number for number in numbers])
        cache.announce({sample: (word, _nbytes(reader.ranges(sample - place.first))) for sample, word in words.items()})
        return [number for number in numbers if place.first + number not in words]

    def _load(
        self, groups: Sequence[_Group], opened: Sequence[Opened], known: Parts | None
    ) -> tuple[dict[int, KnownParts], dict[int, Sequence[int]]]:
        """The bytes of the shards that are read by ranges, and the samples of each that a cache lacked."""
        cached, wanted = dict[int, _Cached](), dict[int, list[Span]]()
        parts = dict({} if known is None else known)
        for (shard, _, numbers), (reader, _, _) in zip(groups, opened, strict=True):
            if not reader.source.by_ranges:
                continue
            cached[shard] = one = self._cached(shard, reader, numbers)
            if shard in parts and self._table.places[shard].source.sample_cache is None:
                continue
            spans = reader.spans(one.lacking)
            if shard not in parts or not all(map(parts[shard].holds, spans)):
                wanted[shard] = spans
        parts.update(self._fetch(merge(wanted), ahead=False))
        return {shard: _joined(one.parts, parts[shard]) for shard, one in cached.items()}, {
            shard: one.lacking for shard, one in cached.items()
        }

    def _cached(self, shard: int, reader: ShardReader, numbers: Sequence[int]) -> _Cached:
        place = self._table.places[shard]
        if (cache := place.source.sample_cache) is None:
            return _without_cache(numbers)
        parts, lacking, nbytes = dict[Span, bytes](), dict.fromkeys(numbers), 0
        for sample, word in cache.find([place.first + number for number in numbers]).items():
            spans = reader.ranges(sample - place.first)
            blob = cache.load(sample, word, _nbytes(spans))
            if blob is not None:
                parts.update(_cut(blob, spans))
                del lacking[sample - place.first]
                nbytes += len(blob)
        if (traffic := place.source.shards.traffic) is not None:
            traffic.add(cached=nbytes)
        return _Cached(parts, list(lacking))

    def _keep(self, shard: int, numbers: Sequence[int], samples: Sequence[Sample], lacking: Collection[int]) -> None:
        """Keep samples in a cache: those that it lacked, or all under the time of their next use."""
        place = self._table.places[shard]
        cache = place.source.sample_cache
        if cache is None or not (lacking or cache.files_anew):
            return
        for number, sample in dict(zip(numbers, samples, strict=True)).items():
            if cache.files_anew or number in lacking:
                cache.keep(place.first + number, [piece for key, piece in sample.items() if key != "__key__"])

    def _fetch(self, ranges: Wanted, *, ahead: bool) -> dict[int, KnownParts]:
        """Fetch ranges, of one source after another."""
        places = self._table.places
        parts: dict[int, dict[Span, bytes]] = {shard: {} for shard in ranges}
        for source in self._table.sources:
            wanted = [
                (shard, span) for shard, spans in ranges.items() if places[shard].source is source for span in spans
            ]
            got = (
                source.shards.fetch([(places[shard].path, span) for shard, span in wanted], ahead=ahead)
                if wanted
                else []
            )
            for (shard, span), data in zip(wanted, got, strict=True):
                parts[shard][span] = data
        return {shard: KnownParts(some) for shard, some in parts.items()}


def _one_ahead(function: Callable[[_Item], _Made], items: Iterable[_Item]) -> Iterator[_Made]:
    """Call a function for each item, in a thread, one item before its result is looked at."""
    with ThreadPoolExecutor(1) as pool:
        coming = deque[Future[_Made]]()
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > 1:
                yield coming.popleft().result()
        for future in coming:
            yield future.result()


def _windows(reader: ShardReader, start: int, stop: int) -> list[range]:
    """Consecutive samples, in parts of about as many bytes; one that is too large, which is refused, is the last."""
    small = reader.first_too_large(start, stop)
    parts = [range(start + begin, start + end) for begin, end in windows(reader.nbytes(range(start, small)), _WINDOW)]
    return parts if small == stop else [*parts, range(small, small + 1)]


def _without_cache(numbers: Sequence[int]) -> _Cached:
    return _Cached({}, numbers)


def _cut(blob: bytes, spans: Sequence[Span]) -> dict[Span, bytes]:
    """The members of a sample, which lie one after another in the cache, by their ranges in the shard."""
    made, at = {}, 0
    for begin, end in spans:
        made[begin, end] = blob[at : at + end - begin]
        at += end - begin
    return made


def _nbytes(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _joined(kept: Mapping[Span, bytes], fetched: KnownParts) -> KnownParts:
    """Parts from a cache and fetched ones, which may hold some of them, too: as parts they must not overlap."""
    if not kept:
        return fetched
    return KnownParts({**{span: part for span, part in kept.items() if not fetched.holds(span)}, **fetched.data})


def windows(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Cut a row of samples into parts of about as many bytes."""
    if not sizes.size:
        return []
    numbers = (np.cumsum(sizes) - sizes) // most
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, sizes.size], strict=True))
