"""What reads the bytes of files: the base class of stores, the one rule of merging ranges, counts of traffic."""

from __future__ import annotations

import mmap
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

from headrace.webdatamodule.shards.errors import ShardError
from headrace.webdatamodule.shards.format.tar import BLOCK

Span = tuple[int, int]
_MOST = 4 << 20  # bytes of a request that merges several ranges
WASTE = 0.02  # bytes fetched and not used, of those that are wanted
# A padding and a header lie between members that follow one another; to ask for each would send more bytes than that.
ADJACENT = 2 * BLOCK - 1


class Store(ABC):
    """Files at one place, and how to read their bytes; subclass it to read shards from a place of your own.

    `Remote` accepts an instance where it accepts a URL. It repeats what fails, compares lengths, counts what comes and
    names the file in errors, so a store does none of these. A store is pickled for workers that are spawned, and used
    from several threads. A connection does not survive a fork: make it when it is first used in a process.

    Attributes:
        url: What errors name the place by, such as `"archive://corpus"`, without secrets. The URL of a file is this,
            a slash and the file's name.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from headrace.webdatamodule import IndexedShards, Remote, Store, index_shards, write_tars
    >>> folder = Path(tempfile.mkdtemp())
    >>> paths = write_tars([(f"s{i}", {"json": b"[%d]" % i}) for i in range(5)], folder, n_shards=2)
    >>> manifest = index_shards(folder)
    >>> class Memory(Store):
    ...     url = "memory://corpus"
    ...     files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    ...
    ...     def read(self, name, limit):
    ...         return self.files[name][: limit + 1]
    ...
    ...     def size(self, name):
    ...         return len(self.files[name])
    ...
    ...     def ranges(self, wanted):
    ...         return [self.files[name][start:stop] for name, start, stop in wanted]
    >>> IndexedShards(Remote(Memory()))[3]
    {'__key__': 's3', 'json': [3]}
    """

    url: str
    retries: bool = False  # whether a store repeats failed requests by itself; then at most two attempts are added

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """All bytes of a small file.

        Args:
            name: Path of the file below `url`; a URL of its own where it lies elsewhere.
            limit: Most bytes to read.

        Returns:
            The bytes. If the file has more than `limit`, more than `limit` of them, or an `UnboundedBodyError`.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: It cannot be read.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The bytes of a file; None if nobody knows. Errors are as for `read`."""

    @abstractmethod
    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> Sequence[bytes | BaseException]:
        """Some ranges of some files, at the same time where that is faster.

        Args:
            wanted: (name, start, stop) of each range, in any order; ranges may overlap.

        Returns:
            The bytes of each, in the order of `wanted`; or, in the place of one, what it failed with. If an error is
            raised, all of them are read again.
        """

    def map(self, name: str) -> mmap.mmap | bytes | None:  # noqa: ARG002 - for those that can
        """A file mapped into memory; None where ranges have to be read."""
        return None

    def download(self, name: str, nbytes: int, file: BinaryIO) -> None:
        """Write all bytes of a file into another one; only where ranges cannot be read."""
        file.write(self.read(name, nbytes))


class StoreError(ShardError):
    """A file cannot be read from its store.

    Args:
        message: What is wrong and what to do about it.
        missing: Whether there is no such file.
        status: Status of the server's answer; None where there was none.
        lacks_ranges: Whether the server sends whole files only.
        place: As for `ShardError`: `shard` is the URL of the file, `offset` the first byte of the range.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: bool = False,
        status: int | None = None,
        lacks_ranges: bool = False,
        **place: Any,
    ) -> None:
        super().__init__(message, **place)
        self.missing, self.status, self.lacks_ranges = missing, status, lacks_ranges


class UnboundedBodyError(ValueError):
    """More bytes came than were asked for: the server does not read ranges, or the file is too large."""


class WrongBytesError(OSError):
    """A server sent other bytes than were asked for, or fewer, or compressed ones."""


class Traffic(NamedTuple):
    """Counts of remote reads: requests, bytes received, bytes of the samples that were read, and those from a cache."""

    requests: int = 0
    fetched: int = 0
    used: int = 0
    cached: int = 0

    def __add__(self, other: tuple[int, ...]) -> Traffic:  # type: ignore[override]  # the sum of each number
        return Traffic(*map(sum, zip(self, other, strict=True)))


class TrafficCounter:
    """Adds up traffic from threads; each process for itself."""

    def __init__(self) -> None:
        self._process, self._lock, self._total = os.getpid(), threading.Lock(), Traffic()

    def __reduce__(self) -> tuple[type[TrafficCounter], tuple[()]]:
        return TrafficCounter, ()

    def add(self, requests: int = 0, fetched: int = 0, used: int = 0, cached: int = 0) -> None:
        """Count some."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]  # what the parent counted is the parent's
        with self._lock:
            self._total += (requests, fetched, used, cached)

    def take(self) -> Traffic:
        """The sum since this was called last."""
        self.add()
        with self._lock:
            total, self._total = self._total, Traffic()
        return total


class KnownParts:
    """Some parts of a file, which give slices as all of its bytes would; each slice lies in one of them."""

    def __init__(self, data: Mapping[Span, bytes]) -> None:
        self.data = data
        ordered = sorted(data.items())
        self._begins, self._parts = [begin for (begin, _), _ in ordered], [part for _, part in ordered]

    def __getitem__(self, wanted: slice) -> bytes:
        if wanted.start >= wanted.stop:
            return b""
        number = bisect_right(self._begins, wanted.start) - 1
        begin = self._begins[number]
        return self._parts[number][wanted.start - begin : wanted.stop - begin]

    def holds(self, span: Span) -> bool:
        """Whether a range lies in one of the parts."""
        number = bisect_right(self._begins, span[0]) - 1
        return span[0] >= span[1] or (number >= 0 and span[1] <= self._begins[number] + len(self._parts[number]))


def merge(
    wanted: Mapping[Any, Iterable[Span]], *, max_gap: int = ADJACENT, waste: float = WASTE
) -> dict[Any, list[Span]]:
    """Merge ranges of some files, in requests of at most 4 MiB unless they overlap.

    Gaps up to `max_gap` bytes are merged, and of larger ones the smallest, while they are at most a fraction `waste` of
    the bytes that are wanted.
    """
    ordered = {file: sorted({span for span in spans if span[0] < span[1]}) for file, spans in wanted.items()}
    wide = set[tuple[int, int]]()  # by the number of the file, and where the range after the gap begins
    if waste:
        room = waste * sum(end - begin for spans in ordered.values() for begin, end in spans)
        gaps = sorted(
            (begin - end, number, begin)
            for number, spans in enumerate(ordered.values())
            for (_, end), (begin, _) in pairwise(spans)
            if begin - end > max_gap
        )
        for gap, number, begin in gaps:
            room -= gap
            if room < 0:
                break
            wide.add((number, begin))
    made: dict[Any, list[Span]] = {}
    for number, (file, spans) in enumerate(ordered.items()):
        made[file] = parts = list[Span]()
        for begin, end in spans:
            if (parts and begin - parts[-1][1] <= max_gap) or (number, begin) in wide:
                first, last = parts[-1]
                if end <= last or begin < last or end - first <= _MOST:
                    parts[-1] = first, max(last, end)
                    continue
            parts.append((begin, end))
    return made
