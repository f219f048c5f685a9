"""Everything that a trial step changes is put back."""

import tracemalloc
from typing import Any

import pytest
import torch

from headrace.size_aware_batching.memory.snapshot import OptimizerCopy, unchanged


class Counting(torch.nn.Module):
    """Replaces a buffer instead of changing it, and makes one when it is called first."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("table", None)
        self.register_buffer("positions", torch.arange(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1
        self.table = torch.ones(len(x))
        self.positions = torch.arange(len(x))  # a cache: what is longer is no other state
        return x * self.average.sum()


def test_buffers_that_a_step_replaces() -> None:
    model = Counting()
    before = model.average
    with unchanged(model):
        model(torch.ones(5))
    assert model.average is before
    assert model.average.tolist() == [0, 0]
    assert len(model.positions) == len(model.table) == 5


def test_a_trial_holds_one_copy_of_weights_and_optimizer_state() -> None:
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = sum(p.nbytes for p in model.parameters())
    tracemalloc.start()
    try:
        with unchanged(model, optimizer):
            held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 3.1 * weights  # Adam keeps two numbers for each weight


def test_a_gradient_of_one_number_that_is_a_view_of_a_scalar() -> None:
    layer = torch.nn.Linear(3, 1)
    layer.weight.grad, layer.bias.grad = torch.ones(1, 3), torch.as_strided(torch.ones(1), (1,), (0,))
    with unchanged(layer):
        layer.bias.grad.zero_()
    assert layer.bias.grad.tolist() == [1]


def test_a_tensor_without_elements() -> None:
    model = torch.nn.ParameterList([torch.ones(0, 3), torch.ones(2)])
    with unchanged(model):
        model[1].data.zero_()
    assert [parameter.tolist() for parameter in model] == [[], [1, 1]]


def test_weights_of_another_model_are_put_back_with_their_optimizer() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    before = [p.detach().clone() for p in (*model.parameters(), *other.parameters())]
    with unchanged(model, optimizer):
        (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, (*model.parameters(), *other.parameters()), before))


def test_options_of_an_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=rate)
    group: dict[str, Any] = optimizer.param_groups[0]
    copy = OptimizerCopy(optimizer)
    rate.fill_(0.1)
    group["momentum"], group["steps"] = 0.9, 3
    copy.restore()
    assert group["lr"] is rate  # captured graphs and schedules hold it
    assert rate.item() == 0.5
    assert group["momentum"] == 0
    assert "steps" not in group


def test_the_random_state_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = torch.Generator(), torch.Generator()
    for name, value in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("_lazy_init", lambda: None),
        ("device_count", lambda: 2),
        ("current_device", lambda: 0),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.random, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    before = [generator.get_state() for generator in generators]
    with unchanged(None):
        for generator in generators:
            torch.rand(3, generator=generator)
    assert [torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)] == [
        True,
        True,
    ]
