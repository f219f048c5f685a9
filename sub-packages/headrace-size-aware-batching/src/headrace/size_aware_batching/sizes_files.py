"""Sizes out of files: numpy arrays, lists of numbers and FASTA."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.prepared import read_sizes

FASTA = (".fasta", ".fa", ".faa", ".fna")
ENDINGS = (".npy", ".txt", *FASTA, *(ending + ".gz" for ending in FASTA))


def sizes_of_files(paths: list[Path]) -> NDArray[Any]:
    """Read the sizes of several files, one after the other.

    Args:
        paths: Files as `sizes_of_file` takes them.

    Returns:
        Shape ``[n]``, or ``[n, k]`` where the files hold k sizes a sample.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file is damaged, holds no size, or files differ in their number of columns.
    """
    arrays = [sizes_of_file(path) for path in paths]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        found = ", ".join(f"{path}: {array.shape}" for path, array in zip(paths, arrays, strict=True))
        raise ValueError(f"the files differ in columns ({found}): give files of one kind")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def sizes_of_file(path: Path) -> NDArray[Any]:
    """Read the sizes that a file holds; its ending says how.

    Args:
        path: ``.npy`` of shape ``[n]`` or ``[n, k]``; ``.txt`` with a number a line; or FASTA (``.fasta``, ``.fa``,
            ``.faa``, ``.fna``, each also with ``.gz``), where a size is the number of letters of a sequence.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is of another kind, damaged, holds no size, or one that is negative or no number.
    """
    name = path.name.lower()
    if not name.endswith(ENDINGS):
        raise ValueError(f"{path}: allowed endings are {', '.join(ENDINGS)}")
    read = from_npy if name.endswith(".npy") else from_text if name.endswith(".txt") else from_fasta
    try:
        sizes = read_sizes(read(path))
    except (EOFError, TypeError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}") from error
    if not len(sizes):
        raise ValueError(f"{path}: it holds no size")
    return sizes


def from_npy(path: Path) -> NDArray[Any]:
    """Read a numpy array; one that would run code when it is read is refused."""
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it does not begin as a .npy file does; write it with numpy.save")
        file.seek(0)
        array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


def from_text(path: Path) -> NDArray[Any]:
    """Read one number a line; empty lines may only stand at the end."""
    try:
        lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    except UnicodeDecodeError:
        raise ValueError("it is no text in UTF-8") from None
    if lines == [""]:
        return np.zeros(0, np.int64)
    return np.array([number(line, place) for place, line in enumerate(lines, 1)])


def number(line: str, place: int) -> int | float:
    """Read a line as an integer where it is one, else as a real number.

    >>> number("12", 1), number(" 1.5 ", 2)
    (12, 1.5)
    """
    try:
        return int(line)
    except ValueError:
        pass
    try:
        return float(line)
    except ValueError:
        raise ValueError(f"line {place}: got {line.strip()[:40]!r}, expected one number") from None


def from_fasta(path: Path) -> NDArray[np.int64]:
    """Count the letters of each sequence; white space does not count."""
    with opened(path) as lines:
        return np.fromiter(fasta_lengths(lines), np.int64)


def opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    """Open a file that may be compressed with gzip."""
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def fasta_lengths(lines: Iterable[bytes]) -> Iterator[int]:
    """Yield the length of each sequence.

    >>> list(fasta_lengths([b">one", b"MK V", b"LA", b">two", b"G"]))
    [5, 1]
    """
    length = None
    for place, line in enumerate(lines, 1):
        if line.startswith(b">"):
            if length is not None:
                yield length
            length = 0
        elif letters := b"".join(line.split()):
            if length is None:
                raise ValueError(f"line {place}: letters before the first '>': it is no FASTA file")
            length += len(letters)
    if length is not None:
        yield length
