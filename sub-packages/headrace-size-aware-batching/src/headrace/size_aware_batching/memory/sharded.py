"""Ranks that train one FSDP2 model: if one fails, all raise its error instead of waiting for it forever.

Forward and backward are full of collectives, and a rank that has failed does not join them. It writes its error to the
store of the process group. A thread of each rank polls that store. Then:

- On the CPU (gloo, whose collectives cannot be aborted) a rank waits for a collective with short timeouts, again and
  again, and raises as soon as another rank has failed. A reduce-scatter cannot be waited for with a timeout, so a small
  all-reduce comes before it.
- On a GPU (NCCL, where the device waits and not the host) the thread aborts the process groups. An aborted collective
  returns without an error and with part of its result, so each step ends with a check.
- A rank that waits where neither reaches it, such as in a functional collective on the CPU, ends its process.
"""

import faulthandler
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

_POLL = 0.2  # seconds between two looks at the store
_ALL_KNOW = 5.0  # seconds that a failed rank waits until all know of it: the store may end with its process
_GRACE = 60.0  # seconds until a rank that cannot raise ends: torch's own watchdog does so after the group's timeout
_REDUCE_SCATTERS = (
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)
_LOST_PEER = ("closed by peer", "reset by peer", "ncclremoteerror")

FailureKind: TypeAlias = Literal["memory", "lost", "error"]  # its memory, the process of another rank, anything else
Explain: TypeAlias = Callable[[BaseException], tuple[FailureKind, str]]  # and what the other ranks should read of it


@dataclass(frozen=True)
class Failure:
    """What the first rank that failed says."""

    rank: int
    kind: FailureKind
    text: str

    def error(self) -> RuntimeError:
        """Return the error that all ranks raise."""
        text = f"rank {self.rank} {self.text}"
        return torch.OutOfMemoryError(text) if self.kind == "memory" else RuntimeError(text)


class ShardedRanks:
    """All ranks of the process group, which train one model that FSDP2 shards."""

    def __init__(self, model: torch.nn.Module) -> None:
        refuse_unsharded_parameters(model)
        self.device = next(model.parameters()).device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._store: Any = None
        self._failure: Failure | None = None  # of the first rank that failed
        self._error: BaseException | None = None  # what was raised for it here
        self._in_step = False
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the other ranks inside the block; a collective, because the ranks agree on a key of the store."""
        self._failure, self._error, self._ended = None, None, threading.Event()
        key = int(self.agree([secrets.randbits(48) if self.rank == 0 else 0])[0, 0])
        self._store = dist.distributed_c10d.PrefixStore(f"headrace/{key}", dist.distributed_c10d._get_default_store())
        thread = threading.Thread(target=self._watch, args=(self._ended,), name="headrace-watch-ranks", daemon=True)
        thread.start()
        with ExitStack() as stack:
            stack.callback(thread.join, _ALL_KNOW)
            stack.callback(self._ended.set)
            if self.device.type == "cpu":
                _replace(stack, dist.Work, "wait", self._in_turns)
                for name in _REDUCE_SCATTERS:
                    if hasattr(dist.ProcessGroup, name):  # torch's versions differ
                        _replace(stack, dist.ProcessGroup, name, _after_meeting)
            yield

    @contextmanager
    def step(self, explain: Explain) -> Iterator[None]:
        """Let all ranks leave the block together: without an error, or with that of the first rank that failed."""
        self._in_step = True
        try:
            self.check()
            yield
            self.agree([0.0])
        except BaseException as error:
            self.tell(error, explain)
            raise
        finally:
            self._in_step = False

    def tell(self, error: BaseException, explain: Explain) -> None:
        """Tell the other ranks of an error, and raise in its place that of the first rank that failed."""
        if error is self._error:
            return
        if self._failure is None:
            own = Failure(self.rank, *explain(error))
            found = self._ask(lambda: self._store.compare_set("failed", "", json.dumps(asdict(own))))
            self._failure = own if found is None else Failure(**json.loads(found))
        until = time.monotonic() + _ALL_KNOW
        while time.monotonic() < until:
            known = self._ask(lambda: self._store.add("known", 0))
            if known is None or known >= self.world:
                break
            time.sleep(_POLL / 4)
        if self._failure.rank == self.rank and self._failure.kind == "error":
            self._error = error  # as it was raised, with its own type
            return
        self._raise(error)

    def agree(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the values of all ranks, shape ``[world, n]``; raise if one has failed."""
        everyone = torch.zeros(self.world, len(values), dtype=torch.float64, device=self.device)
        everyone[self.rank] = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(everyone)
        found: NDArray[np.float64] = everyone.cpu().numpy()  # the device has done all that was asked of it until here
        self.check()
        return found

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._failure is not None:
            self._raise(None)

    def _raise(self, cause: BaseException | None) -> NoReturn:
        if self._failure is None:
            raise RuntimeError("no rank has failed")
        if self._error is None:
            self._error = self._failure.error()
        raise self._error from cause

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Ask the store; None if it is gone."""
        try:
            return question()
        except RuntimeError:
            return None

    def _in_turns(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``Work.wait`` that raises where another rank has failed."""

        @wraps(wait)
        def wait_in_turns(work: Any, *arguments: Any, **options: Any) -> Any:
            while not arguments and not options and _takes_timeout(work):
                try:
                    return wait(work, timedelta(seconds=_POLL))
                except RuntimeError:
                    if work.is_completed():
                        break  # with an error of its own, or just now
                    self.check()
            return wait(work, *arguments, **options)

        return wait_in_turns

    def _watch(self, ended: threading.Event) -> None:
        """Look for an error of another rank until the block ends; end the process if it cannot be raised."""
        while not ended.wait(_POLL):
            try:
                if not self._store.check(["failed"]):
                    continue
                failure = Failure(**json.loads(self._store.get("failed")))
                self._failure = failure
                self._store.add("known", 1)
                reason = str(failure.error())
            except RuntimeError as error:  # its host has ended, perhaps after the last step
                reason = f"rank {self.rank} cannot reach the store of its process group: {error}"
            break
        else:
            return
        if self._failure is not None and self.device.type != "cpu":
            with suppress(RuntimeError, ValueError):
                dist.distributed_c10d._abort_process_group()  # all groups at once: one by one they wait for one another
        while not ended.wait(_GRACE):
            if self._in_step:
                _end(f"{reason}\nrank {self.rank} waits for it where no error can be raised: its process ends.")


