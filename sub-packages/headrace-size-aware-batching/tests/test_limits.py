"""Budgets and the longest samples that count."""

import math

import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning.limits import checked_budget


@pytest.mark.parametrize("value", ["10", None, True, [10], 1j])
def test_budget_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match="max_total_size must be a real number"):
        checked_budget(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, -math.inf, torch.tensor(0)])
def test_budget_that_holds_nothing(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_total_size must be (greater than 0, got|a real number, got NaN)"):
        checked_budget(value)


def test_budgets() -> None:
    assert [checked_budget(value) for value in (1, 0.5, math.inf, np.int64(3), torch.tensor(2.5))] == [
        1,
        0.5,
        math.inf,
        3,
        2.5,
    ]


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
