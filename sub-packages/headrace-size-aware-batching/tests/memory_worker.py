"""One of two ranks that run out of memory."""

import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fails_backward import fails_backward
from lightning.fabric import Fabric
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from headrace.size_aware_batching import (
    BatchMemoryModel,
    DistributedSizeAwareBatchSampler,
    OOMGuard,
    SimulatedMemory,
    fit_budget,
    fit_shapes,
    run_worst_batches,
)

WIDTH, STEPS = 8, 3


class Training:
    """A model in DistributedDataParallel, and its data of this rank."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers).double())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        data = torch.Generator().manual_seed(rank)
        self.batches = [torch.randn(6 + 2 * rank, WIDTH, dtype=torch.float64, generator=data) for _ in range(STEPS)]

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def unsplit(rank: int, reduction: str) -> torch.Tensor:
    """Train as usual; the reference."""
    training = Training(rank)
    for batch in training.batches:
        training.optimizer.zero_grad()
        errors = training.model(batch).square()
        # DistributedDataParallel averages over two ranks of 6 and 8 samples.
        loss = errors.mean() if reduction == "mean" else errors.sum() * 2 / 14
        torch.autograd.backward(loss)
        training.optimizer.step()
    return training.parameters()


def guarded(rank: int, reduction: Any, phase: str, step: int, failing: bool) -> dict[str, Any]:
    """Train with a guard while one step runs out of memory."""
    training = Training(rank)
    update, updates = training.optimizer.step, [0]

    def interrupted() -> Any:
        updates[0] += 1
        if phase == "optimizer" and failing and updates[0] == step + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return update()

    training.optimizer.step = interrupted  # type: ignore[assignment, method-assign]  # fails on purpose
    with OOMGuard(training.model, training.optimizer, reduction=reduction, cost=lambda _: 1.0, budget=9.0) as guard:

        def loss_of(part: torch.Tensor) -> torch.Tensor:
            fails = failing and guard.steps == step and len(part) > 2
            if fails and phase == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            hidden = training.model(part)
            errors = (fails_backward(hidden) if fails and phase == "backward" else hidden).square()
            found: torch.Tensor = errors.mean() if reduction == "mean" else errors.sum()
            return found * 2 / 14 if reduction == "scaled" else found

        for batch in training.batches:
            guard.budget = 9.0
            guard.step(batch, loss_of)
    wanted = unsplit(rank, reduction)
    found = training.parameters()
    return {
        "bits": found.tolist(),
        "error": float(((found - wanted).abs() / wanted.abs().max()).max()),
        "events": [event.phase for event in guard.events],
    }


def accumulated(rank: int, guarded: bool) -> list[float]:
    """Train steps of two batches each, while the second rank runs out in the second batch of the second step."""
    training = Training(rank)
    groups = [[training.batches[step], training.batches[step - 1][:3]] for step in range(STEPS)]
    if not guarded:
        for first, second in groups:
            training.optimizer.zero_grad()
            with training.model.no_sync():
                torch.autograd.backward(training.model(first).square().mean() / 2)
            torch.autograd.backward(training.model(second).square().mean() / 2)
            training.optimizer.step()
        return training.parameters().tolist()

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        if rank == 1 and guard.steps == 1 and len(part) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: torch.Tensor = training.model(part).square().mean()
        return found

    with OOMGuard(training.model, training.optimizer) as guard:
        for group in groups:
            guard.accumulated_step(group, loss_of)
    if len(guard.events) != rank:
        raise ValueError(f"rank {rank} has the events {guard.events}")
    return training.parameters().tolist()


def wrapped(rank: int, wrap: str) -> dict[str, Any]:
    """Train what holds a DistributedDataParallel, while the second rank runs out of memory in its second step."""
    training = Training(rank)
    model: Any = training.model
    if wrap == "compiled":
        model = torch.compile(training.model, backend="eager")
    elif wrap == "inside":
        model = torch.nn.Sequential(torch.nn.Identity(), training.model)
    elif wrap == "fabric":
        os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp")
        fabric.launch()
        model = fabric.setup_module(training.model.module)
        training.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    with OOMGuard(model, training.optimizer) as guard:

        def loss_of(part: torch.Tensor) -> torch.Tensor:
            if rank == 1 and guard.steps == 1 and len(part) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            found: torch.Tensor = model(part).square().mean()
            return found

        for batch in training.batches:
            guard.step(batch, loss_of)
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    wanted = unsplit(rank, "mean")
    error = float(((found - wanted).abs() / wanted.abs().max()).max())
    return {"bits": found.tolist(), "error": error, "events": len(guard.events)}


def repeated(rank: int) -> dict[str, Any]:
    """Let the second rank run out in two steps of twelve; return the budget after each, and the parts of each."""
    training = Training(rank)
    parts = [0] * 12
    budgets = []
    with OOMGuard(
        training.model, training.optimizer, cost=lambda part: 1.0 * len(part) / (3 + rank), window=4
    ) as guard:

        def loss_of(part: torch.Tensor) -> torch.Tensor:
            if rank == 1 and guard.steps in (1, 3) and len(part) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            parts[guard.steps] += 1
            found: torch.Tensor = training.model(part).square().mean()
            return found

        for step in range(12):
            guard.step(training.batches[step % STEPS], loss_of)
            budgets.append(guard.budget)
    return {"budgets": budgets, "parts": parts, "split": guard.report().split_steps, "bits": str(training.parameters())}


def alone(rank: int, place: str) -> list[str]:
    """Let the second rank fail in a place where the first one does not; return what this rank is told, and its loss."""
    training, told = Training(rank), []
    faults = {"clip once": 1, "clip": 9}

    def failing(where: str) -> None:
        if rank == 1 and place == where:
            raise ValueError(f"the {where} is wrong")

    def clip(*arguments: Any, **options: Any) -> Any:
        if rank == 1 and faults.get(place, 0) > 0:
            faults[place] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clip_grad_norm_(*arguments, **options)

    def split(part: torch.Tensor) -> list[torch.Tensor]:
        failing("split")
        return list(torch.split(part, 2)) if len(part) > 2 else [part]

    def cost(_: Any) -> float:
        failing("cost")
        return 1.0

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        failing("loss")
        if rank == 1 and place == "split" and len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: torch.Tensor = training.model(part).square().mean()
        return found

    torch.nn.utils.clip_grad_norm_ = clip
    options: dict[str, Any] = {"split": split, "length": len, "cost": cost, "clip_norm": 0.1}
    try:
        with OOMGuard(training.model, training.optimizer, **options) as guard:
            for batch in training.batches:
                guard.step(batch, loss_of)
    except (RuntimeError, ValueError) as error:
        told.append(f"{type(error).__name__}: {error}")
    finally:
        torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    return [*told, str(training.parameters().tolist())]


def communicating(rank: int) -> list[str]:
    """Call a collective in the loss; the second rank runs out of memory before it."""
    training, told = Training(rank), []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.zeros(1)),
        dist.barrier,
        lambda: dist.all_gather_object([None, None], rank),
        lambda: dist.broadcast(torch.zeros(1), 0),
    ]
    for call in calls:

        def loss_of(part: torch.Tensor, call: Callable[[], Any] = call) -> torch.Tensor:
            if rank == 1 and len(part) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            call()
            found: torch.Tensor = training.model(part).square().mean()
            return found

        try:
            with OOMGuard(training.model, training.optimizer) as guard:
                guard.step(training.batches[0], loss_of)
        except RuntimeError as error:
            told.append(str(error))
        call()  # outside the guard it works
    return told


def run_worst() -> str:
    """Run the worst batches of a model that holds a DistributedDataParallel; one rank does not call its step."""
    training = Training(0)
    model = torch.nn.Sequential(training.model)
    sampler = DistributedSizeAwareBatchSampler(range(1, 9), 20)

    def step(batch: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        torch.autograd.backward(model(batch).square().mean())
        training.optimizer.step()

    try:
        run_worst_batches(
            sampler,
            lambda indices: torch.ones(len(indices), WIDTH, dtype=torch.float64),
            step,
            model=model,
            optimizer=training.optimizer,
        )
    except torch.OutOfMemoryError as error:
        return str(error)
    return "nothing"


def refused() -> dict[str, str]:
    """What the guard says about models whose ranks it could not keep equal."""

    def layer() -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    hooked = DistributedDataParallel(layer())
    hooked.register_comm_hook(None, allreduce_hook)
    models = {
        "several": torch.nn.Sequential(DistributedDataParallel(layer()), DistributedDataParallel(layer())),
        "none": layer(),
        "outside": torch.nn.Sequential(layer(), DistributedDataParallel(layer())),
        "static": DistributedDataParallel(layer(), static_graph=True),
        "hook": hooked,
    }
    found = {}
    for name, model in models.items():
        try:
            OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    try:
        run_worst_batches(
            DistributedSizeAwareBatchSampler(range(1, 9), 20),
            list,
            lambda _: None,
            model=models["static"],
            optimizer=torch.optim.SGD(models["static"].parameters(), lr=0.1),
        )
    except ValueError as error:
        found["static, measured"] = str(error)
    return found


def lost(rank: int) -> str:
    """Give the second rank a sample that never fits; return what this rank is told."""
    training = Training(rank)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        if rank == 1 and (part == training.batches[0][3]).all(dim=1).any():
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: torch.Tensor = training.model(part).square().mean()
        return found

    with OOMGuard(training.model, training.optimizer) as guard:
        try:
            guard.step(training.batches[0], loss_of)
        except torch.OutOfMemoryError as error:
            return str(error)
    return "nothing"


def budgets(rank: int, path: str) -> dict[str, Any]:
    """Fit a budget where the second rank has less memory and needs more; run a batch that only it cannot."""
    lengths = np.random.default_rng(0).integers(4, 60, 400)
    training = Training(0)

    def step(batch: torch.Tensor) -> None:
        steps[0] += 1
        training.optimizer.zero_grad()
        torch.autograd.backward(training.model(batch).square().mean())
        training.optimizer.step()

    def batches_of(indices: Any) -> torch.Tensor:
        extra = rank * len(indices)
        return torch.ones(len(indices) * int(lengths[indices].max()) + extra, WIDTH, dtype=torch.float64)

    both = {"model": training.model, "optimizer": training.optimizer}
    reduced: list[int] = []  # steps before each reduction
    steps = [0]
    all_reduce = dist.all_reduce

    def counted(*arguments: Any, **options: Any) -> Any:
        reduced.append(steps[0])
        return all_reduce(*arguments, **options)

    dist.all_reduce = counted
    with SimulatedMemory(limit=8_000_000 - 2_000_000 * rank) as device:
        found = fit_budget(step, batches_of, lengths, device, memory="allocated", **both)  # type: ignore[arg-type]  # a dict of both
        dist.all_reduce = all_reduce
        measured = fit_shapes(step, batches_of, lengths, device, found, shapes=4, **both)  # type: ignore[arg-type]  # a dict of both
    found.save(path)
    moved = BatchMemoryModel.load(path, SimulatedMemory(limit=16_000_000 - 2_000_000 * rank)).capacity
    sampler = DistributedSizeAwareBatchSampler(lengths, found.budget(), cost=found.cost(), strategy="bucketed")
    told = "nothing"
    with SimulatedMemory(limit=8_000_000 if rank == 0 else 1_000_000):
        try:
            run_worst_batches(sampler, batches_of, step, **both)  # type: ignore[arg-type]  # a dict of both
        except torch.OutOfMemoryError as error:
            told = str(error)
    figures = {"capacity": found.capacity, "worst": told, "reduced": reduced, "moved": moved}
    return {"cost": repr(found.cost()), "shapes": measured.shapes, "peaks": measured.peaks, **figures}


def main(rank: int, world: int, store: str) -> dict[str, Any]:
    """Run all of it."""
    gc.freeze()  # memory is collected often in here
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    outcomes = {
        f"{reduction} {phase} {step} {who}": guarded(rank, reduction, phase, step, who == "both" or rank == 1)
        for reduction, steps in (("mean", (0, 1)), ("sum", (1,)), ("scaled", (1,)))
        for phase in ("forward", "backward", "optimizer")
        for step in steps
        for who in ("one", "both")
        if reduction == "mean" or phase != "optimizer"
    }
    held = {wrap: wrapped(rank, wrap) for wrap in ("compiled", "inside", "fabric")}
    failed = {place: alone(rank, place) for place in ("loss", "cost", "split", "clip", "clip once", "nowhere")}
    told: dict[str, Any] = {"alone": failed, "lost": lost(rank), "refused": refused(), "told": communicating(rank)}
    told |= {"worst of what holds one": run_worst()}
    told |= {"accumulated": [accumulated(rank, guarded) for guarded in (True, False)]}
    return {"guard": outcomes, "wrapped": held, "repeated": repeated(rank), **told, **budgets(rank, f"{store}.json")}
