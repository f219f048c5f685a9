"""One of several ranks of a model that FSDP2 shards: all split their batches, or one runs out of memory.

``torchrun --standalone --nproc-per-node=2 sharded_worker.py FOLDER KIND WHERE STEP`` runs the latter.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fails_backward import fails_backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from headrace.size_aware_batching import OOMGuard

WIDTH = 8
TIMEOUT = timedelta(seconds=3000)  # of the process group: far longer than a test may take


class Middle(torch.nn.Module):
    """Does nothing, or fails, between two layers that are gathered and reduced each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_fails: Callable[[], None] | None = None
        self.backward_fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_fails is not None:
            self.forward_fails()
        found: torch.Tensor = fails_backward(x) if self.backward_fails else x
        return found


class Training:
    """An FSDP2 model, and its data of this rank."""

    def __init__(self, rank: int, world: int, kind: str = "plain", optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.middle = Middle()
        first = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh())
        last = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))
        self.sharded: Any = torch.nn.Sequential(first, self.middle, last).double()
        mesh = init_device_mesh("cpu", (world,))
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        elif kind == "tensor_parallel":
            meshes = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
            split = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.sharded, meshes["tp"], {"0.0": split})  # and not the others
            mesh, rank = meshes["dp"], rank // 2
        if kind != "plain":
            for layer in (first, last):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.sharded, mesh=mesh)
        self.model: Any = self.sharded
        if kind == "compiled":
            self.model = torch.compile(self.sharded, backend="eager")
        elif kind == "inside":
            self.model = torch.nn.Sequential(torch.nn.Identity(), self.sharded)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01)
        data = torch.Generator().manual_seed(rank)
        self.batches = [torch.randn(6 + 2 * rank, WIDTH, dtype=torch.float64, generator=data) for _ in range(6)]

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(part).square().mean()
        return found

    def weights(self) -> list[float]:
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.model.parameters()]).tolist()


def fails(rank: int, world: int, folder: str, kind: str, where: str, step: int) -> None:
    """Train four steps, in one of which the last rank runs out of memory."""
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    training = Training(rank, world, kind)
    update = training.optimizer.step

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        now = rank == world - 1 and guard.steps == step
        if now:
            Path(folder, "failed").touch()
        training.middle.forward_fails = out_of_memory if now and where == "forward" else None
        training.middle.backward_fails = now and where == "backward"
        training.optimizer.step = out_of_memory if now and where == "optimizer" else update
        return training.loss(part)

    with OOMGuard(training.model, training.optimizer, clip_norm=1.0) as guard:
        for batch in training.batches[:4]:
            guard.step(batch, loss_of)


