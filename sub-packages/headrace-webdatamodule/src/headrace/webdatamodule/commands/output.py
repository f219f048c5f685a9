"""What commands print: lines or one JSON document on stdout, warnings on stderr, and nothing that steers a terminal."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

DAMAGE, INPUT, STOPPED = 1, 2, 130


def emit(pieces: Iterable[str]) -> None:
    """Write pieces of text to stdout; quietly no more once nobody reads them.

    Args:
        pieces: Texts with their line ends.

    Raises:
        OSError: They cannot be written, such as on a full disk.
    """
    emit_bytes(piece.encode(_encoding(), "backslashreplace") for piece in pieces)


def emit_bytes(pieces: Iterable[bytes]) -> None:
    """Write bytes to stdout; quietly no more once nobody reads them.

    Args:
        pieces: What to write.

    Raises:
        OSError: They cannot be written, such as on a full disk.
    """
    if sys.stdout is None:
        raise OSError("there is no standard output to write to: it is closed")
    if all(map(_written, pieces)):
        _written(b"", flush=True)


def _written(piece: bytes, *, flush: bool = False) -> bool:
    try:
        left = memoryview(piece)
        while left:  # without a buffer (PYTHONUNBUFFERED), one write may take a part only
            left = left[_taken(sys.stdout.buffer.write(left)) :]
        if flush:
            sys.stdout.flush()
    except OSError as error:
        drop(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OSError(f"standard output cannot be written: {error.strerror}") from error
        return False
    return True


def _taken(count: int | None) -> int:
    if count is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return count


def drop(stream: TextIO | None) -> None:
    """Write what is left nowhere; else the interpreter would try again at its end, and complain or wait.

    Args:
        stream: Of the process; None where it is closed.
    """
    if stream is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def emit_lines(lines: Iterable[str]) -> None:
    """Write lines, what a terminal would obey escaped.

    Args:
        lines: Texts without line ends.
    """
    emit(f"{escaped(line)}\n" for line in lines)


def emit_json(document: Any) -> None:
    """Write one JSON document; letters beyond ASCII are escaped, so that names stay exact.

    Args:
        document: What `json` can write.
    """
    emit([json.dumps(document, allow_nan=False), "\n"])


def emit_json_list(head: dict[str, Any], name: str, items: Iterable[Any]) -> None:
    """Write one JSON object whose last entry is a long list, item by item.

    Args:
        head: The entries before.
        name: Of the list.
        items: What `json` can write.
    """
    emit(_json_list(head, name, items))


def _json_list(head: dict[str, Any], name: str, items: Iterable[Any]) -> Iterable[str]:
    yield f"{json.dumps({**head, name: []}, allow_nan=False)[:-2]}"
    for number, item in enumerate(items):
        yield f"{',' if number else ''}\n{json.dumps(item, allow_nan=False)}"
    yield "]}\n"


def warn(message: str) -> None:
    """Write one line to stderr.

    Args:
        message: What it says.
    """
    say("warning", message)


def say(kind: str, message: str) -> None:
    """Write one line to stderr; nothing where that cannot be written, as the exit code tells the outcome.

    Args:
        kind: "error" or "warning".
        message: What it says.
    """
    try:
        open_stderr().write(f"headrace-shards: {kind}: {one_line(message)}\n")
    except OSError:
        drop(sys.stderr)


def open_stderr() -> TextIO:
    """The stderr of the process; one that leads nowhere where it is closed, since progress bars need one too."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    return sys.stderr


def escaped(text: str) -> str:
    r"""A text without control characters; tabs stay.

    Args:
        text: Any text.

    >>> escaped("a\x1b[2Jb\tc\n"), escaped("\u00e9\u202e\udcff")
    ('a\\x1b[2Jb\tc\\n', 'é\\u202e\\udcff')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else _escape(one) for one in text)


def one_line(message: str) -> str:
    r"""Join the lines of a message, control characters escaped.

    Args:
        message: Any text.

    >>> one_line("two\n  lines")
    'two lines'
    """
    return escaped(" ".join(message.split()))


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lay out rows in columns: the first to the left, numbers to the right.

    Args:
        rows: Of equal length, the first one the heads; integers get thousands separators.

    Returns:
        The lines.

    >>> table([("name", "bytes"), ("a.tar", 10240)])
    ['name    bytes', 'a.tar  10,240']
    """
    texts = [[f"{cell:,}" if isinstance(cell, int) else escaped(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = (
        [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in texts
    )
    return ["  ".join(line).rstrip() for line in lines]


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _encoding() -> str:
    return sys.stdout.encoding if sys.stdout is not None else "utf-8"
