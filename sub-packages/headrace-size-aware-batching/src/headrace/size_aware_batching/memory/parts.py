"""No collectives while a part of a batch runs: a rank runs as many parts and tries as it needs, the others do not."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

# All of torch.distributed goes through these methods, however it was imported.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier", "gather", "scatter"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
_thread = threading.local()  # other threads may communicate


@contextmanager
def running_part() -> Iterator[None]:
    """Mark this thread as one that runs a part of a batch."""
    _thread.runs_part = True
    try:
        yield
    finally:
        _thread.runs_part = False


def refuse_in_part(name: str) -> None:
    """Raise if this thread runs a part of a batch: ``name`` needs the whole batch, or the other ranks."""
    if getattr(_thread, "runs_part", False):
        raise RuntimeError(
            f"{name} must not run in the loss of a part, because OOMGuard may split the batch on one rank alone: call "
            "it once a step with the whole batch, before guard.step, in Lightning in on_train_batch_start; log with "
            "sync_dist=True in on_train_batch_end, or with on_step=False"
        )


@contextmanager
def refused_collectives() -> Iterator[None]:
    """Let process groups refuse collectives in parts, where the other ranks would wait for ever."""
    with ExitStack() as stack:
        for name in _COLLECTIVES:
            if (method := dist.ProcessGroup.__dict__.get(name)) is not None:  # torch's versions differ
                stack.callback(setattr, dist.ProcessGroup, name, method)
                setattr(dist.ProcessGroup, name, _refusing(name, getattr(dist.ProcessGroup, name)))
        yield


def _refusing(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective)
    def checked(*arguments: Any, **options: Any) -> Any:
        refuse_in_part(f"a collective ({name.strip('_')})")
        return collective(*arguments, **options)

    return checked
