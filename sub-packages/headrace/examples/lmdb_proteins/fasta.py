"""Protein sequences out of a FASTA file, with a progress bar."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ*-")


def records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and letters of each protein, one in memory at a time.

    Args:
        path: FASTA, plain or ending in ``.gz``. Letters are made capitals, white space is left out.

    Raises:
        ValueError: If it is no FASTA file, or a record is empty or holds something else than letters.
    """
    name, parts = b"", list[bytes]()
    for line in progress_lines(path):
        if line.startswith(b">"):
            if name:
                yield name, checked(path, name, parts)
            name, parts = (line[1:].split() or [b"(no name)"])[0], []
        elif letters := b"".join(line.split()):
            if not name:
                raise ValueError(f"{path}: letters before the first '>': it is no FASTA file")
            parts.append(letters.upper())
    if not name:
        raise ValueError(f"{path}: it holds no record that begins with '>'")
    yield name, checked(path, name, parts)


def checked(path: Path, name: bytes, parts: list[bytes]) -> bytes:
    """Join the lines of a record and refuse what is no protein."""
    sequence = b"".join(parts)
    if not sequence or not LETTERS.issuperset(sequence):
        wrong = bytes(sorted(set(sequence) - LETTERS)).decode("latin-1")
        what = f"holds {wrong!r}, expected letters, '*' and '-'" if wrong else "has no sequence"
        raise ValueError(f"{path}: record {name.decode('utf-8', 'replace')!r} {what}")
    return sequence


def progress_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines; the bar shows how much of the file, compressed or not, has been read."""
    with (
        path.open("rb") as raw,
        tqdm(total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True, disable=None) as bar,
    ):
        lines: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for line in lines:
            bar.update(raw.tell() - bar.n)
            yield line
