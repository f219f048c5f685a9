"""Samples of one dataset in a cache, each filed under the time at which it is needed next; shared by processes.

A log holds samples that are needed next in the same window of steps, one after another. A table has a word for each
sample: its log, and its offset there. Each read verifies the sample's digest. So nothing is synced, and reading takes
no lock: if a word is wrong, or names a deleted log, the sample counts as missing.

Evicting what is needed last is optimal (Belady, "A study of replacement algorithms for a virtual storage computer",
1966). Where the next use is not known, all samples have the same window, and none is evicted.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.util import Finalize
from operator import itemgetter
from typing import Any, NamedTuple

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule.shards.reading.local_shards import Upcoming
from headrace.webdatamodule.shards.remote.cache import Cache

UNKNOWN = 2**62  # the window of samples whose next use is not known
_WORD, _DIGEST = 8, 8  # bytes
_PLACE = 40  # bits of a word for the place in a log; those above number the log
_IN_LOG = (1 << _PLACE) - 1
_LARGEST = 1 << 36  # bytes of a log
_TOGETHER = 4 << 20  # bytes that are written at once
_OPEN = 128  # logs that a process keeps open
_PASSED = 1  # windows behind the present one, in which other ranks of the node may still be


class _Log(NamedTuple):
    window: int
    serial: int
    nbytes: int
    name: str


class SampleCache:
    """Keeps samples of one dataset.

    Args:
        cache: The cache directory; its limit covers everything in it.
        name: Name of a folder in it; other data or other members need another one.
        n_samples: Number of samples of the dataset.
    """

    def __init__(self, cache: Cache, name: str, n_samples: int) -> None:
        self._cache, self._name, self._n_samples = cache, name, n_samples
        self._folder = cache.directory / name
        cache.wanted = frozenset({*cache.wanted, name})
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": self._cache, "_name": self._name, "_n_samples": self._n_samples, "_folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # a thread looks samples up ahead
        self._files: dict[str, int] = {}  # names of open files, and their descriptors
        self._names: dict[int, str] = {}  # of logs, by their serial numbers
        self._pending: list[tuple[int, int, bytes]] = []  # windows, samples, records
        self._nbytes = 0  # of these
        self._upcoming: Upcoming | None = None
        self._last = UNKNOWN  # what is needed later than this window would be evicted first
        self._flushes_at_exit = False

    def _check_process(self) -> None:
        if self._process != os.getpid():  # descriptors of the parent stay open there
            self._begin()

    def expect(self, upcoming: Upcoming | None) -> None:
        """Say when the samples that are kept from now on are needed next; None if that is not known."""
        self._check_process()
        if upcoming is not None and (self._upcoming is None or upcoming.now != self._upcoming.now):
            self._last = UNKNOWN  # there may be room: windows have passed
        self._upcoming = upcoming

    @property
    def files_anew(self) -> bool:
        """Whether samples that were found here are kept again, under the time of their next use."""
        return self._upcoming is not None

    def find(self, samples: Sequence[int]) -> dict[int, int]:
        """Words of those samples that may be here; the others are not."""
        self._check_process()
        with self._lock, suppress(OSError):  # nothing was kept yet, or nothing can be read
            if (table := self._open("table")) is not None:
                found = {one: int.from_bytes(os.pread(table, _WORD, one * _WORD), "little") for one in samples}
                return {one: word for one, word in found.items() if word and self._log(word >> _PLACE) is not None}
        return {}

    def load(self, sample: int, word: int, nbytes: int) -> bytes | None:
        """The bytes of a sample; None if they are gone or damaged."""
        with self._lock, suppress(OSError):  # of a damaged disk
            if (log := self._log(word >> _PLACE)) is not None:
                record = os.pread(log, _DIGEST + nbytes, word & _IN_LOG)
                data = record[_DIGEST:]
                if len(data) == nbytes and record[:_DIGEST] == _digest(sample, data):
                    return data
        return None

    def announce(self, words: Mapping[int, tuple[int, int]]) -> None:
        """Let the system read samples, given by their words and bytes, in the meantime."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for word, nbytes in words.values():
            with self._lock, suppress(OSError):
                if (log := self._log(word >> _PLACE)) is not None:
                    os.posix_fadvise(log, word & _IN_LOG, _DIGEST + nbytes, os.POSIX_FADV_WILLNEED)

    def keep(self, sample: int, pieces: Sequence[bytes]) -> None:
        """Keep a sample that was fetched, given as its members; it is written with others."""
        window = UNKNOWN if self._upcoming is None else self._upcoming.windows.get(sample, UNKNOWN + 1)
        if window > self._last:
            return
        data = b"".join(pieces)
        self._pending.append((window, sample, _digest(sample, data) + data))
        self._nbytes += _DIGEST + len(data)
        if self._nbytes >= _TOGETHER:
            self.flush()
        elif not self._flushes_at_exit:
            self._flushes_at_exit = True
            Finalize(None, _flush, args=(weakref.ref(self),), exitpriority=1)

    def flush(self) -> None:
        """Write what is kept."""
        self._check_process()
        pending, self._pending, self._nbytes = sorted(self._pending, key=itemgetter(0, 1)), [], 0
        if not pending:
            return
        try:
            with self._lock:
                self._write(pending)
        except OSError as error:  # the disk is full, or cannot be written to
            self._last = -1
            message = f"no more samples are kept in {str(self._folder)!r} ({error}), so they are fetched in each epoch"
            warnings.warn(f"{message}: make room there, or give another cache_dir", stacklevel=2)

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process, when anything may be gone
            self.flush()

    def close(self) -> None:
        """Write what is kept, and close all files; they are opened again when they are needed."""
        self.flush()
        with self._lock:
            self._close()
            self._close_table()

    def _close(self, but: Collection[str] = ()) -> None:
        """Close logs, but for some."""
        for name in [name for name in self._files if name != "table" and name not in but]:
            os.close(self._files.pop(name))

    def _close_table(self) -> None:
        if (descriptor := self._files.pop("table", None)) is not None:
            os.close(descriptor)

    def _write(self, pending: list[tuple[int, int, bytes]]) -> None:
        self._cache.directory.mkdir(parents=True, exist_ok=True)
        placed = list[tuple[int, int, list[tuple[int, int, bytes]]]]()  # serial, place, samples
        with self._cache.lock():
            if not self._begin_table():
                self._last = -1
                return
            logs = self._without_passed(self._logs())
            for window, some in groupby(pending, itemgetter(0)):
                logs, room = self._room(logs, window, (group := list(some)))
                fitting = list(_fitting(group, room))
                if len(fitting) < len(group):
                    self._last = logs[-1].window if logs and logs[-1].window < window else window - 1
                if fitting:
                    nbytes = sum(len(record) for _, _, record in fitting)
                    logs, serial, place = self._reserve(logs, window, nbytes)
                    placed.append((serial, place, fitting))
                if len(fitting) < len(group):
                    break
        table = self._open("table")
        for serial, place, group in placed:
            log = self._log(serial)
            if log is None or table is None:  # evicted meanwhile
                continue
            _write_all(log, b"".join(record for _, _, record in group), place)
            for _, sample, record in group:
                os.pwrite(table, (serial << _PLACE | place).to_bytes(_WORD, "little"), sample * _WORD)
                place += len(record)

    def _begin_table(self) -> bool:
        """Make the table; return whether there is room for it."""
        held = self._files.get("table")
        if held is not None and not os.fstat(held).st_nlink:  # the folder was evicted, and is made anew
            self._close()
            self._close_table()
            self._names.clear()
        path, nbytes = self._folder / "table", (self._n_samples + 1) * _WORD
        if not path.exists():
            if self._cache.make_room(nbytes) < nbytes:
                return False
            self._folder.mkdir(exist_ok=True)
            with path.open("xb") as file:
                file.truncate(nbytes)
        os.utime(self._folder)  # used just now
        return True

    def _next_serial(self) -> int:
        """A number that no log of this table has had; the last word of the table counts them."""
        table = self._open("table")
        if table is None:
            raise FileNotFoundError(self._folder / "table")
        serial = int.from_bytes(os.pread(table, _WORD, self._n_samples * _WORD), "little") % (1 << 24) + 1
        os.pwrite(table, serial.to_bytes(_WORD, "little"), self._n_samples * _WORD)
        return serial

    def _without_passed(self, logs: list[_Log]) -> list[_Log]:
        """Delete the logs of windows that have passed on all ranks of the node."""
        now = 0 if self._upcoming is None else self._upcoming.now - _PASSED
        for log in logs:
            if log.window < now:
                self._delete(log)
        return [log for log in logs if log.window >= now]

    def _room(self, logs: list[_Log], window: int, group: list[tuple[int, int, bytes]]) -> tuple[list[_Log], int]:
        """Evict what is needed later than a window until samples fit, as far as possible."""
        nbytes = sum(len(record) for _, _, record in group)
        room = self._cache.make_room(nbytes)
        while room < nbytes and logs and logs[-1].window > window:
            *logs, last = logs
            self._delete(last)
            room += last.nbytes
        return logs, room

    def _reserve(self, logs: list[_Log], window: int, nbytes: int) -> tuple[list[_Log], int, int]:
        """Take room at the end of a log of a window; returns the serial number of the log, and the place."""
        log = next((one for one in logs if one.window == window and one.nbytes + nbytes <= _LARGEST), None)
        if log is None:
            serial = self._next_serial()
            log = _Log(window, serial, 0, f"{window:019d}-{serial:08d}.log")
            self._names[serial] = log.name
        descriptor = self._open(log.name, os.O_CREAT)
        if descriptor is None:
            raise FileNotFoundError(self._folder / log.name)
        os.ftruncate(descriptor, log.nbytes + nbytes)
        grown = log._replace(nbytes=log.nbytes + nbytes)
        return sorted([grown, *(one for one in logs if one.serial != log.serial)]), log.serial, log.nbytes

    def _delete(self, log: _Log) -> None:
        (self._folder / log.name).unlink(missing_ok=True)
        if (descriptor := self._files.pop(log.name, None)) is not None:
            os.close(descriptor)

    def _logs(self) -> list[_Log]:
        """All logs, those that are needed first in front; descriptors of the others are closed."""
        found: list[_Log] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                window, _, serial = entry.name.removesuffix(".log").partition("-")
                if entry.name.endswith(".log") and window.isdecimal() and serial.isdecimal():
                    with suppress(FileNotFoundError):  # evicted meanwhile
                        found.append(_Log(int(window), int(serial), entry.stat().st_size, entry.name))
        self._close({log.name for log in found})
        self._names = {**dict.fromkeys(self._names, ""), **{log.serial: log.name for log in found}}
        return sorted(found)

    def _log(self, serial: int) -> int | None:
        """The descriptor of a log; None if it is gone."""
        if serial not in self._names:
            self._logs()
            self._names.setdefault(serial, "")  # gone before it was seen; its number does not come again
        return self._open(name) if (name := self._names[serial]) else None

    def _open(self, name: str, flags: int = 0) -> int | None:
        """The descriptor of a file; None if there is none."""
        if (descriptor := self._files.get(name)) is not None:
            return descriptor
        if len(self._files) >= _OPEN:
            self._close()  # the table stays open, as it is used beside logs
        path = self._folder / name
        try:
            made = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS) or flags:
                raise
            made = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # of another user, or on a disk that is read-only
        self._files[name] = made
        return made


def share_of_room(room: int, n_samples: int, sample_bytes: float) -> float:
    """The share of some samples that a cache of so many bytes keeps, its table included."""
    return min(1.0, max(0, room - (n_samples + 1) * _WORD) / max(1.0, n_samples * (sample_bytes + _DIGEST)))


def _fitting(group: list[tuple[int, int, bytes]], room: int) -> Iterator[tuple[int, int, bytes]]:
    """The first samples that fit into some bytes."""
    for one in group:
        room -= len(one[2])
        if room < 0:
            return
        yield one


def _write_all(descriptor: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def _digest(sample: int, data: bytes) -> bytes:
    return digest64(data, seed=sample).to_bytes(8, "big")


def _flush(cache: weakref.ref[SampleCache]) -> None:
    if (one := cache()) is not None:
        one.flush()
