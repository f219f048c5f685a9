"""What data-parallel ranks do together: compare what they are about to read, and make things once for all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.webdatamodule._shared.digest import digest64
from headrace.webdatamodule._shared.ranks import Mesh
from headrace.webdatamodule.loading.trainer_mesh import TrainerMesh

_Result = TypeVar("_Result")
_MOST_SHOWN = 160  # characters of a value that differs
_PATIENCE = 60.0  # seconds until a rank says what it waits for
_logger = logging.getLogger(__name__)


class RankMismatchError(RuntimeError):
    """The ranks would read different epochs, data or numbers of batches."""


def is_distributed() -> bool:
    """Whether there is a process group of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def batches_before_comparing(*, in_trainer: bool, evaluates: bool) -> int | None:
    """How many batches of an epoch a loader delivers before its ranks compare their plans; None for no comparison.

    They meet where all of them are sure to be. A trainer runs its loops on all ranks, so before the first batch. In a
    loop of one's own before the second: who looks at a batch on one rank alone takes no second one. A thread that reads
    ahead would take the second one while the loop talks to the other ranks, so there it is before the first. A loop
    of one's own that evaluates may run on one rank.
    """
    if in_trainer:
        return 0
    if evaluates:
        return None
    return 1 if threading.current_thread() is threading.main_thread() else 0


def compare_plans(plan: Mapping[str, Any], name: str, num_replicas: int, mesh: Mesh | None = None) -> None:
    """Compare a plan, {what it is: value}, over the `num_replicas` ranks of a loader; all of them have to call this.

    These are the ranks of a `DeviceMesh`, else all of the process group. Others are not known to be there: then, and
    for a single one, nothing is compared.

    It is one exchange of a number. Without it, ranks that differ would wait for one another for ever, or would pair
    steps of different epochs silently. Every rank raises, naming what differs.
    """
    if num_replicas == 1 or not is_distributed():
        return
    of_mesh = getattr(mesh, "get_group", None)
    if of_mesh is None and num_replicas != dist.get_world_size() and not isinstance(mesh, TrainerMesh):
        return
    group = None if of_mesh is None else of_mesh()
    texts = {what: str(value) for what, value in plan.items()}
    digest = digest64(repr(sorted(texts.items())).encode("utf-8", "surrogatepass"))
    own = torch.tensor(digest >> 1, dtype=torch.int64, device=_device(group))
    numbers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    everyone: list[Any] = [None] * len(numbers)
    cure = "iterate it on every rank, or take one batch at most where one rank looks at it"
    what = f"begin epoch {plan.get('epoch')}"
    if "changed" in plan:  # in the middle of the epoch
        what, cure = "make the same change", "call exclude, skip, reshard and reweight on every rank at the same step"
    with waiting(f"the other ranks to {what} of the {name} loader: {cure}"):
        dist.all_gather(numbers, own, group=group)
        if len({int(number) for number in numbers}) == 1:
            return
        dist.all_gather_object(everyone, texts, group=group)
    message = "; ".join(
        f"{what}: " + ", ".join(f"rank {rank} has {_short(its.get(what, 'none'))}" for rank, its in enumerate(everyone))
        for what in dict.fromkeys(what for its in everyone for what in its)
        if len({its.get(what) for its in everyone}) > 1
    )
    cure = (
        "give every rank the same shards, sizes, options and seed, resume all of them from one checkpoint, and call "
        "exclude, skip, reshard and reweight on every rank at the same step"
    )
    raise RankMismatchError(f"the ranks differ in what the {name} loader is to deliver: {cure} ({message})")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... of {len(text):,} characters"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Log what this rank waits for, if the block takes longer than a minute."""
    message = f"rank {dist.get_rank()} has waited {_PATIENCE:g} s for {what}"
    timer = threading.Timer(_PATIENCE, _logger.warning, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no thread ends while workers are forked


def on_one_rank(function: Callable[[], _Result]) -> _Result:
    """Call a function on rank 0 and broadcast its result, or its error, as pickles; all ranks have to call this."""
    if not is_distributed():
        return function()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = function()
        except Exception as error:
            found[1] = error
    others = "the other ranks, which need the sizes that it evaluated: make the loader on every rank"
    with waiting("rank 0, which evaluates the sizes of all samples" if dist.get_rank() else others):
        dist.broadcast_object_list(found, src=0, device=_device())
    if found[1] is not None:
        raise found[1]
    result: _Result = found[0]
    return result


def _device(group: Any = None) -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
