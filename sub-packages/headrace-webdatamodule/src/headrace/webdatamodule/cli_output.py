"""What the commands of ``headrace-shards`` take and print: paths and numbers, lines and JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from headrace.webdatamodule.shards.globbing import find_shards
from headrace.webdatamodule.shards.index.build import build_index, fitting_index, open_listed_shard, open_shard_bytes
from headrace.webdatamodule.shards.index.manifest import NAME
from headrace.webdatamodule.shards.index.shard_index import ShardIndex, index_path
from headrace.webdatamodule.shards.indexed_shards import IndexedShards
from headrace.webdatamodule.shards.reading.local_shards import is_url, open_index

Pieces = Iterable[str] | Iterable[bytes]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def local_path(word: str) -> Path:
    """Read a path; an empty one, as of a variable that is not set, and a URL are refused."""
    if not word:
        raise argparse.ArgumentTypeError("got an empty path, expected the name of a file or directory")
    if is_url(word) and not Path(word).exists():
        cure = "commands work on this machine's files only: give a local path, or read it with IndexedShards in Python"
        raise argparse.ArgumentTypeError(f"got the URL {word!r}, but {cure}")
    return Path(word)


def byte_count(word: str) -> int:
    """Read a number of bytes, with or without a unit of 1024, 1024**2 and so on."""
    found = re.fullmatch(r"([0-9]+)([KMGT]?)(iB|B)?", word, re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a number of bytes such as 1000000, 512M or 2G")
    return int(found[1]) * _UNITS[found[2].upper()]


def positive(word: str) -> int:
    """Read a whole number of 1 or more."""
    if not (word.isascii() and word.isdecimal()) or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of 1 or more")
    return int(word)


def is_set(where: Path) -> bool:
    """Whether a path stands for all shards of a directory, not for one tar file."""
    return where.is_dir() or where.name == NAME


def open_shards(where: Path) -> Iterator[ShardIndex]:
    """The indexes of a directory, a manifest or a tar file, one by one, each seen to be whole and of its shard."""
    if not is_set(where):
        yield _open_tar(where)
        return
    shards = find_shards(where)
    for number in range(len(shards.names)):
        index = shards.open_index(number)
        view = open_listed_shard(Path(shards.path(number)))
        index.check_shard(len(view), view.between)
        yield index


def _open_tar(path: Path) -> ShardIndex:
    index = fitting_index(path)
    if index is not None:
        return index
    if index_path(path).exists():
        say("warning", f"the index of {str(path)!r} is older, damaged or of another shard: the shard itself was read")
    return ShardIndex(build_index(open_shard_bytes(path), shard=str(path)), shard=str(path))


def read_sample(source: Path, key: str, member: str | None) -> tuple[int, dict[str, bytes]]:
    """The members to print, by their keys; no other ones are read, and none is too large."""
    dataset = IndexedShards(source, decode=None)
    try:
        at = dataset.find(key)
    except KeyError:
        raise ValueError(f"there is no sample {key!r} in {str(source)!r}: headrace-shards ls shows all") from None
    index = open_index(dataset.shard_of(at))
    there = index.layout(index.find(key))
    if member is not None and member not in there:
        raise ValueError(f"the sample {key!r} has no member {member!r}, only {', '.join(map(repr, there))}")
    wanted = None if member is None else [member]
    sample = IndexedShards(source, wanted, decode=None, max_bytes=sys.maxsize)[at]
    del sample["__key__"]
    return at, sample


def texts_apart(members: list[bytes], *, terminal: bool) -> list[bytes]:
    """Several texts with line ends between them, and at their end on a terminal; all else stays as it is."""
    texts = [data for data in members if data]
    if len(texts) < 2 or not all(map(_is_text, texts)):
        return members
    ends = [b"" if data.endswith(b"\n") else b"\n" for data in texts]
    if not terminal:
        ends[-1] = b""
    return [piece for pair in zip(texts, ends, strict=True) for piece in pair if piece]


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def write_out(pieces: Pieces) -> None:
    """Write to stdout; quietly no more once nobody reads it."""
    if sys.stdout is None:
        raise OSError("there is no standard output to write to: it is closed")
    sys.stdout.flush()
    # A buffer of our own: where Python's is switched off, one write may take a part only.
    stream = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115 - closed with the process
    try:
        for piece in pieces:
            stream.write(piece if isinstance(piece, bytes) else piece.encode(sys.stdout.encoding, "backslashreplace"))
        stream.flush()
    except BaseException as error:
        discard(sys.stdout)
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, BrokenPipeError):
            raise OSError(f"standard output cannot be written: {error.strerror}") from error
        if not isinstance(error, BrokenPipeError):
            raise


def discard(stream: TextIO | None) -> None:
    """Discard unwritten output, as Python's documentation advises: at its end the interpreter would try again."""
    if stream is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def text_lines(lines: Iterable[str]) -> Iterator[str]:
    """Lines with their ends, what a terminal would obey escaped."""
    return (f"{escaped(line)}\n" for line in lines)


def json_pieces(document: Any) -> list[str]:
    """One JSON document; letters beyond ASCII are escaped, so that names stay exact."""
    return [json.dumps(document, allow_nan=False), "\n"]


def json_list(head: dict[str, Any], name: str, items: Iterable[Any]) -> Iterator[str]:
    """One JSON object whose last entry is a long list, item by item."""
    yield json.dumps({**head, name: []}, allow_nan=False)[:-2]
    for number, item in enumerate(items):
        yield f"{',' if number else ''}\n{json.dumps(item, allow_nan=False)}"
    yield "]}\n"


def say(kind: str, message: str) -> None:
    """Write one line to stderr; nothing where that cannot be written, as the exit code tells the outcome."""
    try:
        sys.stderr.write(f"headrace-shards: {kind}: {escaped(' '.join(message.split()))}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def error_text(error: Exception) -> str:
    """The message of an error; the file comes first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def escaped(text: str) -> str:
    """A text without control characters; tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode("ascii") for one in text
    )


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lay out rows in columns: the first to the left, numbers to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else escaped(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in texts)
    return ["  ".join(line).rstrip() for line in lines]
