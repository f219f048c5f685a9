"""Peaks of batches, with bounds where they run out of memory: simulated, and on a CUDA device where there is one."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import Peaks, SimulatedMemory, design_batches, measure_peaks
from headrace.size_aware_batching.memory import CudaMeter, device_memory, is_out_of_memory

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(
    params=[
        "simulated",
        pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]),
    ]
)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Any, torch.device]]:
    """What ``device=`` takes, and where tensors go."""
    if request.param != "simulated":
        yield request.param, torch.device(request.param)
        return
    with SimulatedMemory(limit=2**24) as memory:
        yield memory, torch.device("cpu")


def test_peaks_of_other_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="peaks must have as many rows in every field, got 1, 2"):
        Peaks.of([[3, 5], [4]], [100])


def test_peaks_and_features(place: tuple[Any, torch.device]) -> None:
    device, where = place
    batches = [[2**18], [2**19, 2**18], [2**20, 2**20, 2**20]]
    ran, cleaned = [], []

    def work(sizes: list[int]) -> None:
        ran.append(len(sizes))
        torch.empty(sum(sizes), dtype=torch.uint8, device=where)

    peaks = measure_peaks(work, batches, device, warm_up=2, cleanup=lambda: cleaned.append(1))
    assert ran == [1, 1, 1, 2, 3]  # the first two are warm-up
    assert len(cleaned) == 5
    assert peaks.counts.tolist() == [1, 2, 3]
    assert peaks.largest[:, 0].tolist() == [2**18, 2**19, 2**20]
    assert peaks.sums[:, 0].tolist() == [sum(batch) for batch in batches]
    floor = peaks.allocated[0] - 2**18
    assert (peaks.allocated - floor).tolist() == [sum(batch) for batch in batches]
    assert (peaks.reserved >= peaks.allocated).all()
    assert peaks.fits.all()


def test_what_does_not_fit_becomes_a_bound(place: tuple[Any, torch.device], caplog: pytest.LogCaptureFixture) -> None:
    device, where = place
    ran = []

    def work(sizes: list[int]) -> None:
        ran.append(sizes)
        torch.empty(sum(sizes), dtype=torch.uint8, device=where)

    too_large = 2**24 if isinstance(device, SimulatedMemory) else 2**50
    with caplog.at_level(logging.INFO, "headrace.size_aware_batching"):
        peaks = measure_peaks(work, [[1000], [too_large, 9], [too_large, too_large], [500]], device, warm_up=0)
    assert ran == [[1000], [too_large, 9], [500]]  # what is larger still is not tried
    assert peaks.fits.tolist() == [True, False, False, True]
    assert "a batch of 2 samples, largest" in caplog.text
    if isinstance(device, SimulatedMemory):
        assert peaks.allocated[1:3].tolist() == [2**24, 2**24]
        assert device.used == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA out of memory. Tried to allocate"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("HIP out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate 8"),
        MemoryError(),
    ],
)
def test_every_kind_of_running_out_is_survived(error: Exception) -> None:
    def work(sizes: list[int]) -> None:
        if len(sizes) > 1:
            raise error

    assert is_out_of_memory(error)
    with SimulatedMemory(limit=100) as memory:
        peaks = measure_peaks(work, [[1], [1, 1]], memory)
    assert peaks.fits.tolist() == [True, False]


AMBIGUOUS = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not contiguous.",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
)


@pytest.mark.parametrize("text", AMBIGUOUS)
@pytest.mark.parametrize(("failed", "free", "counts"), [(0, 40, False), (1, 40, True), (0, 2, True)])
def test_codes_that_bugs_have_too_count_where_the_allocator_agrees(
    text: str, failed: int, free: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("empty_cache", lambda: None),
        ("memory_stats", lambda: {"num_ooms": failed}),
        ("mem_get_info", lambda: (free * 2**30, 80 * 2**30)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)

    def work(sizes: list[int]) -> None:
        if len(sizes) > 1:
            raise RuntimeError(text)

    with SimulatedMemory(limit=100) as memory:
        if counts:
            assert measure_peaks(work, [[1], [1, 1]], memory).fits.tolist() == [True, False]
        else:
            with pytest.raises(RuntimeError, match=re.escape(text)):
                measure_peaks(work, [[1], [1, 1]], memory)


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_codes_that_bugs_have_too_are_bugs_without_a_device(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_other_errors_pass_after_the_cleanup() -> None:
    cleaned: list[int] = []
    for error in (ZeroDivisionError("x"), RuntimeError("CUDA error: an illegal memory access was encountered")):

        def work(sizes: list[int], error: Exception = error) -> None:
            raise error

        with SimulatedMemory() as memory, pytest.raises(type(error)):
            measure_peaks(work, [[1]], memory, warm_up=0, cleanup=lambda: cleaned.append(1))
    assert len(cleaned) == 2


def test_sizes_of_a_batch_of_any_kind() -> None:
    with SimulatedMemory() as memory:
        peaks = measure_peaks(torch.sum, [torch.ones(3, 5)], memory, sizes_of=lambda batch: [[5, 1], [5, 2], [5, 3]])
        assert (peaks.counts.tolist(), peaks.largest.tolist(), peaks.sums.tolist()) == ([3], [[5, 3]], [[15, 6]])
        assert len(measure_peaks(torch.sum, [], memory)) == 0
        with pytest.raises(ValueError, match=r"the sizes of a batch must have shape \[n\] or \[n, k\]"):
            measure_peaks(torch.sum, [torch.ones(3, 5, 2)], memory)


def test_the_current_device_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for device, expected in (("cuda", "cuda:2"), (torch.device("cuda"), "cuda:2"), ("cuda:1", "cuda:1")):
        memory = device_memory(device)
        assert isinstance(memory, CudaMeter)
        assert memory.device == torch.device(expected)  # some of torch's functions take no device without one


def test_only_devices_with_a_memory() -> None:
    with pytest.raises(ValueError, match="device must be a CUDA device"):
        measure_peaks(sum, [[1]], "cpu")


def test_rows_are_taken_and_joined() -> None:
    peaks = Peaks.of([[3, 5], [4]], [100, 70], [200, 200])
    assert (peaks + peaks)[[1, 2]].allocated.tolist() == [70, 100]
    assert len(peaks[peaks.counts > 1]) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_design_covers_counts_and_sizes_smallest_first(seed: int) -> None:
    sizes = np.random.default_rng(seed).lognormal(6, 0.8, 5000).astype(int) + 1
    batches = design_batches(sizes, points=30, max_items=64)
    assert 20 <= len(batches) <= 40
    areas = [len(batch) * sizes[batch].max() for batch in batches]
    assert areas == sorted(areas)
    assert {len(batch) for batch in batches} >= {1, 64}
    assert max(sizes[batch].max() for batch in batches) == sizes.max()
    assert min(sizes[batch].max() for batch in batches) <= np.quantile(sizes, 0.03)
    like = [
        sizes[batch].min() / sizes[batch].max() for batch in batches if sizes[batch].max() < np.quantile(sizes, 0.9)
    ]
    assert min(like) > 0.6  # as in an epoch


def test_a_design_over_two_columns_reaches_the_end_of_both() -> None:
    generator = np.random.default_rng(0)
    sizes = np.stack([generator.integers(1, 100, 500), generator.integers(1, 1000, 500)], axis=1)
    batches = design_batches(sizes, points=40, max_items=16)
    assert np.max([sizes[batch].max(axis=0) for batch in batches], axis=0).tolist() == sizes.max(axis=0).tolist()


def test_a_design_of_few_samples_repeats_them() -> None:
    assert {len(batch) for batch in design_batches([7], points=6, max_items=32)} == {1, 2, 4, 8, 16, 32}
    with pytest.raises(ValueError, match="sizes must hold at least one sample"):
        design_batches([])
