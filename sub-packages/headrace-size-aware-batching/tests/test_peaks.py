import gc
import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from headrace.size_aware_batching.memory import collect_peaks, measured


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


def test_one_item(meter: PythonMeter) -> None:
    feature, peak = measured(lambda n: len(bytearray(n)), 10**6, meter)
    assert feature == 10**6
    assert 10**6 <= peak < 11 * 10**5


def test_peaks_follow_the_work_and_cleanup_runs_each_time(meter: PythonMeter) -> None:
    cleaned: list[int] = []
    sizes = [10**5, 3 * 10**6, 10**6]
    features, peaks = collect_peaks(sizes, lambda n: len(bytearray(n)), meter, lambda: cleaned.append(1))
    assert features == sizes
    assert all(size <= peak < size + 10**5 for size, peak in zip(sizes, peaks, strict=True))
    assert len(cleaned) == 3


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


def test_other_errors_pass_after_cleanup(meter: PythonMeter) -> None:
    cleaned: list[int] = []
    with pytest.raises(ZeroDivisionError):
        collect_peaks([0], lambda n: 1 / n, meter, lambda: cleaned.append(1))
    assert cleaned == [1]
