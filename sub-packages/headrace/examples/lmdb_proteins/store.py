"""How proteins lie in an LMDB file: letters as they are, lengths as one array, nothing pickled."""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

FORMAT, KIND = b"format", b"headrace example: proteins 1"
LENGTHS = b"lengths"  # little-endian int32, one a protein
TOGETHER = 10_000  # records a transaction
OPENED: dict[tuple[int, int], tuple[int, lmdb.Environment]] = {}  # device and inode -> process, environment


def key(index: int) -> bytes:
    """Return the key of a protein: eight bytes, so that the file's order is that of the numbers."""
    return index.to_bytes(8, "big")


def write(path: Path, sequences: Iterable[bytes]) -> int:
    """Write a new file and return how many proteins it holds. It gets its name only when it is whole.

    Raises:
        FileExistsError: If there is such a file already.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: give another name or remove it")
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    lengths, rest = list[int](), iter(sequences)
    try:
        with lmdb.open(str(partial), subdir=False, lock=False, sync=False, map_size=2**26) as environment:
            while some := list(islice(rest, TOGETHER)):
                put(environment, [(key(len(lengths) + place), letters) for place, letters in enumerate(some)])
                lengths.extend(map(len, some))
            put(environment, [(FORMAT, KIND), (LENGTHS, np.array(lengths, "<i4").tobytes())])
            environment.sync(True)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(lengths)


def put(environment: lmdb.Environment, items: list[tuple[bytes, bytes]]) -> None:
    """Store items in one transaction, in a larger map where they do not fit."""
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for name, value in items:
                    transaction.put(name, value)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])


def opened(path: Path) -> lmdb.Environment:
    """Return this process's one environment of a file: LMDB allows no second, and none that crossed a fork.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is another kind of file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: make it with convert.py")
    status = path.stat()
    file = status.st_dev, status.st_ino
    process, environment = OPENED.get(file, (0, None))
    if process != os.getpid():
        if environment is not None:
            environment.close()  # it came with a fork; the parent's own stays open
        OPENED[file] = os.getpid(), open_to_read(path)
    return OPENED[file][1]


def open_to_read(path: Path) -> lmdb.Environment:
    """Open a file and refuse one that `write` did not make."""
    try:
        environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise ValueError(f"{path} is no LMDB file that can be read ({error}): make it with convert.py") from None
    with environment.begin() as transaction:
        if transaction.get(FORMAT) != KIND:
            environment.close()
            raise ValueError(f"{path} holds no proteins as this example stores them: make it with convert.py")
    return environment


def read_lengths(environment: lmdb.Environment) -> NDArray[np.int32]:
    """Return the number of letters of each protein, shape ``[n]``."""
    with environment.begin() as transaction:
        return np.frombuffer(transaction.get(LENGTHS) or b"", "<i4")


def letters(environment: lmdb.Environment, indices: Iterable[int]) -> Iterator[bytes]:
    """Yield the letters of proteins."""
    with environment.begin() as transaction:
        for index in indices:
            found = transaction.get(key(index))
            if found is None:
                raise ValueError(f"protein {index} is missing from {environment.path()}: the file is damaged")
            yield found
