"""Shapes that were measured: each has run, also after the others, and training has no other."""

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import (
    BatchMemoryModel,
    DistributedSizeAwareBatchSampler,
    MeasuredShapes,
    PaddedCollate,
    Peaks,
    SimulatedMemory,
    fit_budget,
    fit_shapes,
)

LIMIT = 40_000_000
Shape = tuple[int, int]


def lengths_of(seed: int, count: int = 2000) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(np.log(360), 0.8, count), 8, 2048).astype(int)


def shapes_of(lengths: Any) -> Callable[[Any], Shape]:
    return lambda indices: (len(indices), int(lengths[indices].max()))


class Step:
    """Allocates the activations of some layers, with a deviation of its own for each shape, as kernels have."""

    def __init__(self, noise: float = 0.08, layers: tuple[int, ...] = (300,)) -> None:
        self.weights, self.noise, self.layers = torch.zeros(2**18), noise, layers
        self.ran: set[Shape] = set()

    def __call__(self, shape: Shape) -> None:
        count, length = shape
        self.ran.add(shape)
        deviation = 1 + self.noise * random.Random(1000 * count + length).random()
        kept = [torch.empty(int(per * count * length * deviation), dtype=torch.uint8) for per in self.layers]
        self.weights.mul_(1)
        del kept
        torch.empty(2**19)  # what the optimizer needs, whatever the batch


def padded(sampler: DistributedSizeAwareBatchSampler, epochs: int) -> Iterator[Shape]:
    """The shapes of the batches of some epochs, as `PaddedCollate` makes them."""
    collate = PaddedCollate(shapes=sampler.shapes)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in sampler:
            count, length = collate([torch.empty(int(sampler.sizes[index])) for index in batch]).shape
            yield count, length


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 6))])
def test_training_has_no_shape_that_was_not_measured_and_none_over_the_budget(seed: int) -> None:
    lengths, step = lengths_of(seed), Step()
    with SimulatedMemory(limit=LIMIT) as device:
        memory = fit_budget(step, shapes_of(lengths), lengths, device, memory="allocated", seed=seed)
        step.ran.clear()
        found = fit_shapes(step, shapes_of(lengths), lengths, device, memory, shapes=12)
        tried = step.ran.copy()
        sampler = DistributedSizeAwareBatchSampler(
            lengths, found.budget, cost=found, shapes=found.shapes, strategy="bucketed"
        )
        step.ran.clear()
        for shape in padded(sampler, epochs=2):
            device.start()
            step(shape)
            assert device.peak() <= found.budget
    assert step.ran <= {*found.shapes} <= tried
    assert len(found.shapes) == 12
    assert all(0.9 < peak / found.budget <= 1 for peak in found.peaks)
    by_margin = DistributedSizeAwareBatchSampler(
        lengths, memory.budget(), cost=memory.cost(), shapes=12, strategy="bucketed"
    )
    assert sampler.report().batches <= by_margin.report().batches
    assert memory.margin > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))])
def test_no_shape_runs_out_of_a_caching_allocator_after_others(seed: int) -> None:
    lengths, step = lengths_of(seed), Step(noise=0, layers=(80, 20, 100, 50, 10, 60))
    with SimulatedMemory(limit=LIMIT, caching=True) as device:
        memory = fit_budget(step, shapes_of(lengths), lengths, device, seed=seed)
        found = fit_shapes(step, shapes_of(lengths), lengths, device, memory, shapes=12, rounds=4)
        sampler = DistributedSizeAwareBatchSampler(
            lengths, found.budget, cost=found, shapes=found.shapes, strategy="bucketed"
        )
        device.start()
        for shape in padded(sampler, epochs=3):
            step(shape)
    assert found.memory == "reserved"
    assert found.warm_steps >= 48


class Crowded(Step):
    """Keeps a part of the device for good from one of its calls on, as a library does."""

    def __init__(self, begin: float) -> None:
        super().__init__(noise=0)
        self.calls, self.begin = 0, begin

    def __call__(self, shape: Shape) -> None:
        self.calls += 1
        if self.calls == self.begin:
            self.workspace = torch.empty(5_000_000, dtype=torch.uint8)
        super().__call__(shape)


def test_a_shape_that_runs_out_after_others_gets_fewer_rows() -> None:
    """By itself each takes up to 95 % of the device; what the first one of the warm steps leaves behind is 12 %."""
    lengths = lengths_of(0, 600)
    with SimulatedMemory(limit=LIMIT) as device:
        memory = fit_budget(Step(0), shapes_of(lengths), lengths, device, memory="allocated")
        step = Crowded(begin=np.inf)
        alone = fit_shapes(step, shapes_of(lengths), lengths, device, memory, shapes=4)
        step = Crowded(begin=step.calls - alone.warm_steps + 1)
        found = fit_shapes(step, shapes_of(lengths), lengths, device, memory, shapes=4)
    assert [length for _, length in found.shapes] == [length for _, length in alone.shapes]
    assert all(count < before for (count, _), (before, _) in zip(found.shapes, alone.shapes, strict=True))
    assert all(300 * count * length <= LIMIT - 5_000_000 for count, length in found.shapes)
    assert found.warm_steps > alone.warm_steps == 8


