"""Peaks of memory, on a CUDA device where there is one."""

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.size_aware_batching.memory import collect_peaks
from headrace.size_aware_batching.memory_model import PolynomialRegression
from headrace.size_aware_batching.utils import collect_cuda_peak_alloc


class PythonMeter:
    """The memory of Python's own allocator: a real meter that is on every machine."""

    def start(self) -> None:
        gc.collect()
        tracemalloc.reset_peak()

    def peak(self) -> int:
        return tracemalloc.get_traced_memory()[1]


@pytest.fixture
def meter() -> Iterator[PythonMeter]:
    tracemalloc.start()
    yield PythonMeter()
    tracemalloc.stop()


@pytest.mark.slow
def test_peaks_follow_the_work_and_cleanup_runs_each_time(meter: PythonMeter) -> None:
    cleaned: list[int] = []
    sizes = [10**5, 3 * 10**6, 10**6]
    features, peaks = collect_peaks(sizes, lambda n: len(bytearray(n)), meter, lambda: cleaned.append(1))
    assert features == sizes
    assert all(size <= peak < size + 10**5 for size, peak in zip(sizes, peaks, strict=True))
    assert len(cleaned) == 3


@pytest.mark.slow
def test_running_out_of_memory_is_named_and_left_out(meter: PythonMeter) -> None:
    cleaned: list[int] = []

    def work(n: int) -> int:
        if n > 5:
            raise torch.OutOfMemoryError("full")
        return n

    with pytest.warns(UserWarning, match="memory") as caught:
        features, peaks = collect_peaks([1, 9, 2, 8], work, meter, lambda: cleaned.append(1))
    assert [str(warning.message) for warning in caught] == [
        "the item at position 1 does not fit into memory and is left out: full",
        "the item at position 3 does not fit into memory and is left out: full",
        "2 of 4 items did not fit into memory: positions 1, 3",
    ]
    assert caught[0].filename == __file__
    assert features == [1, 2]
    assert len(peaks) == 2
    assert len(cleaned) == 4


@pytest.mark.slow
def test_libraries_run_out_of_memory_in_words_of_their_own(meter: PythonMeter) -> None:
    def work(n: int) -> int:
        if n > 5:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return n

    with pytest.warns(UserWarning, match="position 1 does not fit into memory and is left out: CUDA error: CUBLAS"):
        features, _ = collect_peaks([1, 9, 2], work, meter)
    assert features == [1, 2]


def test_other_errors_pass_after_cleanup(meter: PythonMeter) -> None:
    cleaned: list[int] = []
    with pytest.raises(ZeroDivisionError):
        collect_peaks([0], lambda n: 1 / n, meter, lambda: cleaned.append(1))
    assert cleaned == [1]


HAS_CUDA = torch.cuda.is_available()


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")(test))


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", torch.device("meta")])
def test_only_cuda_devices(device: Any) -> None:
    with pytest.raises(ValueError, match=r'device must be a CUDA device such as torch.device\("cuda:0"\), got'):
        collect_cuda_peak_alloc([1], lambda x: x, device)


@pytest.mark.skipif(HAS_CUDA, reason="needs a machine without a CUDA device")
def test_no_cuda_here() -> None:
    with pytest.raises(RuntimeError, match="use a GPU machine"):
        collect_cuda_peak_alloc([1], lambda x: x, torch.device("cuda:0"))


@gpu
def test_functions_are_checked() -> None:
    device = torch.device("cuda:0")
    with pytest.raises(TypeError, match="work must be callable"):
        collect_cuda_peak_alloc([1], 5, device)  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError, match="cleanup must be callable"):
        collect_cuda_peak_alloc([1], int, device, 5)  # type: ignore[arg-type]  # the point


@gpu
def test_known_allocations_are_measured() -> None:
    device = torch.device("cuda:0")
    floor = torch.cuda.memory_allocated(device)
    sizes = [2**20, 2**24, 2**22]
    features, peaks = collect_cuda_peak_alloc(
        sizes, lambda n: torch.empty(n, dtype=torch.uint8, device=device).numel(), device
    )
    assert features == sizes
    assert [peak - floor for peak in peaks] == sizes


@gpu
def test_a_training_step_is_modelled_by_a_polynomial() -> None:
    device = torch.device("cuda:0")
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    generator = torch.Generator(device).manual_seed(0)

    def work(length: int) -> float:
        optimizer.zero_grad()
        layer(torch.randn(4, length, 64, device=device, generator=generator)).sum().backward()
        optimizer.step()
        return float(length)

    lengths = [512, *range(128, 1025, 128)]
    features, peaks = collect_cuda_peak_alloc(lengths, work, device, cleanup=lambda: layer.zero_grad(set_to_none=True))
    x, y = torch.tensor(features[1:]), torch.tensor(peaks[1:], dtype=torch.float64)
    model = PolynomialRegression(2)
    model.fit(x, y)
    assert torch.allclose(model(x), y, rtol=0.1)
    assert (model.predict_upper(x) >= y).all()
    on_device = PolynomialRegression(2).to(device)
    on_device.fit(x, y)
    assert torch.allclose(on_device(x.to(device)).cpu(), model(x))


@gpu
def test_really_running_out_of_memory() -> None:
    device = torch.device("cuda:0")

    def work(n: int) -> int:
        return torch.empty(n, dtype=torch.uint8, device=device).numel()

    with pytest.warns(UserWarning, match="item at position 0 does not fit into memory"):
        features, _ = collect_cuda_peak_alloc([2**50, 2**20], work, device)
    assert features == [2**20]


@pytest.mark.parametrize("device", ["nonsense", 1.5, [1]])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(TypeError, match=r'device must be a torch.device such as "cuda:0"'):
        collect_cuda_peak_alloc([1], lambda x: x, device)
