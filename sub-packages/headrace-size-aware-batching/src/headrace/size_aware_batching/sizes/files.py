"""Sizes in files: .npy, text, FASTA and Parquet."""

import codecs
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import Number
from headrace.size_aware_batching.sizes.read import read_sizes

_FASTA = (".fasta", ".fa", ".faa", ".fna")
_ENDINGS = (".npy", ".txt", *_FASTA, *(ending + ".gz" for ending in _FASTA), ".parquet")


# Sizes in files.


def sizes_of_files(paths: list[Path], column: str | None = None) -> NDArray[Any]:
    """Read the sizes of several files, concatenated, shape ``[n]`` or ``[n, k]``."""
    arrays = [sizes_of_file(path, column) for path in paths]
    if len({array.shape[1:] for array in arrays}) > 1:
        found = ", ".join(f"{path}: {array.shape}" for path, array in zip(paths, arrays, strict=True))
        raise ValueError(f"the files must have the same columns, got {found}")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def sizes_of_file(path: Path, column: str | None = None) -> NDArray[Any]:
    """Read the sizes of one file, by its extension; a folder contains Parquet files."""
    name = path.name.lower()
    parquet = name.endswith(".parquet") or path.is_dir()
    if not parquet and not name.endswith(_ENDINGS):
        raise ValueError(f"{path}: the ending must be one of {', '.join(_ENDINGS)}")
    if parquet != (column is not None):
        raise ValueError(f"{path}: --column NAME must be given for Parquet files, and only for them")
    read = _from_npy if name.endswith(".npy") else _from_text if name.endswith(".txt") else _from_fasta
    try:
        sizes = read_sizes((path, column) if parquet else read(path))
    except (EOFError, TypeError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path} ')}") from error
    if not len(sizes):
        raise ValueError(f"{path}: the file holds no size")
    return sizes


def fasta_lengths(lines: Iterable[bytes]) -> Iterator[int]:
    """Yield the number of letters of each sequence, without white space.

    >>> list(fasta_lengths([b">one", b"MK V", b"LA", b">two", b"G"]))
    [5, 1]
    """
    length = None
    for place, text in enumerate(lines, 1):
        line = text.removeprefix(codecs.BOM_UTF8) if place == 1 else text
        if line.startswith(b">"):
            if length is not None:
                yield length
            length = 0
        elif letters := b"".join(line.split()):
            if length is None:
                raise ValueError(f"line {place}: letters before the first '>', so it is not a FASTA file")
            length += len(letters)
    if length is not None:
        yield length


def _from_npy(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it does not begin as a .npy file does; write it with numpy.save")
        file.seek(0)
        array: NDArray[Any] = np.load(file, allow_pickle=False)  # a pickle could run code
    return array


def _from_text(path: Path) -> NDArray[Any]:
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    if lines == [""]:
        return np.zeros(0, np.int64)
    return np.array([_number_of_line(line, place) for place, line in enumerate(lines, 1)])


def _number_of_line(line: str, place: int) -> Number:
    for kind in (int, float):
        try:
            number: Number = kind(line)
        except ValueError:
            continue
        return number
    raise ValueError(f"line {place}: expected one number, got {line.strip()[:40]!r}")


def _from_fasta(path: Path) -> NDArray[np.int64]:
    with _opened(path) as lines:
        return np.fromiter(fasta_lengths(lines), np.int64)


def _opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")
