"""The simulated memory runs out where a device would, and estimates need no memory at all."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import Peaks, SimulatedMemory, estimate_peaks, measure_peaks


def make_step(width: int = 64) -> Callable[[Any], object]:
    model = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(sizes: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(len(sizes), int(np.max(sizes)), width)).sum().backward()
        optimizer.step()

    return step


def test_it_counts_what_is_alive() -> None:
    with SimulatedMemory() as memory:
        first = torch.zeros(1024)
        view = first[10:]
        assert memory.used == 4096
        memory.start()
        second = torch.ones(2048)
        del second
        assert memory.peak() == 4096 + 8192
        memory.start()
        assert memory.peak() == memory.used == 4096
        del first
        assert memory.used == 4096  # the view holds the storage
        del view
        assert memory.used == 0
        assert memory.reserved_peak() == 2**21


def test_tensors_from_outside_count_once_they_are_used() -> None:
    weight = torch.ones(512)
    with SimulatedMemory(limit=5000) as memory:
        with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4096 bytes, 2048 of 5000 bytes are in use"):
            torch.cat([weight, weight])
        assert memory.used == 2048
        (weight + 1).sum()


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_it_runs_out_in_every_phase(phase: str) -> None:
    layer = torch.nn.Linear(256, 256, bias=False)  # 256 KiB, as its gradient and each state of Adam
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    kib = {"forward": 260, "backward": 400, "optimizer": 800}[phase]
    reached = []

    def step() -> None:
        loss = layer(torch.ones(8, 256)).sum()
        reached.append("forward")
        loss.backward()
        reached.append("backward")
        optimizer.step()

    with SimulatedMemory(limit=kib * 1024), pytest.raises(torch.OutOfMemoryError):
        step()
    assert reached == {"forward": [], "backward": ["forward"], "optimizer": ["forward", "backward"]}[phase]


def test_everything_is_given_back_after_a_failed_step() -> None:
    step = make_step()
    with SimulatedMemory() as memory:
        step([4])
        gc.collect()
        before = memory.used
        memory.limit = before + 2**16
        with pytest.raises(torch.OutOfMemoryError):
            step([64, 64, 64])
        memory.limit = None
        step([4])
        gc.collect()
        assert memory.used == before


@pytest.mark.slow
def test_an_estimate_has_the_shape_of_the_real_curve() -> None:
    shapes = [np.full(n, length) for n in (1, 2, 4) for length in (16, 64, 128)]
    estimated = estimate_peaks(make_step, shapes)
    with SimulatedMemory() as memory:
        real = measure_peaks(make_step(), shapes, memory)
    assert np.corrcoef(estimated.allocated, real.allocated)[0, 1] > 0.99
    scaled = estimated.scaled_to(real[[0, 4, 8]])
    assert (np.abs(scaled.allocated / real.allocated - 1) < 0.15).all()
    assert estimated.scaled_to(real[[8]]).allocated[8] == real.allocated[8]


@pytest.mark.slow
def test_reserved_memory_is_scaled_by_a_few_small_batches_too() -> None:
    """All small batches have the same estimate in whole segments of 2 MiB, which determines no scale."""
    shapes = [np.full(n, length) for n in (1, 2, 3, 30, 60) for length in (16, 24, 128)]
    estimated = estimate_peaks(make_step, shapes)
    few = [0, 1, 3, 4, 6, 7]
    assert len(set(estimated.reserved[few].tolist())) == 1
    with SimulatedMemory(limit=2**28) as memory:
        real = measure_peaks(make_step(), shapes, memory)
    with pytest.warns(
        UserWarning, match=r"the largest estimate is \d+ times the largest measured batch.*: measure larger"
    ):
        scaled = estimated.scaled_to(real[few])
    assert (scaled.reserved > 0.7 * real.reserved).all()
    assert (scaled.reserved >= scaled.allocated).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = estimated.scaled_to(real[[0, 5, 11]])
    assert (np.abs(scaled.reserved / real.reserved - 1) < 0.35).all(), scaled.reserved / real.reserved


@pytest.mark.slow
def test_the_reserved_memory_of_an_estimate_has_the_fragments_of_the_allocator() -> None:
    shapes = [np.full(n, length) for n in (1, 8, 64) for length in (32, 128)]
    estimated = estimate_peaks(partial(make_step, 128), shapes)
    with SimulatedMemory(caching=True) as memory:
        real = measure_peaks(make_step(128), shapes, memory)
    assert real.reserved.max() > 5 * real.reserved.min()
    assert (np.abs(estimated.reserved / real.reserved - 1) < 0.02).all(), estimated.reserved / real.reserved
    scaled = estimated.scaled_to(real[[0, 1, 3]])
    assert (np.abs(scaled.reserved / real.reserved - 1) < 0.02).all(), scaled.reserved / real.reserved


@pytest.mark.parametrize(
    ("values", "operator"),
    [
        (lambda x: x[x[:, 0] > 0], "nonzero"),
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
    ],
)
def test_a_step_that_depends_on_values_is_refused(
    values: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    def make() -> Callable[[Any], object]:
        model = torch.nn.Linear(8, 8)
        return lambda sizes: model(values(torch.ones(len(sizes), 8))).sum().backward()

    with pytest.raises(ValueError, match=f"the step must not depend on values of its tensors.*got aten.{operator}"):
        estimate_peaks(make, [np.array([4])])


@pytest.mark.slow
def test_a_model_that_copies_its_layers_is_estimated() -> None:
    def make() -> Callable[[Any], object]:
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step(sizes: Any) -> None:
            optimizer.zero_grad()
            model(torch.ones(len(sizes), int(sizes.max()), 64)).sum().backward()
            optimizer.step()

        return step

    shapes = [np.full(2, 16), np.full(8, 64)]
    estimated = estimate_peaks(make, shapes)
    with SimulatedMemory() as memory:
        real = measure_peaks(make(), shapes, memory)
    assert (np.abs(estimated.allocated / real.allocated - 1) < 0.02).all()


def test_a_model_far_beyond_this_machine_is_estimated() -> None:
    def make() -> Callable[[Any], object]:
        model = torch.nn.Linear(2**20, 2**20, dtype=torch.bfloat16)  # 2 TiB
        return lambda sizes: model(torch.ones(len(sizes), 2**20, dtype=torch.bfloat16)).sum().backward()

    peaks = estimate_peaks(make, [np.array([1])], warm_up=0)
    assert 2 * 2**41 < peaks.allocated[0] < 3 * 2**41


@pytest.mark.slow
def test_an_estimate_needs_a_measured_batch_to_be_scaled() -> None:
    estimated = estimate_peaks(make_step, [np.array([4])], warm_up=0)
    other = estimate_peaks(make_step, [np.array([8])], warm_up=0)
    with pytest.raises(ValueError, match="measured must share batches with the estimate, got none"):
        estimated.scaled_to(other)


@pytest.mark.parametrize("name", ["allocated", "reserved"])
@pytest.mark.parametrize("side", ["measured", "the estimate"])
def test_peaks_without_bytes_do_not_scale_an_estimate(name: str, side: str) -> None:
    peaks = Peaks.of([[1], [2], [4]], [100, 200, 400])
    empty = replace(peaks, **{name: np.array([0, 200, 400])})
    estimated, measured = (peaks, empty) if side == "measured" else (empty, peaks)
    with pytest.raises(ValueError, match=f"{side} must have {name} bytes > 0 in the shared batches, got 0"):
        estimated.scaled_to(measured)
    assert estimated.scaled_to(measured[1:]).allocated[2] == 400


@pytest.mark.parametrize("limit", [0, 1.5, "many"])
def test_limits_that_are_refused(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="limit must be an int >= 1"):
        SimulatedMemory(limit)


def test_a_caching_allocator_keeps_blocks_and_loses_what_is_left_over() -> None:
    with SimulatedMemory(limit=10_000_000, caching=True) as memory:
        first, second = (torch.empty(size, dtype=torch.uint8) for size in (6_000_000, 3_000_000))
        del first, second
        assert memory.used == 0
        kept = torch.empty(3_500_000, dtype=torch.uint8)  # of the block of 6 MB: 2.5 MB are left over
        with pytest.raises(torch.OutOfMemoryError, match=r"3500032 of 10000000 bytes are in use, 60\d+ are reserved"):
            torch.empty(4_500_000, dtype=torch.uint8)
        assert memory.alloc_retries() == 1
        del kept
        memory.start()
        assert memory.reserved_peak() == 0
        pair = [torch.empty(size, dtype=torch.uint8) for size in (3_500_000, 4_500_000)]  # they fit by themselves
        del pair
        memory.reset_peak()
        assert memory.reserved_peak() > 8_000_000  # a new peak, but nothing was released


def test_the_estimate_of_an_lstm_has_the_shape_of_its_curve() -> None:
    def make_step() -> Callable[[Any], object]:
        embedding, layer = torch.nn.Embedding(20, 24), torch.nn.LSTM(24, 24, 2, batch_first=True)
        trained = torch.optim.AdamW([*embedding.parameters(), *layer.parameters()])

        def step(sizes: Any) -> None:
            trained.zero_grad()
            layer(embedding(torch.zeros(len(sizes), int(sizes.max()), dtype=torch.long)))[0].sum().backward()
            trained.step()

        return step

    shapes = [np.full(count, size) for count, size in ((8, 12), (32, 12), (32, 36))]
    estimated, device = estimate_peaks(make_step, shapes), SimulatedMemory()
    with device:
        measured = measure_peaks(make_step(), shapes, device)
    ratios = measured.allocated / estimated.allocated
    assert 1 / 2 < ratios.min() <= ratios.max() < 2
    assert ratios.max() / ratios.min() < 1.15
