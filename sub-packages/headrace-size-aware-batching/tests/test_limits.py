"""Budgets and the longest samples that count."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    BucketedBatching,
    DistributedSizeAwareBatchSampler,
    SizeAwareBatchSampler,
    plan_step,
)
from headrace.size_aware_batching.planning.limits import checked_budget


@pytest.mark.parametrize("value", ["10", None, True, [10], 1j])
def test_budget_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match="max_total_size must be a real number"):
        checked_budget(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, -math.inf, torch.tensor(0)])
def test_budget_that_holds_nothing(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_total_size must be (greater than 0, got|a real number, got NaN)"):
        checked_budget(value)


def test_a_budget_of_edges_that_is_0_names_what_takes_its_place() -> None:
    graphs = np.array([[3, 0], [4, 0]])  # none has edges, so that "nothing would fit" is not true
    with pytest.raises(ValueError, match=r"greater than 0, got 0: where nothing limits a batch give math\.inf"):
        DistributedSizeAwareBatchSampler(graphs, (10, 0))
    assert len(DistributedSizeAwareBatchSampler(graphs, (10, math.inf)).plan()) == 1


def test_budgets() -> None:
    assert [checked_budget(value) for value in (1, 0.5, math.inf, np.int64(3), torch.tensor(2.5))] == [
        1,
        0.5,
        math.inf,
        3,
        2.5,
    ]


HUGE = [2**62, 1e19, np.float64(2.0**70)]
DOORS: dict[str, Callable[[Any, Any], object]] = {
    "distributed": DistributedSizeAwareBatchSampler,
    "two budgets": lambda sizes, budget: DistributedSizeAwareBatchSampler(np.stack([sizes] * 2, axis=1), (100, budget)),
    "blockwise": lambda sizes, budget: BlockwiseSizeAwareBatchSampler([sizes], budget),
    "step": lambda sizes, budget: plan_step(sizes, budget, num_replicas=1),
    "batches": lambda sizes, budget: SizeAwareBatchSampler(range(len(sizes)), list(sizes), budget),
    "stream": lambda sizes, budget: BucketedBatching(lambda index: sizes[index], budget),
}


@pytest.mark.parametrize("budget", HUGE, ids=str)
@pytest.mark.parametrize("door", list(DOORS))
def test_a_finite_budget_from_2_to_the_62nd_on_is_refused(door: str, budget: Any) -> None:
    sizes = np.array([4 * 10**18] * 12)  # with no limit all twelve would share a batch
    with pytest.raises(ValueError, match=r"max_total_size must be less than 2\*\*62, or math.inf for no limit, got"):
        DOORS[door](sizes, budget)


def test_max_length_cuts_the_column_it_names() -> None:
    graphs = np.array([[5, 50], [20, 60], [30, 40]])
    sampler = DistributedSizeAwareBatchSampler(graphs, (10, 60), strategy="sequential", max_length=(10, None))
    assert sampler.plan().sizes.tolist() == [[5, 50], [10, 60], [10, 40]]
    assert graphs.max() == 60
    for wrong in (10, (10,), (10, 20, 30)):
        with pytest.raises(ValueError, match="max_length must have one entry for each of the 2 columns"):
            DistributedSizeAwareBatchSampler(graphs, (30, 60), max_length=wrong)
    capped = DistributedSizeAwareBatchSampler([5, 20.5], 10, max_length=10).plan().sizes
    assert capped.tolist() == [5.0, 10.0]
    with pytest.raises(ValueError, match=r"max_length must be a single number for sizes of one column, got \(10, 20\)"):
        DistributedSizeAwareBatchSampler([5, 20], 30, max_length=(10, 20))
