"""Memory does not grow with what has been drawn, and hardly with how much there is to draw."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest

from headrace.weighted_sampler import WeightedDistributedSampler
from headrace.weighted_sampler.windows import WIDTH

MIB = 2**20


def sampler(draws: int) -> WeightedDistributedSampler:
    cuts = [0, *(draws - (draws >> place) for place in range(1, 8)), draws]
    weights = {(low, high): 0.5 + place / 4 for place, (low, high) in enumerate(pairwise(cuts))}
    return WeightedDistributedSampler(range(draws), weights, num_replicas=8, rank=3)


def peak(work: Callable[[], None]) -> float:
    """Most MiB that the work holds at once; numpy's arrays are traced too."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def draw(indices: Iterator[int], count: int) -> None:
    for _ in islice(indices, count):
        pass


@pytest.mark.parametrize("draws", [10**6, 10**7, 10**9])
def test_a_thousand_windows_stay_within_16_mib(draws: int) -> None:
    made = sampler(draws)
    assert peak(lambda: draw(iter(made), 1000 * WIDTH // 8)) <= 16


def test_a_thousand_windows_hold_no_more_than_the_first_hundred() -> None:
    indices = iter(sampler(10**8))
    gc.disable()  # a block that only the collector could free would count
    try:
        tracemalloc.start()
        draw(indices, 2000 * WIDTH // 8)
        before = tracemalloc.get_traced_memory()[0]
        draw(indices, 8000 * WIDTH // 8)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before <= MIB


def test_many_stretches_leave_nothing_behind() -> None:
    made = sampler(10**8)
    made.take(0, 2**18)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, 1000 * 10**4, 10**4):
            made.take(start, start + WIDTH)
        assert tracemalloc.get_traced_memory()[0] - before <= MIB
    finally:
        tracemalloc.stop()
