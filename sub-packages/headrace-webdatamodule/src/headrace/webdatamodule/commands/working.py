"""Processes that share long work."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from headrace.webdatamodule.shards.writing import executor as processes


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Give a command the flag ``--workers``.

    Args:
        parser: Of the command.
    """
    parser.add_argument("--workers", type=positive, metavar="N", help="processes to work in (default: this one)")


def positive(word: str) -> int:
    """Read a number of 1 or more.

    Args:
        word: From the command line.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    if not (word.isascii() and word.isdecimal()) or int(word) < 1:
        raise argparse.ArgumentTypeError(f"got {word!r}, expected a whole number of 1 or more")
    return int(word)


@contextmanager
def pool(workers: int | None) -> Iterator[Executor | None]:
    """Start processes, and end them.

    Args:
        workers: How many; None or 1 for this process alone.

    Yields:
        The executor; None for this process alone.
    """
    if workers is None or workers == 1:
        yield None
        return
    with processes.pool(workers) as executor:
        yield executor
