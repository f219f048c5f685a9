"""The samples sorted by size, in a file that all processes of a node and all later runs map.

The file, in bytes: a header of 72 (see `HEADER`), the distinct sizes in descending order and the place of the first
sample of each (8 bytes each), then the samples in that order, equal sizes in their own (4 or 8 bytes each).

Everything but the samples is checked when the file is opened. A sample is checked whenever it is used: it has the size
of its place, and lies between its neighbours of that size. As no sample of that size is missing between them, a sample
that was changed by itself cannot pass.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._files import one_writer, remove_parts, write_atomically
from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.digest import array_digest, bytes_digest, text_digest
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching.planning.prepared import PreparedSizes
from headrace.size_aware_batching.planning.size_facts import SizeFacts
from headrace.size_aware_batching.planning.strata import COUNTED, index_type, sort_samples

PLAN_CACHE_VERSION = 1
MAGIC = b"\x89HRP\r\n\x1a\n"
# Magic, version, bytes of a sample's number, key, samples, distinct sizes, total size, checksum.
HEADER = struct.Struct("<8sII16sQQd16s")
LARGEST = 2**20  # from this size on there may be too many distinct ones for a table of them
LOOKUP_BITS = 16  # of a place: a table of half a megabyte. Without it, planning an epoch takes 1.3 times as long.
PIECE = 2**24  # samples that are looked at or written in one go


@dataclass(frozen=True)
class SizeRuns:
    """Sizes in descending order, as runs of equal ones: read like the array of them, with 16 bytes a run."""

    values: NDArray[Any]
    begins: NDArray[np.int64]
    n_samples: int
    total: float

    ndim = 1

    @classmethod
    def from_descending(cls, descending: NDArray[Any]) -> SizeRuns:
        """Find the runs.

        >>> runs = SizeRuns.from_descending(np.array([9, 7, 7, 3]))
        >>> runs.values.tolist(), runs.begins.tolist(), runs[np.array([[2, 3]])].tolist()
        ([9, 7, 3], [0, 1, 3], [[7, 3]])
        """
        found = [np.zeros(1, np.int64)]
        for start in range(1, len(descending), PIECE):
            stop = min(start + PIECE, len(descending))
            found.append(np.flatnonzero(descending[start:stop] != descending[start - 1 : stop - 1]) + start)
        begins = np.concatenate(found)
        total = float(descending.sum(axis=0, dtype=np.float64))
        return cls(descending[begins], begins, len(descending), total)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The place after the last sample of each run."""
        return np.append(self.begins[1:], self.n_samples)

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, places: slice | NDArray[np.int64]) -> NDArray[Any]:
        if isinstance(places, slice):
            places = np.arange(*places.indices(self.n_samples))
        return self.values[self.run_of(places)]

    def run_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the run that each place belongs to: looked up, and bisected only where a run begins nearby."""
        bits, table = self._lookup
        near = places >> bits
        found: NDArray[np.int64] = table[near]
        several = found != table[near + 1]
        found[several] = np.searchsorted(self.begins, places[several], side="right") - 1
        return found

    @cached_property
    def _lookup(self) -> tuple[int, NDArray[np.int64]]:
        """The run of every 2**bits-th place and of the one after the last: bits, and the table."""
        bits = max(0, self.n_samples.bit_length() - LOOKUP_BITS)
        places = np.arange((self.n_samples >> bits) + 2) << bits
        return bits, np.searchsorted(self.begins, places, side="right") - 1

    def sum(self, axis: int, dtype: type[np.float64]) -> np.float64:  # noqa: ARG002  # as an array is asked
        """Return the sum of all sizes."""
        return np.float64(self.total)


class StoredOrder:
    """The samples of a file in its order, each checked when it is used. Damage is found, named and planned anew."""

    def __init__(self, path: Path, file: IO[bytes], offset: int, runs: SizeRuns, sized: PreparedSizes) -> None:
        self._path, self._runs, self._sized = path, runs, sized
        self._inode = os.fstat(file.fileno()).st_ino
        kind = np.dtype(index_type(len(sized.sizes))).newbyteorder("<")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._samples: NDArray[Any] = np.frombuffer(mapped, kind, len(runs), offset)
        self._checked = True

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[Any]:
        found = self._samples[places]
        if self._checked and not self._agrees(places, found):
            warn(
                f"the plan in {self._path} is damaged after its header: this process sorts {len(self):,} samples "
                "itself, and the next one writes the file anew"
            )
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
            self._samples, self._checked = sort_samples(self._sized.sizes, self._sized.kept)[0], False
            found = self._samples[places]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        pieces = range(0, len(self), PIECE)
        found = [self[np.arange(start, min(start + PIECE, len(self)))] for start in pieces]
        return np.concatenate(found).astype(dtype or self._samples.dtype, copy=False)

    def _agrees(self, places: NDArray[np.int64], found: NDArray[Any]) -> bool:
        """Return whether samples have the sizes of their places, and come between their neighbours of that size."""
        sizes, runs = self._sized.sizes, self._runs
        if not found.size:
            return True
        if found.min() < 0 or found.max() >= len(sizes):
            return False
        run = runs.run_of(places)
        if (sizes[found] != runs.values[run]).any():
            return False
        before, behind = self._samples[np.maximum(places - 1, 0)], self._samples[np.minimum(places + 1, len(self) - 1)]
        wrong = (before >= found) & (places > runs.begins[run])
        wrong |= (behind <= found) & (places + 1 < runs.ends[run])
        return not wrong.any()


# Samples by size, and their sizes: as `sort_samples` returns them, and as a file holds them.
Sorted: TypeAlias = tuple[NDArray[Any], NDArray[Any]] | tuple[StoredOrder, SizeRuns]


class PlanCache:
    """A directory of sorted samples, one file for all that are sorted alike.

    Args:
        directory: It is made when the first file is written.
    """

    def __init__(self, directory: Any) -> None:
        self._said = False
        try:
            path = os.path.expanduser(os.fsdecode(directory))  # noqa: PTH111  # that of Path may raise
            self.directory = Path(path).absolute()  # a job may go to another directory later
        except TypeError:
            raise TypeError(
                f"plan_cache must be the path of a directory, or None, got {shown(directory)} of type "
                f"{type(directory).__name__}"
            ) from None

    def _say_unused(self, sizes: NDArray[Any]) -> None:
        """Warn, once, that nothing is kept."""
        if not self._said:
            self._said = True
            got = f"{sizes.dtype} of shape {list(sizes.shape)}, up to {sizes.max():,}"
            warn(
                f"plan_cache has no effect with sizes of {got}, as it keeps samples sorted by one whole number below "
                f"{LARGEST:,}: each process sorts for itself; leave it out"
            )

    def sorted(self, sized: PreparedSizes, facts: SizeFacts) -> Sorted | None:
        """Return the samples by size, from the file; the first process that asks for them writes it.

        None where they are not sorted by one whole number below 2**20. Whatever goes wrong with the file is a warning.
        """
        if not sized.n_samples:
            return None
        planned = facts if sized.sizes is facts.sizes else SizeFacts(sized.sizes)
        if planned.largest is None or planned.largest >= LARGEST:
            self._say_unused(facts.sizes)
            return None
        kept = "" if sized.kept is None else array_digest(sized.kept)
        name = text_digest(f"{PLAN_CACHE_VERSION} {planned.digest} {kept}")
        key, path, made = bytes.fromhex(name), self.directory / f"{name}.sorted", None
        try:
            if (found := self._open(path, key, sized)) is not None:
                return found
            self.directory.mkdir(parents=True, exist_ok=True)
            with one_writer(path) as locked:
                if (found := self._open(path, key, sized, again=True)) is not None:  # written while this one waited
                    return found
                if locked:
                    remove_parts(path)
                made = sort_samples(sized.sizes, sized.kept)
                write_atomically(path, _contents(key, *made))
                return self._open(path, key, sized) or made
        except OSError as error:
            warn(
                f"plan_cache={shown(str(self.directory))} must be a directory that can be written to, got {error}: "
                "this process sorts the samples itself"
            )
        return made or sort_samples(sized.sizes, sized.kept)

    def _open(self, path: Path, key: bytes, sized: PreparedSizes, again: bool = False) -> Sorted | None:
        """Return what a file holds; None where there is none, and where it is damaged, which is a warning."""
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{path} is no plain file")
        with os.fdopen(descriptor, "rb") as file:
            try:
                runs = _read_header(file, key, sized)
                return StoredOrder(path, file, HEADER.size + 16 * len(runs.values), runs, sized), runs
            except ValueError as problem:
                if not again:
                    warn(f"the plan in {path} cannot be used, {problem}: the samples are sorted anew")
        return None


def _read_header(file: IO[bytes], key: bytes, sized: PreparedSizes) -> SizeRuns:
    """Return the sizes that a file holds; a ValueError says why it cannot be used."""
    head, length = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    if len(head) < HEADER.size:
        raise ValueError(f"it has {length} bytes")
    *fields, n_runs, total, checksum = HEADER.unpack(head)
    width, n_samples = np.dtype(index_type(len(sized.sizes))).itemsize, sized.n_samples
    if fields != [MAGIC, PLAN_CACHE_VERSION, width, key, n_samples]:
        raise ValueError("its header is damaged, or of another version or other sizes")
    if length != HEADER.size + 16 * n_runs + width * n_samples:
        raise ValueError(f"it has {length:,} bytes, not those of {n_samples:,} samples of {n_runs:,} sizes")
    table = file.read(16 * n_runs)
    if bytes_digest(head[:-16], table) != checksum:
        raise ValueError("its header or its table of sizes is damaged")
    values, begins = np.frombuffer(table, "<i8").astype(np.int64).reshape(2, n_runs)
    kind = np.uint16 if values[0] < COUNTED else sized.sizes.dtype  # as `sorted_by_size` returns them
    return SizeRuns(values.astype(kind), begins, n_samples, total)


def _contents(key: bytes, order: NDArray[Any], descending: NDArray[Any]) -> Iterator[Any]:
    """Yield the bytes of a file."""
    runs = SizeRuns.from_descending(descending)
    table = runs.values.astype("<i8").tobytes() + runs.begins.astype("<i8").tobytes()
    fields = (MAGIC, PLAN_CACHE_VERSION, order.dtype.itemsize, key, len(order), len(runs.values), runs.total)
    head = HEADER.pack(*fields, bytes(16))[:-16]
    yield head + bytes_digest(head, table) + table
    little = order.dtype.newbyteorder("<")
    for start in range(0, len(order), PIECE):
        yield np.ascontiguousarray(order[start : start + PIECE], little)
