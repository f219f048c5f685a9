"""Worker processes: started quietly, seeded for each step, waited for with a limit, and always ended."""

from __future__ import annotations

import contextlib
import io
import math
import multiprocessing
import os
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import cache
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from headrace.webdatamodule._shared.random import key_of

GRACE = 5.0  # seconds that workers have to end by themselves
_SETTLE = 0.02  # seconds
_POLL = 5.0  # seconds; a killed worker is noticed within that


def step_key(key: int, step: int) -> int:
    """The key of a step's random numbers, 64 bits, of the key of its epoch and rank."""
    return key_of(key, [step])


def seed_generators(key: int) -> None:
    """Seed the global generators of `random`, numpy and torch's CPU by 64 bits, for what a transform draws."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the one that transforms draw from
    torch.default_generator.manual_seed(key >> 1)


@cache
def end_with_parent(_: int = 0) -> None:
    """End this worker when the process that started it is killed.

    A forkserver's worker is a child of that server, which lives as long as its children; torch looks at the number of
    the worker's parent only.
    """
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid != os.getppid():
        threading.Thread(target=_exit_after, args=(starter,), daemon=True).start()


def _exit_after(process: Any) -> None:
    process.join()
    os._exit(1)


def start_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin an iteration of a `DataLoader`; the first one starts its workers.

    Call it before the first collective of an epoch: on Python 3.11 a child is stuck for ever when it is forked while
    a thread of the process group takes the GIL for the first time, as gloo's do after a collective. A trainer may have
    called one just before; a moment without the GIL lets those threads have it.
    """
    if _may_be_stuck(loader):
        time.sleep(_SETTLE)
    with warnings.catch_warnings(), explained(loader):
        # Python 3.12 and newer warn of every fork beside threads. torch's workers touch none of those threads' locks.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # the error says it
        iterator = iter(loader)
    workers = getattr(iterator, "_workers", None)
    if workers and not hasattr(iterator, "_headrace_end"):
        # Before multiprocessing joins its children at exit, which never returns for one that ignores SIGTERM.
        end = Finalize(None, _terminate, args=(list(workers), id(iterator)), exitpriority=10)
        vars(iterator)["_headrace_end"] = end
    return iterator


def start_method(loader: DataLoader[Any]) -> str:
    """How a `DataLoader` starts its workers: "fork", "forkserver" or "spawn"."""
    method: str = (loader.multiprocessing_context or multiprocessing).get_start_method()
    return method


def will_fork(loader: DataLoader[Any]) -> bool:
    """Whether the next iteration of a `DataLoader` forks workers, which have what this process read before."""
    return loader.num_workers > 0 and loader._iterator is None and start_method(loader) == "fork"


@contextlib.contextmanager
def explained(loader: DataLoader[Any]) -> Iterator[None]:
    """Say what to do where workers cannot be sent what they need; pickling fails with three kinds of errors."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        if loader.num_workers == 0 or not ("pickle" in reason or "local object" in reason):
            raise
        raise TypeError(
            f"workers that are started by {start_method(loader)!r} get the dataset and collate_fn by pickle, which "
            f"failed ({reason}): define functions in a module, with functools.partial in place of a lambda, or give "
            "multiprocessing_context='fork', which sends nothing"
        ) from error


def _may_be_stuck(loader: DataLoader[Any]) -> bool:
    """Whether workers are about to be forked beside threads of a process group, by a Python that may lose them."""
    grouped = dist.is_available() and dist.is_initialized()
    return sys.version_info < (3, 12) and grouped and will_fork(loader)


def end_workers(iterator: Any) -> None:
    """End the workers of an iteration; those that do not end within some seconds are killed."""
    if not hasattr(iterator, "_shutdown_workers"):
        return
    workers = list(iterator._workers)
    _forget(id(iterator))
    iterator._worker_pids_set = False
    # torch joins one worker after another, up to 5 seconds each, before it sends SIGTERM to any that is left; with many
    # workers, or some that ignore the signal, this would take minutes. So all are killed once the grace is over.
    timer = threading.Timer(GRACE, _kill, (workers,))
    timer.daemon = True
    timer.start()
    try:
        iterator._shutdown_workers()
    finally:
        timer.cancel()
        _kill(workers)
        if finalizer := vars(iterator).pop("_headrace_end", None):
            finalizer.cancel()


def _terminate(workers: list[Any], iterator: int) -> None:
    _forget(iterator)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    _kill(workers)


def _kill(workers: list[Any]) -> None:
    for worker in workers:
        if worker.exitcode is None:
            worker.kill()


def _forget(iterator: int) -> None:
    # Else torch's signal handler takes the end of a worker for a failure.
    with contextlib.suppress(ValueError):
        signal_handling._remove_worker_pids(iterator)  # type: ignore[attr-defined]


class WorkerTimeoutError(RuntimeError):
    """A batch took longer than the `timeout` of its loader."""


class WorkerTimeout:
    """A limit in seconds to how long a batch may take; 0 for none.

    Torch looks for dead workers when its own limit has passed, and a signal that says so earlier may come at the
    wrong moment. So it gets a short limit, `seconds`, and is asked again.
    """

    def __init__(self, timeout: Any) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
            raise ValueError(f"timeout must be seconds >= 0, 0 for no limit, got {timeout!r}")
        self.timeout = timeout
        self.polls = max(1, math.ceil(timeout / _POLL))
        self.seconds = timeout / self.polls

    def next_of(self, batches: Iterator[Any], loader: DataLoader[Any]) -> Any:
        """The next batch of a `DataLoader`, of its iterator; None when there is no more."""
        for _ in range(self.polls):
            try:
                return next(batches, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
        cure = "raise timeout, or look at the dataset and its transform, which are too slow or stuck"
        if start_method(loader) == "fork":
            cure += (
                ". A library with threads of its own, such as polars, is stuck in a forked worker if this process has "
                "used it before: give multiprocessing_context='spawn' or 'forkserver'"
            )
        raise WorkerTimeoutError(f"DataLoader timed out after {self.timeout:g} seconds: {cure}")


class _TrialPickler(ForkingPickler):
    """As workers send batches, but for tensors, which would be put into shared memory for it."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:  # the only ones that torch does not send
            raise TypeError("a tensor that was computed with gradients: detach() it")
        return int, ()


def check_picklable(batch: Any) -> None:
    """Refuse a batch that cannot be pickled.

    A queue between processes pickles in a thread of its own, prints what goes wrong there, and drops the batch: the
    loop would wait until its timeout.
    """
    try:
        _TrialPickler(io.BytesIO()).dump(batch)
    except Exception as error:  # pickling fails with many kinds of errors
        reason = f"{type(error).__name__}: {error}"
        cure = "return tensors, arrays and other objects that pickle takes, or use num_workers=0"
        raise TypeError(f"a batch cannot be sent from a worker ({reason}): {cure}") from error
