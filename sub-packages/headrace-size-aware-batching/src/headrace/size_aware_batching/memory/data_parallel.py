"""The DistributedDataParallel that a model is or holds: compiled, in Fabric's wrapper, or in a module of the user's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def all_data_parallel(model: torch.nn.Module | None) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel in a model.

    Raises:
        ValueError: If one has ``static_graph=True``: it fails where a step leaves out its collectives.
    """
    found = [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if any(one.static_graph for one in found):
        raise ValueError(
            "DistributedDataParallel must not have static_graph=True, because it needs the same calls in every step"
        )
    return found


def the_data_parallel(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that trains a model; None in a single process.

    Raises:
        ValueError: If the ranks could not be kept equal by reducing the gradients of its parameters.
    """
    found = all_data_parallel(model)
    if not found:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1:
            raise ValueError(
                f"model must hold a DistributedDataParallel on {ranks} ranks, got {type(model).__name__}: pass the "
                "wrapped model"
            )
        return None
    if len(found) > 1:
        raise ValueError(
            f"model must hold one DistributedDataParallel, got {len(found)}: wrap all that is trained together in one"
        )
    inside = set(found[0].parameters())
    outside = [name for name, one in model.named_parameters() if one.requires_grad and one not in inside]
    if outside:
        raise ValueError(
            f"every trained parameter must be in the model's DistributedDataParallel, got {outside[0]} outside it"
        )
    if hooks := found[0]._comm_hooks:
        raise ValueError(
            "model's DistributedDataParallel must have no communication hook, because the guard reduces the gradients "
            f"itself, got {getattr(hooks[0][0], '__name__', hooks[0][0])}"
        )
    return found[0]


def connect(model: torch.nn.Module | None) -> None:
    """Let the ranks of a DistributedDataParallel connect: NCCL takes memory for it in the first reduction.

    A collective; steps that are measured leave out their reductions.
    """
    for one in all_data_parallel(model):
        device = next(one.parameters()).device
        dist.all_reduce(torch.zeros(1, device=device), group=one.process_group)


@contextmanager
def unsynchronized(model: torch.nn.Module | None) -> Iterator[None]:
    """Keep a model from any collective of DistributedDataParallel; does nothing with another model.

    Raises:
        ValueError: As in `all_data_parallel`.
    """
    with ExitStack() as stack:
        for one in all_data_parallel(model):
            stack.callback(setattr, one, "require_forward_param_sync", one.require_forward_param_sync)
            one.require_forward_param_sync = False
            stack.enter_context(one.no_sync())
        yield
