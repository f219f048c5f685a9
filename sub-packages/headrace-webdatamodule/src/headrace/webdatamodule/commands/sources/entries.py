"""LMDB: each entry is a sample with one member."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.commands.sources.source import Sample, Source, stamp
from headrace.webdatamodule.shards.writing.plan import stored_bytes

ENDINGS = (".lmdb", ".mdb")


class Entries(Source):
    """The entries of an LMDB. Bytes are copied as they are: nothing is unpickled.

    Args:
        path: The database: a directory with `data.mdb`, or a file.
        member: The member key of the values.
        keys: Which entries, in this order; all, in the order of the database, when None. The dots of a key become
            dashes in the sample's key.

    Raises:
        ImportError: The package `lmdb` is not installed.
        ValueError: It is no LMDB, is empty or lacks a key.
    """

    def __init__(self, path: Path, member: str, keys: Sequence[str] | None = None) -> None:
        self._path, self._member = str(path), member
        wanted = None if keys is None else [os.fsencode(key) for key in keys]
        with self._reading(buffers=True) as reading:
            pairs = ((bytes(key), len(value)) for key, value in reading.cursor())
            found = list(pairs) if wanted is None else [(key, self._length(reading, key)) for key in wanted]
        if not found:
            raise ValueError(f"{self._path}: the LMDB holds no entries")
        self._keys = [key for key, _ in found]
        self._sizes = np.array([stored_bytes(size) for _, size in found], np.int64)

    def _length(self, reading: Any, key: bytes) -> int:
        value = reading.get(key)
        if value is None:
            raise ValueError(f"{self._path}: the LMDB has no entry {os.fsdecode(key)!r}: correct --keys")
        return len(value)

    def __len__(self) -> int:
        return len(self._keys)

    def _sample(self, index: int) -> Sample:
        key = self._keys[index]
        with self._reading() as reading:
            value = reading.get(key)
        if value is None:
            raise ValueError(f"{self._path}: the entry {os.fsdecode(key)!r} was removed while it was being packed")
        return _sample_key(key), {self._member: value}

    def keys(self) -> Iterable[str]:
        """As of `Source`."""
        return map(_sample_key, self._keys)

    def stamps(self) -> Iterable[tuple[int, int]]:
        """As of `Source`."""
        path = Path(self._path)
        return [stamp(path / "data.mdb" if path.is_dir() else path)]

    def part(self, start: int, stop: int) -> Source:
        """As of `Source`."""
        made = copy(self)
        made._keys, made._sizes = self._keys[start:stop], self._sizes[start:stop]
        return made

    def sizes(self) -> npt.NDArray[np.int64]:
        """As of `Source`."""
        return self._sizes

    @contextmanager
    def _reading(self, *, buffers: bool = False) -> Iterator[Any]:
        environment = open_lmdb(self._path, os.getpid())
        with told(self._path), environment.begin(buffers=buffers) as reading:
            yield reading


def _sample_key(key: bytes) -> str:
    return os.fsdecode(key).replace(".", "-")


@cache
def open_lmdb(path: str, process: int) -> Any:  # noqa: ARG001 - a part of what is remembered
    """Open an LMDB for reading, without writing a lock file; once in a process, as the package demands.

    Args:
        path: A directory with `data.mdb`, or a file.
        process: This one, since an environment must not cross a fork.

    Raises:
        ImportError: The package `lmdb` is not installed.
        ValueError: It is no LMDB.
    """
    with told(path):
        import lmdb

        folder = Path(path).is_dir()
        return lmdb.open(path, subdir=folder, readonly=True, create=False, lock=False, readahead=False)


@contextmanager
def told(path: str) -> Iterator[None]:
    """Errors of the package `lmdb` as those that name the path or the cure.

    Args:
        path: Of the database.

    Raises:
        ImportError: The package is not installed.
        ValueError: The package could not read the database.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError("reading an LMDB needs the package lmdb: pip install lmdb") from error
    try:
        yield
    except lmdb.Error as error:
        raise ValueError(f"{path}: it cannot be read as an LMDB: {error}") from error
