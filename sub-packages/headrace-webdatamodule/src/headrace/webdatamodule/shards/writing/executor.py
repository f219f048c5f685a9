"""Tasks on an executor: the first error stops all, and nothing of them stays behind."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
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
# Seconds to write in this process first; seconds of remaining work for which processes are started, which takes some
# seconds; and the share of a sample's time that they may take for it.
_TRIAL, _WORTH, _GAIN = 2.0, 10.0, 0.8


_Result = TypeVar("_Result")


class InProcessWarning(UserWarning):
    """Shards are written in one process, because the samples cannot be sent to others."""


class _TooSlow(Exception):  # noqa: N818 - no error
    """The rest is worth several processes."""


def run(tasks: Sequence[ShardTask], executor: Executor | None, workers: int | None, prefix: str) -> list[Written]:
    """Write shards, with a progress bar over samples."""
    if not tasks:
        return []
    if executor is not None:
        return _run_there(tasks, executor, prefix)
    count = cpus() if workers is None else workers
    if count < 2 or multiprocessing.current_process().daemon:  # a daemon may not have children
        return _run_here(tasks, math.inf)[0]
    done, seconds = _run_here(tasks, _WORTH)
    left = tasks[len(done) :]
    if len(left) > 1 and _is_faster_sent(left[0], seconds, count):
        with pool(min(len(left), count)) as own:
            if _can_be_received(left[0], own):
                return done + _run_there(left, own, prefix, _together(len(left), count))
    return done + _run_here(left, math.inf)[0] if left else done


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


def cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _run_here(tasks: Sequence[ShardTask], most: float) -> tuple[list[Written], float]:
    """What was written, and the seconds that a sample took.

    Stops early when more than one shard and so many seconds are left, as it seems after the first few.
    """
    done: list[Written] = []
    total, shown, passed = sum(map(len, tasks)), 0, 0.0
    with progress(total, tasks[0].path.parent) as bar:
        begin = time.monotonic()

        def show(samples: int) -> None:
            nonlocal shown, passed
            shown += samples
            bar.update(samples)
            passed = time.monotonic() - begin
            if passed > _TRIAL and len(tasks) - len(done) > 1 and passed * (total - shown) > most * shown:
                raise _TooSlow

        with contextlib.suppress(_TooSlow):
            for written in write_each(tasks, show):
                done.append(written)  # noqa: PERF402 - what is done stays when the next one stops
    return done, passed / max(1, shown)


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


def _is_faster_sent(task: ShardTask, seconds: float, workers: int) -> bool:
    """Whether several processes write samples faster than this one, where that takes so many seconds for each.

    This process sends all of them; the others receive them, which takes about as long, and write them. Small samples
    from memory are written in about the time in which they are sent.
    """
    begin = time.monotonic()
    try:
        pickle.dumps(task)
    except Exception as error:  # what cannot be pickled says so in many ways
        return _refused(error)
    sending = (time.monotonic() - begin) / len(task)
    return max(sending, (2 * sending + seconds) / workers) < _GAIN * seconds


def _can_be_received(task: ShardTask, executor: Executor) -> bool:
    received = executor.submit(_receive, pickle.dumps(task))
    try:
        received.result()
    except BrokenProcessPool as error:
        raise BrokenProcessPool(f"no process could be started; {_MAIN}") from error
    except Exception as error:  # what cannot be unpickled too
        return _refused(error)
    return True


def _refused(error: Exception) -> bool:
    reason = f"the samples cannot be sent to other processes ({type(error).__name__}: {error})"
    cure = "pass a function that makes them, defined in a module, or workers=1"
    warnings.warn(f"{reason}: all shards are written in this process; {cure}", InProcessWarning, stacklevel=6)
    return False


def _receive(data: bytes) -> None:
    pickle.loads(data)  # noqa: S301 - made a moment ago by this program
