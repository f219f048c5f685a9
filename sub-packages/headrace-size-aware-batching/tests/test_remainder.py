"""The last steps of an epoch: what the world size does not divide is split, and costs the same on all ranks."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.size_aware_batching import BatchPlan, DistributedSizeAwareBatchSampler

N = 300_000


def lengths(longest: int, count: int = N) -> NDArray[np.int32]:
    drawn = np.random.default_rng(0).lognormal(np.log(360), 0.8, count)
    return np.clip(drawn, 8, longest).astype(np.int32)


class Mesh:
    """Ranks one after the other."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank = ranks, 0

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


@pytest.mark.parametrize("kind", ["int64", "uint16"])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1.03),
        ({"strategy": "packed"}, 1.03),
        ({"strategy": "bucketed", "cost": "padded"}, 1.15),
        ({"strategy": "bucketed", "cost": "padded", "max_items": 20}, 1.25),
        ({"columns": 2}, 1.03),
        ({"work": np.random.default_rng(1).exponential(size=5_000)}, 1.06),
    ],
)
def test_the_last_step_costs_the_same_on_all_ranks(ranks: int, options: dict[str, Any], most: float, kind: str) -> None:
    sizes = lengths(2048, 5_000).astype(kind)
    options = dict(options)
    two = options.pop("columns", 1) == 2
    given, budget = (np.stack([sizes, sizes[::-1]], axis=1), [16384, 16384]) if two else (sizes, 16384)
    mesh = Mesh(ranks)
    sampler = DistributedSizeAwareBatchSampler(given, budget, mesh=mesh, **options)

    last = []
    for rank in range(ranks):
        mesh.rank = rank
        last.append(list(sampler)[-1])
    assert len(sampler.plan()) % ranks, "nothing was split"
    offsets = np.cumsum([0, *map(len, last)])
    budgets, cost = tuple(np.atleast_1d(budget)), options.get("cost", "sum")
    together = BatchPlan(np.concatenate(last), offsets, given, budgets, cost, work=sampler.work)
    assert together.report(ranks).imbalance <= most
    assert together.report(ranks).over_budget == 0
    assert np.diff(offsets).max() <= options.get("max_items", 5_000)


def test_the_last_step_is_dealt_with_sizes_that_are_almost_nothing() -> None:
    sizes = np.array([1.0, 0.5, 1e-310, 0.3, 0.2])
    samplers = [
        DistributedSizeAwareBatchSampler(sizes, 10, strategy="bucketed", cost="padded", num_replicas=3, rank=rank)
        for rank in range(3)
    ]
    found = [list(sampler) for sampler in samplers]
    assert sorted(index for [batch] in found for index in batch) == list(range(5))


@pytest.mark.parametrize("cost", ["sum", "padded", lambda count, largest: count * largest[0]])
def test_the_last_step_of_sizes_in_a_single_column(cost: Any) -> None:
    sizes = np.array([[3], [4], [5], [2], [7]])
    samplers = [
        DistributedSizeAwareBatchSampler(sizes, 40, strategy="bucketed", cost=cost, num_replicas=3, rank=rank)
        for rank in range(3)
    ]
    found = [list(sampler) for sampler in samplers]
    assert sorted(index for [batch] in found for index in batch) == list(range(5))
