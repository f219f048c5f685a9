"""What the commands of ``headrace-shards`` print: lines, tables and JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

Pieces = Iterable[str] | Iterable[bytes]


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
    out = sys.stdout
    out.flush()
    try:
        for piece in pieces:
            if isinstance(out, io.TextIOWrapper):
                rest = memoryview(piece if isinstance(piece, bytes) else piece.encode(out.encoding, "backslashreplace"))
                while rest:  # where Python's buffer is switched off, one write may take a part only
                    rest = rest[out.buffer.write(rest) :]
            else:  # a program that calls `main` collects what is printed; a notebook
                out.write(piece.decode("utf-8", "backslashreplace") if isinstance(piece, bytes) else piece)
        out.flush()
    except BaseException as error:
        discard(out)
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, BrokenPipeError):
            raise OSError(f"standard output cannot be written: {error.strerror}") from error
        if not isinstance(error, BrokenPipeError):
            raise


def discard(stream: TextIO | None) -> None:
    """Discard unwritten output, as Python's documentation advises: at its end the interpreter would try again."""
    if not isinstance(stream, io.TextIOWrapper):
        return
    with suppress(io.UnsupportedOperation):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
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