def planned(rank: int, world: int, kind: str, reduction: Any, clip: float | None) -> dict[str, Any]:
    """Train steps of one and of two batches that only the last rank wants to split, and the same unsplit."""
    weights, losses, parts = [], [], []
    for guarded in (True, False):
        training = Training(rank, world, kind)
        batches = training.batches
        data_rank = rank // 2 if kind == "tensor_parallel" else rank
        batches[1] = batches[1][: 1 + 6 * data_rank]  # the first rank has nothing to split
        groups = [[batches[0]], [batches[1]], [batches[2], batches[3][:3]]]
        totals = [[6 + 2 * each for each in range(world)], [min(1 + 6 * each, 6 + 2 * each) for each in range(world)]]
        totals.append([6 + 2 * each + 3 for each in range(world)])
        calls = 0

        def loss_of(part: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            errors = training.model(part).square()  # noqa: B023 -- in this turn
            if reduction == "mean":
                found: torch.Tensor = errors.mean()
            else:
                found = errors.sum() * (world / sum(totals[guard.steps]) if reduction == "scaled" else 1)  # noqa: B023 -- in this turn
            return found

        with OOMGuard(
            training.model,
            training.optimizer,
            reduction=reduction,
            cost=len,
            budget=2 if guarded and rank == world - 1 else float("inf"),
            clip_norm=clip if guarded else None,
        ) as guard:
            if guarded:
                for group in groups:
                    losses.append(guard.accumulated_step(group, loss_of).item())
                    parts.append(calls)
                    calls = 0
                report = guard.report()
        if not guarded:
            for group, total in zip(groups, totals, strict=True):
                training.optimizer.zero_grad()
                for batch in group:
                    errors = training.model(batch).square()
                    loss = errors.mean() / len(group) if reduction == "mean" else errors.sum() * world / sum(total)
                    torch.autograd.backward(loss)
                if clip is not None and kind == "tensor_parallel":  # torch's refuses parameters of two meshes
                    gradients: list[Any] = [parameter.grad for parameter in training.model.parameters()]
                    norm = sum(each.full_tensor().square().sum() for each in gradients) ** 0.5
                    for each in gradients:
                        each.to_local().mul_(min(1.0, clip / (norm.item() + 1e-6)))
                elif clip is not None:
                    torch.nn.utils.clip_grad_norm_(training.model.parameters(), clip)
                training.optimizer.step()
        weights.append(training.weights())
    guarded_weights, wanted = torch.tensor(weights, dtype=torch.float64)
    error = float((guarded_weights - wanted).abs().max() / wanted.abs().max())
    return {"error": error, "weights": weights[0], "losses": losses, "parts": parts, "split": report.split_steps}


def masked(rank: int, world: int) -> dict[str, Any]:
    """Split a batch whose second half has no targets on the last rank; a mean over none is NaN."""
    weights = []
    for guarded in (True, False):
        training = Training(rank, world)
        batch = training.batches[0]
        mask = (torch.arange(len(batch)) < (len(batch) // 2 if rank == world - 1 else len(batch))).double()

        def loss_of(part: Any) -> torch.Tensor:
            x, mask = part
            found: torch.Tensor = (training.model(x).square()[:, 0] * mask).sum() / mask.sum()  # noqa: B023 -- in this turn
            return found

        budget = 2 if guarded else float("inf")
        with OOMGuard(
            training.model,
            training.optimizer,
            count=lambda part: float(part[1].sum()),
            cost=lambda part: len(part[0]),
            budget=budget,
        ) as guard:
            loss = guard.step((batch, mask), loss_of).item()
        weights.append(training.weights())
    split, whole = torch.tensor(weights, dtype=torch.float64)
    error = float((split - whole).abs().max())
    return {"error": error, "weights": weights[0], "loss": loss}


def messages(rank: int, world: int) -> dict[str, str]:
    """Run out of memory in a loss that cannot be described, and before the first pass; return what the guard says."""
    training = Training(rank, world)
    found = {}

    def out_of_memory(part: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fails_then(part: torch.Tensor) -> Any:
        if guard.phase == "forward":
            raise ValueError("the size is unknown")
        return len(part)

    def in_ones(part: torch.Tensor) -> list[torch.Tensor]:
        return list(part[:, None])

    def no_collective(part: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)

    cases: dict[str, dict[str, Any]] = {
        "length": {"length": fails_then},
        "cost": {"cost": fails_then},
        "sizes_of": {"sizes_of": fails_then},
        "count": {"count": out_of_memory, "reduction": "sum"},
        "budget": {"split": out_of_memory, "length": len, "cost": len, "budget": 2},
        "parts": {"split": out_of_memory if rank == 0 else in_ones, "length": len, "cost": len},
    }
    cases["parts"]["budget"] = 2 if rank == 1 else float("inf")  # the first rank splits because the second does
    for name, options in cases.items():
        with OOMGuard(training.model, training.optimizer, **options) as guard:
            try:
                guard.step(training.batches[0], no_collective if name == "parts" else out_of_memory)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def refused(rank: int, world: int) -> list[str]:
    """Return what the guard says about models that it cannot watch, and about ranks that differ."""
    found = []
    outside = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fully_shard(outside[1], mesh=init_device_mesh("cpu", (world,)))
    some = torch.nn.Linear(2, 2)
    fully_shard(some, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("pipeline", "shard"))["shard"])
    for model in (outside, some):
        try:
            OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except (TypeError, ValueError) as error:
            found.append(str(error))
    training = Training(rank, world)
    try:
        with OOMGuard(training.model, training.optimizer) as guard:
            guard.accumulated_step(training.batches[: 1 + rank], training.loss)
    except (RuntimeError, ValueError) as error:
        found.append(str(error))
    return found


def in_group(task: Callable[..., Any], arguments: tuple[Any, ...], rank: int, world: int, store: str) -> Any:
    """Call a task of this module in a process group."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
    return task(rank, world, *arguments)


if __name__ == "__main__":
    folder, kind, where, step = sys.argv[1:]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    fails(dist.get_rank(), dist.get_world_size(), folder, kind, where, int(step))
