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


def clip_gradients(model: torch.nn.Module, max_norm: float) -> None:
    """Clip the gradients of an FSDP2 model; torch's ``clip_grad_norm_`` refuses parameters of several meshes.

    They have several where only some layers are tensor-parallel. All ranks call it together.
    """
    meshes: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient: Any = parameter.grad
            meshes.setdefault(gradient.device_mesh, []).append(parameter)
    norms: list[Any] = [
        torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]) for each in meshes.values()
    ]
    norm = torch.nn.utils.get_total_norm([each.full_tensor() for each in norms])
    for parameters in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