def test_model_and_optimizer_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    lengths = lengths_of(0, 300) // 8
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    def batches_of(indices: Any) -> torch.Tensor:
        return torch.randn(len(indices), int(lengths[indices].max()), 16)

    with SimulatedMemory(limit=LIMIT // 10) as device:
        memory = fit_budget(step, batches_of, lengths, device, model=model, optimizer=optimizer, memory="allocated")
        weights = [one.clone() for one in model.parameters()]
        found = fit_shapes(
            step, batches_of, lengths, device, memory, shapes=3, model=model, optimizer=optimizer, length_multiple=8
        )
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state
    assert all(length % 8 == 0 for _, length in found.shapes)


def found_shapes(**changes: Any) -> MeasuredShapes:
    given: dict[str, Any] = {"shapes": ((8, 10), (4, 20), (3, 30)), "peaks": (90, 80, 95), "budget": 100.0}
    return MeasuredShapes(**given | {"memory": "reserved", "warm_steps": 6, "alloc_retries": 1} | changes)


def test_they_are_a_cost() -> None:
    cost = found_shapes()
    assert [cost(8, 10), cost(1, 11), cost(4, np.int64(20)), cost(3, np.array([30])), cost(3, [21])] == [
        90,
        90,
        90,
        95,
        95,
    ]
    assert cost(9, 10) == cost(5, 11) == cost(1, 31) == float("inf")
    assert pickle.loads(pickle.dumps(cost)) == cost
    sampler = DistributedSizeAwareBatchSampler(
        np.arange(1, 31), cost.budget, cost=cost, shapes=cost.shapes, strategy="bucketed"
    )
    assert sampler.shapes == cost.shapes
    assert sampler.report().over_budget == 0


def test_they_show_themselves() -> None:
    found = found_shapes()
    assert repr(found) == "MeasuredShapes(3 shapes, 8 x 10 to 3 x 30, budget 100 bytes)"
    assert "4 x 20        80 bytes, 80.0% of the budget" in str(found)
    assert "allocator retries: 1" in str(found)


def test_they_are_saved_for_the_resume(tmp_path: Path) -> None:
    found, path = found_shapes(), tmp_path / "shapes.json"
    found.save(path)
    assert MeasuredShapes.load(path) == found
    assert [*tmp_path.iterdir()] == [path]
    text = path.read_text()
    for broken in ("", "[]", text.replace("95", '"x"'), text.replace("reserved", "other"), text.replace("1,", "7,", 1)):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"must be a file that MeasuredShapes\.save wrote"):
            MeasuredShapes.load(path)


def test_what_has_no_shapes_is_refused() -> None:
    lengths = lengths_of(0, 300)
    packed, peaks = BatchMemoryModel(("S",)), [[n] * 4 for n in range(1, 80)]
    packed.fit(Peaks.of(peaks, [1000 + 10 * sum(one) for one in peaks]))
    packed.capacity = LIMIT
    with SimulatedMemory(limit=LIMIT) as device:
        with pytest.raises(ValueError, match="memory must be a model of padded batches, got one of S"):
            fit_shapes(Step(), shapes_of(lengths), lengths, device, packed)
        memory = fit_budget(Step(), shapes_of(lengths), lengths, device, memory="allocated")
        refused: list[tuple[Any, dict[str, Any], str]] = [
            ([], {}, "sizes must hold at least one sample"),
            (lengths, {"shapes": 0}, "shapes must be an int >= 1, got 0"),
            (lengths, {"rounds": 0}, "rounds must be an int >= 1, got 0"),
            (lengths / 2, {}, "needs whole sizes"),
            (np.append(lengths, 10**6), {}, "sizes must not exceed max_total_size"),
        ]
        for sizes, options, message in refused:
            with pytest.raises(ValueError, match=message):
                fit_shapes(Step(), shapes_of(lengths), sizes, device, memory, **options)


def test_a_sample_that_does_not_fit_by_itself_says_so() -> None:
    lengths, step = lengths_of(0, 300), Step()
    with SimulatedMemory(limit=LIMIT) as device:
        memory = fit_budget(step, shapes_of(lengths), lengths, device, memory="allocated")
    with (
        SimulatedMemory(limit=2_300_000) as device,
        pytest.raises(torch.OutOfMemoryError, match="a sample by itself does not fit into the budget"),
    ):
        fit_shapes(step, shapes_of(lengths), lengths, device, memory, shapes=2)
