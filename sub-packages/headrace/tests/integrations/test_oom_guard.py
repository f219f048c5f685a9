"""A guard that accumulates what accelerate has prepared: the parameters are those of accelerate's own loop."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from headrace.size_aware_batching import OOMGuard


def groups() -> list[list[torch.Tensor]]:
    """Return the batches of three steps, of different sizes."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in sizes] for sizes in [(32, 9)] * 3]


def prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    made: tuple[Any, Any] = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return made


def usual() -> list[torch.Tensor]:
    """Train in accelerate's loop."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    for batch in [batch for group in groups() for batch in group]:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_accumulated_gradients_are_those_of_accelerates_loop() -> None:
    expected = usual()
    model, optimizer = prepared(Accelerator(cpu=True))

    def loss_of(part: torch.Tensor) -> Any:
        if guard.steps == 1 and len(part) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(part).square().mean()

    with OOMGuard(model, optimizer) as guard:
        for group in groups():
            guard.accumulated_step(group, loss_of)
    assert len(guard.events) == 1
    for found, wanted in zip(model.parameters(), expected, strict=True):
        assert (found.detach() - wanted).abs().max() < 1e-12 * wanted.abs().max()


def test_a_step_inside_accelerates_own_accumulation_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    with OOMGuard(model, optimizer) as guard, accelerator.accumulate(model):
        told = r"must not be called in accelerator.accumulate\(\): give all batches of a step to accumulated_step"
        with pytest.raises(RuntimeError, match=told):
            guard.step(groups()[0][0], lambda part: model(part).mean())
