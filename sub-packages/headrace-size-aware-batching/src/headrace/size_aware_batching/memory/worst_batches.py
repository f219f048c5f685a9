"""The most expensive batches of an epoch, run before training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headrace.size_aware_batching._shared.ranks import Mesh, Ranks
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.memory.data_parallel import connect, unsynchronized
from headrace.size_aware_batching.memory.device import free_memory, out_of_memory
from headrace.size_aware_batching.memory.peaks import describe
from headrace.size_aware_batching.memory.snapshot import Optimizers, as_optimizers, unchanged
from headrace.size_aware_batching.planning.gather import gather_json
from headrace.size_aware_batching.planning.pieces import as_indices, sizes_of
from headrace.size_aware_batching.sizes.read import effective_sizes


def run_worst_batches(
    sampler: DistributedSizeAwareBatchSampler,
    batches_of: Callable[[Any], Any],
    step: Callable[[Any], object],
    *,
    model: torch.nn.Module,
    optimizer: Optimizers,
    k: int = 4,
    mesh: Any = None,
) -> None:
    """Run the most expensive batches of the epoch before training, so that it runs out of memory now or not at all.

    Weights, optimizer state and random states are restored afterwards. Every rank runs the same batches, and all ranks
    raise if one runs out; meanwhile a ``DistributedDataParallel`` does not reduce its gradients. If the optimizer has
    no state yet, the most expensive batch runs twice, because the first step allocates that state at its end.

    Args:
        sampler: The training sampler.
        batches_of: Builds a batch of the samples with these indices, int64, shape ``[n]``, as for `fit_budget`; of
            a batch that has pieces (``oversize="split"``), of the list that the sampler yields.
        step: A training step with a batch, as for `fit_budget`.
        model: The model that ``step`` trains.
        optimizer: The optimizer of ``step``, or several.
        k: Number of batches.
        mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, if these are not all ranks.

    Raises:
        torch.OutOfMemoryError: If a batch does not fit, with its sizes.

    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    >>> sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5)
    >>> def step(batch):
    ...     layer(batch).sum().backward()
    ...     optimizer.step()
    >>> before = layer.weight.clone()
    >>> run_worst_batches(sampler, lambda i: torch.ones(len(i), 4), step, model=layer, optimizer=optimizer)
    >>> torch.equal(layer.weight, before)
    True
    """
    mesh = Ranks(mesh=mesh).mesh  # checked
    connect(model)
    with unchanged(model, optimizer), unsynchronized(model):
        for number, batch in with_optimizer_state(sampler.worst_batches(k), optimizer):
            indices = as_indices(batch)
            failed = out_of_memory(partial(lambda own: step(batches_of(own)), indices))
            raise_if_out_of_memory(sampler, batch, number, failed, mesh)
    free_memory()


def with_optimizer_state(worst: list[list[Any]], optimizer: Optimizers) -> list[tuple[int, list[Any]]]:
    """Number the batches from 1; the worst one comes twice where its first step is the one that makes the state."""
    numbered = list(enumerate(worst, 1))
    return numbered if all(each.state for each in as_optimizers(optimizer)) else [*numbered[:1], *numbered]


def raise_if_out_of_memory(
    sampler: DistributedSizeAwareBatchSampler,
    batch: list[Any],
    number: int,
    failed: str | None,
    mesh: Mesh | None = None,
) -> None:
    """Raise on every rank if a batch ran out of memory on any rank; ``failed`` is this rank's error, or None."""
    answers = gather_json(failed, mesh)
    if all(answer is None for answer in answers):
        return
    free_memory()
    rank = next(rank for rank, answer in enumerate(answers) if answer is not None)
    counted = effective_sizes(sizes_of(batch, sampler.sizes), sampler.extra_per_sample, sampler.max_length)
    sizes = describe(counted)
    shown = f"{batch[:10]}{' ...' if len(batch) > 10 else ''}"
    raise torch.OutOfMemoryError(
        f"the epoch would run out of memory: batch {number} of its most expensive ones, "
        f"{sizes}, does not fit on rank {rank}: lower the budget, or measure with fit_budget. "
        f"Samples {shown}. {answers[rank]}"
    )
