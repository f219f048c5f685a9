"""Tasks on an executor: the first error stops all, and nothing of them stays behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Never, TypeVar

from tqdm import tqdm

from headrace.webdatamodule.shards.writing.shard_builder import Written
from headrace.webdatamodule.shards.writing.shard_task import (
    TOGETHER,
    ShardTask,
    TaskGroup,
    remove_parts,
    stop_parts,
    write_each,
)

_MAIN = "put what starts the work under `if __name__ == '__main__':`, or pass workers=1 to write in this process"
_Result = TypeVar("_Result")


def run(tasks: Sequence[ShardTask], executor: Executor | None, workers: int, prefix: str) -> list[Written]:
    """Write shards, with a progress bar over samples."""
    if not tasks:
        return []
    if executor is not None:
        return _run_there(tasks, executor, prefix)
    count = min(workers, len(tasks))
    if count == 1:
        return _run_here(tasks)
    with pool(count) as processes:
        _check_sent(tasks[0], processes)
        return _run_there(tasks, processes, prefix, _together(len(tasks), count))


@contextmanager
def pool(workers: int) -> Iterator[Executor]:
    """Worker processes: started by the first call, not interrupted by Ctrl-C, and ended when this process ends."""
    # Started afresh: a fork could inherit locked locks.
    context = multiprocessing.get_context("spawn")
    executor = _Pool(workers, mp_context=context, initializer=_end_with_parent)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def progress(n_samples: int | None, directory: Path) -> tqdm[Never]:
    """A bar over samples on the terminal; silent where the output is not a terminal."""
    bar: tqdm[Never] = tqdm(total=n_samples, desc=f"writing {directory.name}", unit="sample", disable=None)
    return bar


def refuse_inherited() -> None:
    """Refuse to write in a process that only runs the main module because it was started to write: both would wait."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(f"a process that was started to write shards runs the main module again: {_MAIN}")


class _Pool(ProcessPoolExecutor):
    def submit(self, function: Callable[..., _Result], /, *args: Any, **options: Any) -> Future[_Result]:
        # Ctrl-C reaches all processes of a terminal, and only the first one is to decide what becomes of the work.
        # Processes start in here and inherit the mask. To ignore the signal in an initializer would be too late: one
        # that is interrupted while it starts breaks the pool, which then hangs.
        with _interrupted_later():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return super().submit(function, *args, **options)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Handle Ctrl-C at the end. A mask alone does not: other threads receive the signal, and this one handles it."""
    handler, came = signal.getsignal(signal.SIGINT), list[Any]()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()

    def follow() -> None:  # when the first process is killed, nobody tells its workers
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run_here(tasks: Sequence[ShardTask]) -> list[Written]:
    with progress(sum(map(len, tasks)), tasks[0].path.parent) as bar:
        return list(write_each(tasks, bar.update))


def _together(n_tasks: int, workers: int) -> int:
    """How many shards a process of ours is sent at once: several small ones reach the disk sooner together."""
    return max(1, min(TOGETHER, n_tasks // (4 * workers)))


def _run_there(tasks: Sequence[ShardTask], executor: Executor, prefix: str, together: int = 1) -> list[Written]:
    futures: dict[Future[list[Written]], TaskGroup] = {}
    # Not `as_completed`: it waits for ever for what an executor cancels while it is shut down.
    ended: SimpleQueue[Future[list[Written]]] = SimpleQueue()
    try:
        with _interrupted_later():  # or a task would run that nobody stops
            for first in range(0, len(tasks), together):
                group = TaskGroup(tasks[first : first + together])
                future = executor.submit(group)
                futures[future] = group
                future.add_done_callback(ended.put)
        with progress(sum(map(len, tasks)), tasks[0].path.parent) as bar:
            for _ in futures:
                future = ended.get()
                future.result()
                bar.update(len(futures[future]))
        return [written for future in futures for written in future.result()]
    except CancelledError as error:
        message = "the executor was shut down, or a task cancelled, before all shards were written"
        raise RuntimeError(f"{message}: call again with one that works") from error
    except BrokenProcessPool as error:
        message = f"a process that wrote shards ended: it was killed, had no memory left, or could not start; {_MAIN}"
        raise BrokenProcessPool(message) from error
    finally:
        _stop(list(futures), tasks[0].path.parent, prefix, tasks[0].run)


def _stop(futures: Sequence[Future[Any]], directory: Path, prefix: str, run: str) -> None:
    for future in futures:
        future.cancel()
    left = {future for future in futures if not future.done()}
    while left:
        # A task stops when its part is gone. One that was queued in a process may begin only now: look again.
        stop_parts(directory, prefix, run)
        left = {future for future in wait(left, timeout=0.1).not_done if not future.done()}
    remove_parts(directory, prefix, run)


def _check_sent(task: ShardTask, processes: Executor) -> None:
    """Refuse samples that cannot be pickled, or that a process cannot make again."""
    try:
        processes.submit(_receive, pickle.dumps(task)).result()
    except BrokenProcessPool as error:
        raise BrokenProcessPool(f"no process could be started; {_MAIN}") from error
    except Exception as error:  # what cannot be pickled says so in many ways
        reason = f"samples cannot be sent to other processes ({type(error).__name__}: {error})"
        raise TypeError(f"{reason}: pass a function that makes them, defined in a module, or workers=1") from error


def _receive(data: bytes) -> None:
    pickle.loads(data)  # noqa: S301 - made a moment ago by this program
