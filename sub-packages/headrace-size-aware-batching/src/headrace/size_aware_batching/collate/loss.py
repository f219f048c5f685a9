"""Exact gradients of a step whose batches have different numbers of targets.

Batches that fill a budget differ in their number of targets. With a mean per batch, a target in a small batch weighs
more than a target in a large one: the mean of these means, over ranks and accumulated batches, is not the mean over all
targets. Instead, divide sums by the total number of targets.
"""

from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from headrace.size_aware_batching._shared.ranks import Ranks, process_group
from headrace.size_aware_batching.memory.parts import refuse_in_part


def global_num_tokens(
    labels: Iterable[torch.Tensor | int],
    *,
    ignore_index: int = -100,
    mesh: Any = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Count the targets of one optimizer step, over all accumulated batches and all ranks.

    With a process group this is a collective: every data-parallel rank must call it once for each optimizer step, even
    if its batches have no targets.

    Args:
        labels: For each batch that this rank accumulates in the step, its labels (an integer tensor of any shape) or
            its number of targets. Pass the labels that enter the loss: a causal language model does not use the first
            label of each padded row, so pass ``labels[..., 1:]``; packed labels with a separator already have -100
            there.
        ignore_index: Label that is not a target, as for ``torch.nn.functional.cross_entropy``.
        mesh: A 1-D ``DeviceMesh`` of the data-parallel ranks, if other ranks share their data; None: all ranks.
        device: Device of the result and of the collective. None: the device of the first labels, or the CPU. NCCL
            needs a CUDA device.

    Returns:
        The number of targets, a 0-d int64 tensor; the call does not wait for the device.

    Raises:
        TypeError: If an item is neither a tensor of integers nor an int, or ``mesh`` has no ``get_group()``.
        ValueError: If a number of targets is negative, or ``labels`` is an exhausted iterator.
        RuntimeError: In the loss of an `OOMGuard` or ``OOMRescue``, which may see only a part of the batch.

    >>> global_num_tokens([torch.tensor([-100, 4, 2]), torch.tensor([-100, 7])])
    tensor(3)
    >>> global_num_tokens([20, 0, 11])
    tensor(31)
    """
    refuse_in_part("global_num_tokens")
    if isinstance(labels, torch.Tensor):
        labels = [labels]
    counts: list[torch.Tensor | int] = []
    for batch, label in enumerate(labels):
        if isinstance(label, torch.Tensor) and not (label.is_floating_point() or label.is_complex()):
            device = label.device if device is None else device
            counts.append((label != ignore_index).sum())
        elif isinstance(label, Integral) and not isinstance(label, bool):
            if label < 0:
                raise ValueError(f"labels must hold counts >= 0, got {int(label)} at {batch}: give numbers of targets")
            counts.append(int(label))
        else:
            found = f"a tensor of {label.dtype}" if isinstance(label, torch.Tensor) else type(label).__name__
            raise TypeError(f"labels must hold tensors of integers or ints, got {found} at {batch}")
    if not counts and isinstance(labels, Iterator):
        raise ValueError(
            "labels must hold a batch, got an iterator at its end: it can be read once only, so make it anew for each "
            "step; a rank without a batch gives []"
        )
    total = torch.zeros((), dtype=torch.int64, device=device)
    for count in counts:
        total += count if isinstance(count, int) else count.to(total.device)
    if _world_size(mesh) == 1:
        return total
    if mesh is not None and not callable(getattr(mesh, "get_group", None)):
        raise TypeError(f"mesh must have get_group(), got {type(mesh).__name__}: give a 1-D DeviceMesh")
    dist.all_reduce(total, group=None if mesh is None else mesh.get_group())
    return total


def token_weighted_loss(loss: torch.Tensor, num_tokens: torch.Tensor | int, *, mesh: Any = None) -> torch.Tensor:
    """Scale the losses of one batch so that the optimizer step follows the mean over all of its targets.

    Call ``backward`` on the result for each accumulated batch, and do not divide it again by the number of batches. The
    result is the sum of the losses, divided by ``num_tokens`` and multiplied by the number of data-parallel ranks,
    because ``DistributedDataParallel`` and FSDP divide gradients by that number. It is not the mean loss of the batch.
    To log the mean over all targets, add the results of the accumulated batches and average over the ranks.

    Args:
        loss: The losses of a batch: one per target, of any shape, or their sum (``cross_entropy(...,
            reduction="sum")``), but not their mean. It may be empty or 0.
        num_tokens: The number of targets in the full step: see `global_num_tokens`.
        mesh: The ``mesh`` of `global_num_tokens`, if any.

    Returns:
        The loss for ``backward``, a 0-d tensor; 0 if no rank has a target.

    Raises:
        TypeError: If ``loss`` is not a tensor of floating-point numbers.
        ValueError: If ``num_tokens`` is not one number, or negative. The sign of a tensor on a device is not checked,
            to avoid a synchronisation.

    >>> logits = torch.zeros(3, 5, requires_grad=True)  # two batches, of two targets and of one
    >>> labels = torch.tensor([4, 0, 2])
    >>> total = global_num_tokens([labels[:2], labels[2:]])
    >>> for part in (slice(0, 2), slice(2, 3)):
    ...     losses = torch.nn.functional.cross_entropy(logits[part], labels[part], reduction="none")
    ...     token_weighted_loss(losses, total).backward()
    >>> reference = torch.zeros(3, 5, requires_grad=True)
    >>> torch.nn.functional.cross_entropy(reference, labels).backward()
    >>> torch.equal(logits.grad, reference.grad)
    True
    """
    given: Any = loss
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        found = f"a tensor of {given.dtype}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"loss must be a tensor of floating-point numbers, got {found}")
    total = torch.as_tensor(num_tokens)
    if total.numel() != 1:
        raise ValueError(f"num_tokens must be one number, got a tensor of shape {list(total.shape)}: add them up")
    if total.device.type == "cpu" and total.item() < 0:
        raise ValueError(f"num_tokens must be a number >= 0, got {total.item()}: give the result of global_num_tokens")
    total = total.to(loss.device).reshape(())
    return loss.sum() * _world_size(mesh) * (total > 0) / total.clamp(min=1)


def _world_size(mesh: Any) -> int:
    """Return the number of ranks that reduce gradients: 1 without a process group, even under torchrun."""
    if mesh is not None:
        return Ranks(mesh=mesh).world_size()
    return (process_group() or (1, 0))[0]
