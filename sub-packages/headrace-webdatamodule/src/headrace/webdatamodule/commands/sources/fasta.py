"""FASTA files: each record is a sample."""

from __future__ import annotations

import gzip
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.commands.sources.source import Sample, Source, stamp
from headrace.webdatamodule.shards.format.tar import BLOCK

PLAIN = (".fasta", ".fa", ".faa", ".fna", ".ffn", ".frn", ".fas")
ENDINGS = (*PLAIN, *(f"{ending}.gz" for ending in PLAIN))
KEYS_FROM = ("number", "id")
_BEGIN = re.compile(rb"^>", re.MULTILINE)
_DIGITS = 9


class Fasta(Source):
    """The records of a FASTA file.

    A record's key is its number, since its own name may come twice or hold what a key cannot; or that name, made safe.
    Its members are texts: `id.txt`, the line behind ">", and `seq.txt`, the letters without white space.

    Args:
        path: The file, not compressed.
        first: The number of its first record.
        name: Of the file, in errors; the path when empty.
        key_from: What the keys are: "number", or "id" for the first word behind ">"; see `safe_key`.

    Attributes:
        name: Of the file.
        ids: The first words; None where numbers are the keys.

    Raises:
        ValueError: It is no FASTA file, or holds no record; or a record has no id.
    """

    def __init__(self, path: Path, first: int = 0, name: str = "", key_from: str = "number") -> None:
        self.name = name or str(path)
        self._path, self._first = str(path), first
        self._starts = record_starts(path, name or str(path))
        self._nbytes = path.stat().st_size
        self.ids = read_ids(path, self._starts, self.name) if key_from == "id" else None

    def __len__(self) -> int:
        return self._starts.size - 1

    def _sample(self, index: int) -> Sample:
        begin, end = self._starts[index : index + 2].tolist()
        with Path(self._path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != self._nbytes:
                raise ValueError(f"{self._path}: the file was changed while it was being packed")
            file.seek(begin)
            line, _, letters = file.read(end - begin).partition(b"\n")
        title, number = line[1:].strip(), self._first + index
        if b"\r" in title:
            raise ValueError(f"{self._path}: record {number} has lines that end with a bare CR: convert them to LF")
        return self._key(index), {"id.txt": title, "seq.txt": b"".join(letters.split())}

    def _key(self, index: int) -> str:
        return f"{self._first + index:0{_DIGITS}d}" if self.ids is None else safe_key(self.ids[index])

    def keys(self) -> Iterable[str]:
        """As of `Source`."""
        return map(self._key, range(len(self)))

    def stamps(self) -> Iterable[tuple[int, int]]:
        """As of `Source`."""
        return [stamp(self._path)]

    def part(self, start: int, stop: int) -> Source:
        """As of `Source`."""
        made = copy(self)
        made._first, made._starts = self._first + start, self._starts[start : stop + 1]
        made.ids = None if self.ids is None else self.ids[start:stop]
        return made

    def sizes(self) -> npt.NDArray[np.int64]:
        """As of `Source`; with line ends counted, and the most of padding."""
        return np.diff(self._starts) + 4 * BLOCK


def record_starts(path: Path, name: str) -> npt.NDArray[np.int64]:
    """Where the records of a FASTA file begin, and where the last one ends.

    Args:
        path: The file, not compressed.
        name: Of the file, in errors.

    Returns:
        Bytes, shape [n_records + 1].

    Raises:
        ValueError: It is no FASTA file, or holds no record.
    """
    nbytes = path.stat().st_size
    if not nbytes:
        raise ValueError(f"{name}: the file is empty")
    with path.open("rb") as file:
        # Not closed by hand: after Ctrl-C the search still holds the map, which then cannot be closed.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        starts = np.fromiter((match.start() for match in _BEGIN.finditer(data)), np.int64)
        head = data[: min(int(starts[0]) if starts.size else nbytes, 4096)]
    if head.strip():
        raise ValueError(f"{name}: it does not begin with '>', as a FASTA file does, but with {head.strip()[:24]!r}")
    if not starts.size:
        raise ValueError(f"{name}: the file holds no record")
    return np.append(starts, nbytes)


def read_ids(path: Path, starts: npt.NDArray[np.int64], name: str) -> list[str]:
    """The first word behind each ">".

    Args:
        path: The file, not compressed.
        starts: As of `record_starts`.
        name: Of the file, in errors.

    Raises:
        ValueError: A record has none, or one that is no UTF-8.
    """
    ids = list[str]()
    with path.open("rb") as file:
        for number, start in enumerate(starts[:-1].tolist()):
            file.seek(start)
            words = file.readline()[1:].split(None, 1)
            try:
                ids.append(words[0].decode())
            except (IndexError, UnicodeDecodeError):
                found = "no id behind '>'" if not words else f"the id {words[0]!r:.80}, which is no UTF-8"
                raise ValueError(f"{name}: record {number} has {found}: leave out --key-from id") from None
    return ids


def safe_key(word: str) -> str:
    r"""A record's id as a key: dots, slashes and backslashes become dashes, and so do two underscores at its begin.

    Args:
        word: The id, not empty.

    >>> safe_key("sp|P1.2|A/B"), safe_key("__x")
    ('sp|P1-2|A-B', '--x')
    """
    return re.sub(r"[./\\\0]", "-", f"--{word[2:]}" if word.startswith("__") else word)


def refuse_twins(records: Sequence[Fasta]) -> None:
    """Refuse ids that give one key twice.

    Args:
        records: All files that are packed together, with ids.

    Raises:
        ValueError: Naming both.
    """
    seen: dict[str, tuple[str, str]] = {}
    for one in records:
        for key, word in zip(one.keys(), one.ids or (), strict=True):
            if key in seen:
                other, file = seen[key]
                both = f"the ids {other!r} in {file} and {word!r} in {one.name} both give the key {key!r}"
                raise ValueError(f"{both}: rename one, or leave out --key-from id, so that keys are numbers")
            seen[key] = word, one.name


def plain(path: Path, scratch: Path) -> Path:
    """A FASTA file that is not compressed, since records are read at random.

    Args:
        path: The file; unpacked when its name ends with ".gz".
        scratch: A directory for what is unpacked.

    Returns:
        The same path, or that of the unpacked file.

    Raises:
        ValueError: The compressed file is damaged.
    """
    if not path.name.lower().endswith(".gz"):
        return path
    target = scratch / f"{len(list(scratch.iterdir()))}.fasta"
    try:
        with gzip.open(path, "rb") as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: the file is cut or damaged: {error}") from error
    shutil.copystat(path, target)  # it is as old as what it was made of
    return target
