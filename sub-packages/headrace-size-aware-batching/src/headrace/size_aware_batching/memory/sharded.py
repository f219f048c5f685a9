"""Models that FSDP2 (``fully_shard``) shards: forward and backward are full of collectives of all their ranks."""

from typing import Any

import torch
import torch.distributed as dist


def is_fully_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 (``fully_shard``) shards a model, or a part of it."""
    return any("FSDPModule" in {base.__name__ for base in type(module).__mro__} for module in model.modules())


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
