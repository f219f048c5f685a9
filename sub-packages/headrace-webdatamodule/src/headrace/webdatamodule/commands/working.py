"""Processes that share long work."""

from __future__ import annotations

import argparse
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

_Result = TypeVar("_Result")


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
    # Started afresh: a fork could inherit locked locks.
    executor = _Pool(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    def submit(self, function: Callable[..., _Result], /, *words: Any, **options: Any) -> Future[_Result]:
        # Processes start in here, and inherit that Ctrl-C is held back: it reaches all processes of a terminal, and
        # only the first one is to decide what becomes of the work.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *words, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
