"""One of two ranks with unequal targets."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import global_num_tokens, token_weighted_loss

# Targets of each accumulated batch, on each of two ranks.
STEPS = {
    "one batch": ([5], [3]),
    "accumulated": ([40, 3, 11], [2, 9, 1]),
    "a rank without targets": ([0], [6]),
    "a rank without targets, accumulated": ([0, 0], [7, 2]),
    "an empty batch among others": ([8, 0], [0, 5]),
    "no targets at all": ([0, 0], [0, 0]),
}
WIDTH, CLASSES, IGNORED = 6, 9, 2


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(hidden, torch.nn.Tanh(), torch.nn.Linear(WIDTH, CLASSES)).double()


def batch(seed: int, targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, two of which are no targets."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (targets + IGNORED,), generator=generator)
    labels[:IGNORED] = -100
    return torch.rand(targets + IGNORED, WIDTH, generator=generator, dtype=torch.float64), labels


def batches(step: tuple[list[int], list[int]], rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(100 * rank + number, targets) for number, targets in enumerate(step[rank])]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def accumulate(model: Any, own: list[tuple[torch.Tensor, torch.Tensor]], reduction: str) -> float:
    """What a training loop does for a step; return the sum of what it called backward on."""
    total, losses = global_num_tokens([labels for _, labels in own]), 0.0
    for number, (tokens, labels) in enumerate(own):
        more = number < len(own) - 1 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if more else contextlib.nullcontext():
            loss = token_weighted_loss(cross_entropy(model(tokens), labels, reduction=reduction), total)
            torch.autograd.backward(loss)
        losses += float(loss.detach())
    return losses


def main(rank: int, world: int, store: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for name, step in STEPS.items():
        for reduction in ("sum", "none"):
            model = DistributedDataParallel(network())
            losses = torch.tensor(accumulate(model, batches(step, rank), reduction))
            dist.all_reduce(losses)
            found[f"{name}, {reduction}"] = (gradient(model).tolist(), float(losses) / 2)
    both: Any = init_device_mesh("cpu", (2,))
    shared: Any = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]  # one batch for two ranks
    for name, mesh in (("both", both), ("shared", shared)):
        total = global_num_tokens([2 + rank, 10], mesh=mesh)
        found[name] = (int(total), float(token_weighted_loss(torch.ones(()), total, mesh=mesh)))
    return found
