"""Processes of our own: started afresh, deaf to Ctrl-C, and gone when the first one is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@contextmanager
def pool(workers: int) -> Iterator[Executor]:
    """Start processes, and end them.

    Args:
        workers: How many.

    Yields:
        Their executor. They start when the first call comes.
    """
    # Started afresh: a fork could inherit locked locks.
    executor = _Pool(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()

    def follow() -> None:
        # When the first process is killed, nobody tells its workers.
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class _Pool(ProcessPoolExecutor):
    def submit(self, function: Callable[..., _Result], /, *words: Any, **options: Any) -> Future[_Result]:
        # Processes start in here, and inherit that Ctrl-C is held back: it reaches all processes of a terminal, and
        # only the first one is to decide what becomes of the work.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(function, *words, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
