"""A rescued step equals the unsplit one, wherever memory ran out; on one rank and on real ranks."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import memory_worker
import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from headrace.size_aware_batching import (
    OOMGuard,
    PackedCollate,
    PaddedCollate,
    SimulatedMemory,
    global_num_tokens,
    token_weighted_loss,
)
from headrace.size_aware_batching.memory import oom_guard
from headrace.size_aware_batching.memory.split import batch_length, split_batch

WIDTH = 24


def make(seed: int = 0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 96), torch.nn.LayerNorm(96), torch.nn.GELU(), torch.nn.Linear(96, 1)
    ).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **{"foreach": False} | options)


def batches(steps: int = 3, n: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for _ in range(steps)]


def unsplit(clip: float | None = None, n: int = 32) -> list[torch.Tensor]:
    model, optimizer = make()
    for batch in batches(n=n):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def assert_equal(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        error = (parameter.detach() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_a_target_changes_nothing(reduction: Any) -> None:
    model, _ = make()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OOMGuard(model, optimizer, reduction=reduction, count=lambda _: 0, budget=10 * WIDTH) as guard:
        loss = guard.step(batches(1)[0], lambda part: 0 * model(part).sum())
    assert loss.item() == 0
    assert all(map(torch.equal, model.parameters(), before))


def test_a_part_without_a_target_leaves_the_mean_as_it_is() -> None:
    mask = (torch.arange(32) < 16).double()  # the second half has no target, and the mean over none is NaN
    found = []
    for budget in (float("inf"), 20.0 * WIDTH):
        model, optimizer = make()

        def loss_of(part: Any, model: Any = model) -> torch.Tensor:
            x, counts = part
            loss: torch.Tensor = (model(x).square()[:, 0] * counts).sum() / counts.sum()
            return loss

        with OOMGuard(model, optimizer, count=lambda part: float(part[1].sum()), budget=budget) as guard:
            loss = guard.step((batches(1)[0], mask), loss_of)
        found.append([loss, *(p.detach() for p in model.parameters())])
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts)


class Fails:
    """Raises out of memory where a function is called for the given time."""

    def __init__(self, *calls: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.calls, self.count, self.error = calls, 0, error

    def __call__(self) -> None:
        self.count += 1
        if self.count - 1 in self.calls:
            raise self.error("CUDA out of memory")


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, fails: Fails) -> torch.Tensor:
        context.fails = fails
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.fails()
        return gradients[0], None


apply: Any = FailsBackward.apply


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_that_runs_out_of_a_simulated_memory(reduction: Any, clip: float | None) -> None:
    model, optimizer = make()
    data = batches(n=128)
    with SimulatedMemory(limit=300_000), OOMGuard(model, optimizer, reduction=reduction, clip_norm=clip) as guard:
        for batch in data:
            loss = guard.step(batch, lambda part: getattr(model(part).square(), reduction)())
            assert loss.item() > 0
    assert guard.events
    assert {event.phase for event in guard.events} <= {"forward", "backward", "optimizer"}
    assert_equal(model, unsplit(clip, n=128))


def test_losses_that_are_scaled_already_add_up() -> None:
    model, optimizer = make()

    def loss_of(targets: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return token_weighted_loss(model(part).square(), targets)

    with SimulatedMemory(limit=300_000), OOMGuard(model, optimizer, reduction="scaled") as guard:
        for batch in batches(n=128):
            targets = global_num_tokens([len(batch)])
            guard.step(batch, partial(loss_of, targets))
    assert guard.events
    assert_equal(model, unsplit(n=128))


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_running_out_in_forward_and_backward(phase: str, step: int) -> None:
    model, optimizer = make()
    fails = Fails(step, step + 1)  # the whole batch, and one of its halves

    def loss_of(part: torch.Tensor) -> Any:
        if phase == "forward":
            fails()
        hidden = model[:3](part)
        # The last layer has its gradient already when this one fails.
        return model[3](apply(hidden, fails) if phase == "backward" else hidden).square().mean()

    with OOMGuard(model, optimizer) as guard:
        for batch in batches():
            guard.step(batch, loss_of)
    assert [(event.step, event.phase, event.samples) for event in guard.events] == [
        (step, phase, 32),
        (step, phase, 16),
    ]
    assert_equal(model, unsplit())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False, "fused": True}])
@pytest.mark.parametrize("at", [0, 2])
def test_an_update_that_changed_nothing_is_tried_again(at: int, options: dict[str, Any]) -> None:
    model, optimizer = make(**options)
    fails, update = Fails(at), optimizer.step

    def step(*arguments: Any) -> Any:
        fails()
        return update()

    optimizer.step = step
    with OOMGuard(model, optimizer) as guard:
        for batch in batches():
            guard.step(batch, lambda part: model(part).square().mean())
    assert [event.phase for event in guard.events] == ["optimizer"]
    assert_equal(model, unsplit())


def half_updated(optimizer: torch.optim.Optimizer, at: int) -> None:
    """Let one update change some of the parameters and their state, and then run out of memory."""
    update, calls = optimizer.step, [0]

    def step(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 == at:
            group = optimizer.param_groups[0]
            every = group["params"]
            group["params"] = every[:2]
            update()
            group["params"] = every
            raise torch.OutOfMemoryError("CUDA out of memory")
        return update()

    optimizer.step = step  # type: ignore[assignment, method-assign]  # no real step fails half-way here


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False, "fused": True}])
@pytest.mark.parametrize(("at", "copy"), [(0, False), (2, True)])
def test_an_update_that_stopped_half_way_is_taken_back(at: int, copy: bool, options: dict[str, Any]) -> None:
    model, optimizer = make(**options)
    half_updated(optimizer, at)
    with OOMGuard(model, optimizer, copy_weights=copy) as guard:
        for batch in batches():
            guard.step(batch, lambda part: model(part).square().mean())
    assert [(event.step, event.phase) for event in guard.events] == [(at + 1, "optimizer")]
    assert_equal(model, unsplit())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False, "fused": True}])
def test_an_update_that_stopped_half_way_is_never_kept(options: dict[str, Any]) -> None:
    model, optimizer = make(**options)
    half_updated(optimizer, at=1)
    with OOMGuard(model, optimizer) as guard:
        guard.step(batches()[0], lambda part: model(part).square().mean())
        with pytest.raises(torch.OutOfMemoryError, match="the optimizer stopped half-way, set copy_weights=True"):
            guard.step(batches()[1], lambda part: model(part).square().mean())


def test_an_optimizer_that_allocates_its_state_in_a_small_memory() -> None:
    model, optimizer = make()
    failing = Fails(3)
    original = torch.zeros_like

    def zeros_like(*arguments: Any, **options: Any) -> Any:
        failing()
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros_like", zeros_like)  # Adam makes its state with it
        with OOMGuard(model, optimizer) as guard:
            for batch in batches():
                guard.step(batch, lambda part: model(part).square().mean())
    assert len(guard.events) == 1
    assert_equal(model, unsplit())


def test_a_sample_that_does_not_fit_is_named() -> None:
    model, optimizer = make()
    batch = {"x": batches()[0][:7], "index": torch.arange(100, 107)}

    def loss_of(part: dict[str, torch.Tensor]) -> Any:
        if 105 in part["index"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(part["x"]).square().mean()

    before = [p.clone() for p in model.parameters()]
    told = "sample 5 of the batch, index 105 of the dataset, does not fit"
    guard = OOMGuard(model, optimizer, indices=lambda part: part["index"].tolist())
    with guard, pytest.raises(torch.OutOfMemoryError, match=told):
        guard.step(batch, loss_of)
    assert all(map(torch.equal, before, model.parameters()))
    assert guard.events[-1].samples == 1


def test_the_budget_shrinks_at_the_second_event_which_is_logged_with_its_sizes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = make()
    tried = []

    def loss_of(part: torch.Tensor) -> Any:
        tried.append(len(part))
        if len(part) > 20:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return model(part).square().mean()

    caplog.set_level(logging.WARNING, "headrace.size_aware_batching")
    with OOMGuard(model, optimizer, cost=len, sizes_of=lambda part: [WIDTH] * len(part)) as guard:
        for batch in batches():
            guard.step(batch, loss_of)
    assert tried == [32, 16, 16, 32, 16, 16, 16, 16]  # from then on it is split at once
    assert guard.budget == 0.95 * 32
    assert [(event.samples, event.budget) for event in guard.events] == [(32, np.inf), (32, 0.95 * 32)]
    assert "ran out of memory in the forward with 32 samples (32 samples, largest 24, sum 768)" in caplog.text
    first, second = (record.message for record in caplog.records)
    assert "; still no budget: a second such step within 100 steps sets one: CUDA error" in first
    assert "; the budget is now 30.4: CUDA error" in second
    assert_equal(model, unsplit())


def test_sizes_that_fail_do_not_stop_a_step_that_can_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def sizes_of(part: torch.Tensor) -> Any:
        raise KeyError("tokens")

    caplog.set_level(logging.WARNING, "headrace.size_aware_batching")
    _, guard = run_with({1}, 3, sizes_of=sizes_of)
    assert [event.sizes for event in guard.events] == ["sizes_of failed: KeyError: 'tokens'"]
    assert "in the forward with 32 samples (sizes_of failed: KeyError: 'tokens')" in caplog.text


def run_with(calls: set[int], steps: int, **options: Any) -> tuple[list[int], OOMGuard]:
    """Train while whole batches run out in these steps; return the parts of each step, and the guard."""
    model, optimizer = make()
    parts = [0] * steps

    def loss_of(part: torch.Tensor) -> Any:
        if guard.steps in calls and len(part) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        parts[guard.steps] += 1
        return model(part).square().mean()

    with OOMGuard(model, optimizer, cost=len, **options) as guard:
        for batch in batches(steps):
            guard.step(batch, loss_of)
    return parts, guard


def test_one_step_that_ran_out_leaves_the_later_ones_whole() -> None:
    parts, guard = run_with({2}, steps=12)
    assert parts == [1, 1, 2, *[1] * 9]
    assert guard.budget == np.inf
    report = guard.report()
    assert (report.steps, report.split_steps, report.extra_parts, report.failed_tries) == (12, 1, 1, 1)


def test_the_budget_recovers_after_steps_that_went_well() -> None:
    parts, guard = run_with({1, 3}, steps=14, window=5)
    # Steps 4 to 6 are split at once; then the first failure is more than five steps ago.
    assert parts == [1, 2, 1, 2, 2, 2, 2, *[1] * 7]
    assert [event.budget for event in guard.events] == [np.inf, 0.95 * 32]
    assert guard.budget == np.inf
    assert str(guard.report()).splitlines() == [
        "steps            14",
        "split            5, 35.7%",
        "extra parts      5",
        "failed tries     2",
        "budget           none",
        "retries          0",
    ]


def test_failures_that_lie_far_apart_do_not_shrink_the_budget() -> None:
    parts, guard = run_with({1, 8}, steps=14, window=5)
    assert parts == [1, 2, *[1] * 6, 2, *[1] * 5]
    assert len(guard.events) == 2


def test_the_budget_shrinks_to_the_cost_that_has_failed_twice() -> None:
    model, optimizer = make()

    def loss_of(most: int, part: torch.Tensor) -> Any:
        if len(part) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(part).square().mean()

    with OOMGuard(model, optimizer, cost=len) as guard:
        guard.step(batches(1)[0], partial(loss_of, 9))  # 32 and 16 fail: one step, which counts once
        assert guard.budget == np.inf
        guard.step(batches(1)[0], partial(loss_of, 20))
    assert guard.budget == 0.95 * 32


def test_a_budget_that_was_given_stays_the_upper_limit() -> None:
    parts, guard = run_with({1, 2}, steps=9, window=3, budget=31.0)
    assert parts == [2] * 9
    assert (guard.budget, guard.events) == (31.0, [])


def test_what_the_guard_has_learned_goes_on_in_another_process() -> None:
    _, guard = run_with({1, 2}, steps=4, window=9)
    model, optimizer = make()
    with OOMGuard(model, optimizer, cost=len, window=9) as again:
        again.load_state_dict(guard.state_dict())
        assert again.budget == guard.budget == 0.95 * 32
        for step, batch in enumerate(batches(9)):
            again.step(batch, lambda part: model(part).square().mean())
            assert (again.budget == np.inf) == (step + 1 > 6)


def test_other_errors_pass() -> None:
    model, optimizer = make()
    with OOMGuard(model, optimizer) as guard, pytest.raises(ZeroDivisionError):
        guard.step(batches()[0], lambda part: 1 / 0)  # type: ignore[arg-type, return-value]  # it never returns
    with pytest.raises(RuntimeError, match="must be called inside the block"):
        guard.step(batches()[0], lambda part: model(part).sum())


def test_batch_norm_in_training_mode_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="model must have no BatchNorm in training mode"):
        OOMGuard(model, optimizer)
    model[1].eval()
    with OOMGuard(model, optimizer) as guard:
        guard.step(torch.ones(4, 4), lambda part: model(part).mean())
        model.train()
        with pytest.raises(ValueError, match="model must have no BatchNorm in training mode"):
            guard.step(torch.ones(4, 4), lambda part: model(part).mean())


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.BatchNorm1d(4, track_running_stats=False).eval(),  # takes those of the batch all the same
        torch.nn.SyncBatchNorm(4),
        torch.nn.InstanceNorm1d(4, track_running_stats=True),
    ],
)
def test_statistics_of_the_batch_are_refused(norm: torch.nn.Module) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm)
    with pytest.raises(ValueError, match="model must have no BatchNorm in training mode"):
        OOMGuard(model, torch.optim.SGD(model.parameters()))


def test_norms_of_single_samples_are_taken() -> None:
    norms = torch.nn.InstanceNorm1d(4), torch.nn.InstanceNorm1d(4, track_running_stats=True).eval()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GroupNorm(2, 4), *norms)
    OOMGuard(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("options", "match"),
    [({"reduction": "max"}, "reduction must be one of"), ({"shrink": 1.0}, "shrink must be between")],
)
def test_options_that_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OOMGuard(*make(), **options)


class Unversioned(torch.optim.Optimizer):
    """Writes through ``.data``, as kernels of other libraries do: no version of a tensor tells."""

    def __init__(self, parameters: Any, fails_at: int) -> None:
        super().__init__(parameters, {})
        self.updates, self.fails_at = 0, fails_at

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)
                if self.updates - 1 == self.fails_at:
                    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("copy", [False, True])
def test_an_optimizer_whose_writes_are_not_seen_is_not_tried_again(copy: bool) -> None:
    model, _ = make()
    optimizer = Unversioned(model.parameters(), fails_at=1)
    with OOMGuard(model, optimizer, copy_weights=copy) as guard:
        guard.step(batches()[0], lambda part: model(part).square().mean())
        if copy:
            guard.step(batches()[1], lambda part: model(part).square().mean())
            return
        with pytest.raises(torch.OutOfMemoryError, match="may have stopped half-way, set copy_weights=True"):
            guard.step(batches()[1], lambda part: model(part).square().mean())


def test_gradients_that_a_failed_update_changed_are_put_back() -> None:
    model, optimizer = make()
    fails, update = Fails(0), optimizer.step

    def step() -> None:
        if not fails.count:
            model[0].weight.grad.mul_(0.5)  # as Nesterov's momentum and the unscaling of fused kernels do
        fails()
        update()

    optimizer.step = step
    with OOMGuard(model, optimizer) as guard:
        for batch in batches():
            guard.step(batch, lambda part: model(part).square().mean())
    assert len(guard.events) == 1
    assert_equal(model, unsplit())


def test_a_gradient_that_no_rank_has_stays_none_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_room(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(oom_guard, "_flat_gradients", no_room)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, _ = make()
        model.append(torch.nn.Linear(2, 2))  # not used
        weight = model[4].weight.detach().clone()
        whole = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        with OOMGuard(whole, optimizer) as guard:
            guard.step(batches()[0], lambda part: model[:4](part).square().mean())
        assert model[4].weight.grad is None
        assert torch.equal(model[4].weight, weight)
    finally:
        dist.destroy_process_group()


def groups(n: int = 32) -> list[list[torch.Tensor]]:
    """Return the batches of three steps, all of different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = (n, n // 2, n - 3), (n // 4, n), (n // 2, n - 1, n // 3)
    return [[torch.randn(m, WIDTH, dtype=torch.float64, generator=generator) for m in step] for step in sizes]


def accumulated_unsplit(reduction: str, clip: float | None) -> tuple[list[torch.Tensor], list[float]]:
    model, optimizer = make()
    losses = []
    for group in groups():
        optimizer.zero_grad()
        loss = torch.tensor(0.0, dtype=torch.float64)
        for batch in group:
            errors = model(batch).square()
            share = errors.mean() / len(group) if reduction == "mean" else errors.sum() / sum(map(len, group))
            share.backward()
            loss += share.detach()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.parametrize("reduction", ["mean", "sum", "scaled"])
@pytest.mark.parametrize("phase", ["forward", "backward", "budget"])
def test_accumulated_gradients_are_those_of_the_unsplit_batches(reduction: Any, phase: str) -> None:
    model, optimizer = make()
    tried: list[int] = []

    def loss_of(targets: torch.Tensor, part: torch.Tensor) -> Any:
        tried.append(len(part))
        fails = Fails(0) if guard.steps == 1 and len(part) > 16 and phase != "budget" else Fails()
        if phase == "forward":
            fails()
        hidden = model[:3](part)
        errors = model[3](apply(hidden, fails) if phase == "backward" else hidden).square()
        return token_weighted_loss(errors, targets) if reduction == "scaled" else getattr(errors, reduction)()

    budget = 20.0 if phase == "budget" else np.inf
    losses = []
    with OOMGuard(model, optimizer, reduction=reduction, clip_norm=0.01, cost=len, budget=budget) as guard:
        for group in groups():
            targets = global_num_tokens([sum(map(len, group))])
            losses.append(guard.accumulated_step(iter(group), partial(loss_of, targets)).item())
    if phase == "budget":
        assert not guard.events
        assert guard.report().split_steps == 3
    else:
        assert [(event.step, event.samples) for event in guard.events] == [(1, 32)]
        assert tried[3:8] == [8, 32, 8, 16, 16]  # the first batch runs again
        assert (guard.report().steps, guard.report().split_steps, guard.report().extra_parts) == (3, 1, 1)
    expected, expected_losses = accumulated_unsplit(reduction, clip=0.01)
    assert_equal(model, expected)
    assert losses == pytest.approx(expected_losses, rel=1e-12)


def test_random_numbers_of_accumulated_batches_are_drawn_again_in_the_second_try() -> None:
    torch.manual_seed(0)
    model, optimizer = make()
    drawn: list[tuple[int, float]] = []

    def read() -> Iterator[torch.Tensor]:
        for batch in batches(2):
            drawn.append((0, torch.rand(1).item()))  # such as an augmentation
            yield batch

    def loss_of(part: torch.Tensor) -> Any:
        drawn.append((len(part), torch.rand(1).item()))
        if len(drawn) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(part).mean()

    with OOMGuard(model, optimizer) as guard:
        guard.accumulated_step(read(), loss_of)
    assert [size for size, _ in drawn] == [0, 0, 32, 32, 32, 16, 16]
    assert drawn[2] == drawn[4]
    assert drawn[3][1] == drawn[5][1]


def test_a_step_without_a_batch_is_refused() -> None:
    model, optimizer = make()
    with OOMGuard(model, optimizer) as guard, pytest.raises(ValueError, match="batches must hold at least one batch"):
        guard.accumulated_step([], lambda part: model(part).mean())


class Synchronizing(TorchFunctionMode):
    """Counts the calls for which a CUDA tensor waits for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__float__", "__int__"):
            self.calls.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("grouped", [False, True])
def test_a_step_waits_for_the_device_only_to_agree(grouped: bool, tmp_path: Path) -> None:
    packed = PackedCollate()([{"x": torch.rand(n, WIDTH, dtype=torch.float64)} for n in (3, 1, 4)])
    model, optimizer = make()
    if grouped:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with OOMGuard(DistributedDataParallel(model) if grouped else model, optimizer) as guard:
            guard.step(packed, lambda part: model(part["x"]).square().mean())  # later ones copy no weights
            with Synchronizing() as waits:
                guard.step(packed, lambda part: model(part["x"]).square().mean())
        # AdamW counts its steps in host tensors, which wait for nothing.
        assert [call for call in waits.calls if call != "item"] == (["cpu", "cpu"] if grouped else [])
    finally:
        if grouped:
            dist.destroy_process_group()


def test_optimizers_that_are_sharded_are_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Has the name of torch's, which needs a process group."""

    model, _ = make()
    with pytest.raises(TypeError, match="optimizer must update this rank only, got ZeroRedundancyOptimizer"):
        OOMGuard(model, ZeroRedundancyOptimizer(model.parameters()))


def test_sharded_weights_are_refused() -> None:
    class FullyShardedDataParallel(torch.nn.Linear):
        """Has the name of torch's, which needs a process group."""

    class DeepSpeedEngine(torch.nn.Sequential):
        """Has the name of DeepSpeed's."""

    for model in (
        torch.nn.Sequential(FullyShardedDataParallel(2, 2)),
        DeepSpeedEngine(torch.nn.Linear(2, 2)),
    ):
        with pytest.raises(TypeError, match="got one whose weights are sharded"):
            OOMGuard(model, torch.optim.SGD(model.parameters()))


def test_random_numbers_of_a_failed_try_are_drawn_again() -> None:
    torch.manual_seed(0)
    drawn = []

    def loss_of(part: torch.Tensor) -> Any:
        drawn.append(torch.rand(1).item())
        if len(part) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(part).mean()

    model, optimizer = make()
    with OOMGuard(model, optimizer) as guard:
        guard.step(batches()[0], loss_of)
    assert drawn[0] == drawn[1] != drawn[2]


SAMPLES = [{"x": torch.arange(float(n)), "y": torch.tensor(n)} for n in (3, 1, 4, 2, 5)]


@pytest.mark.parametrize("layout", ["flat", "huggingface"])
def test_the_number_of_a_sequence_is_that_in_its_half(layout: Any) -> None:
    collate = PackedCollate(layout=layout, return_seq_idx=True)
    first, second = split_batch(collate(ONE_TOKEN))
    assert first["seq_idx"].flatten().tolist() == [0, 1, 1, 1, 2]
    assert torch.equal(second["seq_idx"], collate(ONE_TOKEN[3:])["seq_idx"])


@pytest.mark.parametrize("collate", [PaddedCollate(return_lengths=True, return_mask=True), PackedCollate()])
@pytest.mark.parametrize("structure", [dict, tuple, "tensor"])
def test_collated_batches_are_cut_at_their_samples(collate: Any, structure: Any) -> None:
    forms: dict[Any, Callable[[dict[str, torch.Tensor]], Any]] = {
        dict: lambda sample: {"x": sample["x"]},
        tuple: lambda sample: (sample["x"], sample["x"] + 1),
        "tensor": lambda sample: sample["x"],
    }
    samples = [forms[structure](sample) for sample in SAMPLES]
    batch = collate(samples)
    assert batch_length(batch) == 5
    first, second = split_batch(batch)
    assert (batch_length(first), batch_length(second)) == (2, 3)
    if isinstance(collate, PackedCollate):
        for half, expected in ((first, collate(samples[:2])), (second, collate(samples[2:]))):
            assert type(half) is type(expected)
            assert repr(half) == repr(expected)
    singles = [part for half in (first, second) for part in split_batch(half)]
    assert [batch_length(one) for one in singles] == [1, 1, 1, 2]
    assert split_batch(singles[0]) == [singles[0]]


PACKED = [
    {"input_ids": torch.arange(n), "labels": torch.arange(n), "reward": torch.tensor(float(n))} for n in (3, 1, 4, 2, 5)
]
ONE_TOKEN = [PACKED[index] for index in (1, 0, 1, 1, 4, 1)]  # alone and in a row, first and last


@pytest.mark.parametrize("known_by", ["cu_seq_lens_q", "position_ids"])
@pytest.mark.parametrize("start", [0, 2])  # RoBERTa and its like count positions from 2
@pytest.mark.parametrize("samples", [PACKED, ONE_TOKEN])
def test_packed_batches_of_transformers_are_cut_at_their_samples(
    known_by: str, start: int, samples: list[dict[str, torch.Tensor]]
) -> None:
    def collated(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        collate = PackedCollate(layout="huggingface", return_seq_idx=True, position_start=start)
        batch: dict[str, Any] = collate(samples)
        if known_by == "position_ids":
            batch = {key: value for key, value in batch.items() if not key.startswith(("cu_", "max_"))}
        return batch

    def same(one: dict[str, Any], other: dict[str, Any]) -> None:
        assert list(one) == list(other)
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key

    batch, middle = collated(samples), len(samples) // 2
    assert batch_length(batch) == len(samples)
    first, second = split_batch(batch)
    same(first, collated(samples[:middle]))
    same(second, collated(samples[middle:]))
    assert [batch_length(half) for half in split_batch(second)] == [1, 2]
    single = collated(samples[:1])
    assert split_batch(single) == [single]


def test_a_padded_row_with_positions_is_one_sample() -> None:
    left = {
        "input_ids": torch.tensor([[0, 0, 5, 6]]),
        "position_ids": torch.tensor([[1, 1, 0, 1]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
    }
    assert batch_length(left) == 1
    assert batch_length({key: torch.cat([value, value]) for key, value in left.items()}) == 2


def test_a_step_over_a_packed_batch_of_transformers_is_rescued() -> None:
    torch.manual_seed(0)
    whole = torch.nn.Embedding(8, 3, dtype=torch.float64), torch.nn.Embedding(8, 3, dtype=torch.float64)
    start = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in whole]
    batch = PackedCollate(layout="huggingface")(PACKED)

    def trained(limit: int) -> list[torch.Tensor]:
        for layer, state in zip(whole, start, strict=True):
            layer.load_state_dict(state)
        model = torch.nn.ModuleList(whole)
        with OOMGuard(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction="mean") as guard:

            def loss_of(part: dict[str, torch.Tensor]) -> torch.Tensor:
                if part["input_ids"].numel() > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                values = (whole[0](part["input_ids"]) * whole[1](part["position_ids"])).sum(-1)[0]
                ends = part["cu_seq_lens_q"].long()
                return torch.stack([values[i:j].mean() for i, j in pairwise(ends)]).mean()

            guard.step(batch, loss_of)
            assert bool(guard.events) == (limit < 15)
        return [parameter.detach().clone() for parameter in model.parameters()]

    for rescued, plain in zip(trained(6), trained(15), strict=True):
        torch.testing.assert_close(rescued, plain, rtol=0, atol=1e-12)


def test_a_packed_batch_with_fields_of_other_lengths_is_refused() -> None:
    batch = {"x": torch.arange(6)[None], "cu_seqlens": torch.tensor([0, 2, 6])}  # [1, total]
    with pytest.raises(ValueError, match=r"x must have 6 tokens or 2 samples in dimension 0, got shape \[1, 6\]"):
        split_batch(batch)


def test_lists_and_numbers_in_a_batch() -> None:
    first, second = split_batch(
        {"x": torch.ones(4, 2), "name": ["a", "b", "c", "d"], "scale": 2.0, "t": torch.tensor(1)}
    )
    assert (first["name"], second["name"], second["scale"], second["t"].item()) == (["a", "b"], ["c", "d"], 2.0, 1)
    for wrong in ({"x": torch.ones(4), "y": torch.ones(3)}, 5):
        with pytest.raises(ValueError, match="a batch must contain tensors of one length in dimension 0"):
            split_batch(wrong)


STATIC = "DistributedDataParallel must not have static_graph=True, because it needs the same calls in every step"
REFUSED = {
    "several": "model must hold one DistributedDataParallel, got 2: wrap all that is trained together in one",
    "none": "model must hold a DistributedDataParallel on 2 ranks, got Linear: pass the wrapped model",
    "outside": "every trained parameter must be in the model's DistributedDataParallel, got 0.weight outside it",
    "static": STATIC,
    "static, measured": STATIC,
    "hook": "model's DistributedDataParallel must have no communication hook, because the guard reduces the gradients "
    "itself, got allreduce_hook",
}


@pytest.mark.slow
def test_two_ranks_stay_equal_wherever_one_or_both_run_out(tmp_path: Path) -> None:
    first, second = run_ranks(memory_worker.main, 2, tmp_path)
    assert len(first["guard"]) == 20
    for name, found in first["guard"].items():
        assert found["bits"] == second["guard"][name]["bits"], name
        assert found["error"] < 1e-12, name
        events = found["events"], second["guard"][name]["events"]
        assert [bool(each) for each in events] == ([True, True] if name.endswith("both") else [False, True]), name
    assert list(first["wrapped"]) == ["compiled", "inside", "fabric"]
    for name, found in first["wrapped"].items():
        other = second["wrapped"][name]
        assert found["bits"] == other["bits"], name
        assert found["error"] < 1e-12, name
        assert (found["events"], other["events"]) == (0, 1), name
    assert first["accumulated"] == second["accumulated"]
    rescued, plain = first["accumulated"]
    np.testing.assert_allclose(rescued, plain, rtol=0, atol=1e-12)
    again = first["repeated"], second["repeated"]
    assert again[0]["budgets"] == again[1]["budgets"] == [*[np.inf] * 3, *[0.95 * 2] * 2, *[np.inf] * 7]
    assert again[0]["bits"] == again[1]["bits"]
    assert again[0]["parts"] == [1, 1, 1, 1, 2, 2, *[1] * 6]  # all ranks split what one has failed at
    assert again[1]["parts"] == [1, 2, 1, 2, 2, 2, *[1] * 6]
    assert (again[0]["split"], again[1]["split"]) == (2, 4)
    for place in ("loss", "cost", "split"):
        assert second["alone"][place][0] == f"ValueError: the {place} is wrong"
        assert first["alone"][place][0] == f"RuntimeError: rank 1: ValueError: the {place} is wrong"
    for found in (first, second):
        told = "OutOfMemoryError: rank 1: the norm of the gradients does not fit: CUDA out of memory"
        assert found["alone"]["clip"][0] == told
        assert len(found["alone"]["nowhere"]) == 1
        assert found["alone"]["clip once"] == found["alone"]["nowhere"]
        assert found["refused"] == REFUSED
        for name, words in zip(("allreduce", "barrier", "allgather", "broadcast"), found["told"], strict=True):
            assert f"a collective ({name}) must not run in the loss of a part" in words
        assert "does not fit on rank 0" in found["worst of what holds one"]
        assert "rank 1: sample 3 of the batch does not fit into memory by itself" in found["lost"]
        assert "does not fit on rank 1" in found["worst"]
    assert first["reduced"] == second["reduced"] == [0]  # connections take memory, and no measured step makes them
    assert first["cost"] == second["cost"]
    assert first["capacity"] == second["capacity"] == 6_000_000
    assert first["moved"] == second["moved"] == 14_000_000
    assert first["shapes"] == second["shapes"]
    assert first["peaks"] == second["peaks"]  # the second rank's, which needs more
    assert max(first["peaks"]) <= 0.95 * 6_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_runs_out_of_a_real_memory() -> None:
    model, optimizer = make()
    model.cuda()
    rows = torch.cuda.mem_get_info()[1] // (96 * 8)  # one layer's output alone fills the device
    batch = torch.zeros(rows, 1, dtype=torch.float64, device="cuda").expand(rows, WIDTH)
    with OOMGuard(model, optimizer) as guard:
        guard.step(batch, lambda part: model(part).square().mean())
    assert guard.events
    assert guard.report().split_steps == 1