def _replace(stack: ExitStack, owner: type, name: str, change: Callable[[Any], Any]) -> None:
    """Change a method until the stack closes."""
    stack.callback(setattr, owner, name, owner.__dict__[name])  # what getattr returns is no method
    setattr(owner, name, change(getattr(owner, name)))


def _takes_timeout(work: Any) -> bool:
    """Whether a work of gloo can be waited for again after a timeout; of others the timeout ends the connection."""
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def _after_meeting(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that all ranks have reached when it begins."""

    @wraps(collective)
    def after_meeting(group: Any, *arguments: Any, **options: Any) -> Any:
        group.allreduce([torch.zeros(1)]).wait()
        return collective(group, *arguments, **options)

    return after_meeting


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 (``fully_shard``) shards a model, or a part of it."""
    return any("FSDPModule" in {base.__name__ for base in type(module).__mro__} for module in model.modules())


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a collective says that the process of another rank has ended."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST_PEER)


def refuse_unsharded_parameters(model: torch.nn.Module) -> None:
    """Refuse an FSDP2 model with trained parameters that FSDP2 does not reduce, or that not all ranks train."""
    ranks = 0  # beside tensor-parallel parameters there are others, of the data-parallel ranks alone
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            raise ValueError(
                f"every trained parameter must be sharded by fully_shard, got {name} outside it: call fully_shard on "
                "the whole model, too"
            )
        ranks = max(ranks, 0 if mesh is None else mesh.size())
    if ranks != dist.get_world_size():
        raise ValueError(
            f"the mesh of the model must hold all {dist.get_world_size()} ranks of the process group, got {ranks}"
        )


@torch.no_grad()
def clip_sharded(parameters: Sequence[torch.nn.Parameter], most: float) -> None:
    """Clip gradients to a norm over all ranks, as ``clip_grad_norm_`` does.

    Its own collective is a functional one, which nothing can interrupt on the CPU.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(_local(gradient)).double().square() / _copies(gradient)
    dist.all_reduce(squares)
    scale = (most / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(scale.to(local.dtype))


def _copies(gradient: torch.Tensor) -> int:
    """Return how many ranks hold the same part of a gradient."""
    sharded: Any = gradient
    mesh, placements = sharded.device_mesh, enumerate(sharded.placements)
    copies = math.prod(mesh.size(place) for place, each in placements if each.is_replicate())
    return int(copies * dist.get_world_size() // mesh.size())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    sharded: Any = tensor
    local: torch.Tensor = sharded.to_local()
    return local.detach()


def _end(text: str) -> NoReturn:
    """End the process with a message and the stacks of its threads, as torch's watchdog does."""
    with suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(1)
