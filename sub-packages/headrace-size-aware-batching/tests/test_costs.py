"""Costs: how many samples fit, and how often a function is asked."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies_of_sizes import examples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, bucketed_batching
from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.costs import CountedCost, FunctionCost, PaddedCost
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.strategies import BatchLists


@examples(50)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=50), st.integers(1, 400), st.integers(1, 8))
def test_capacity_is_the_largest_count_that_fits(sizes: list[int], budget: int, multiple: int) -> None:
    array = np.array(sizes)
    padded = PaddedCost(multiple).capacity(budget, None).counts(array)
    for size, count in zip(sizes, padded.tolist(), strict=True):
        length = -(-size // multiple) * multiple
        assert (count == UNLIMITED) if length == 0 else count * length <= budget < (count + 1) * length
    by_function = FunctionCost(multiple, function=lambda n, longest: n * longest).capacity(budget, 1000)
    assert by_function.asked == 1000
    assert by_function.counts(array).tolist() == np.minimum(padded, 1000).tolist()


def test_a_cost_is_evaluated_a_few_times_for_each_distinct_size() -> None:
    calls = 0

    def cost(n: int, largest: float) -> float:
        nonlocal calls
        calls += 1
        return n * largest

    sizes = np.random.default_rng(0).permutation(np.repeat(np.arange(1, 2001), 10))
    options = Options("bucketed", cost=cost)
    lists = BatchLists(prepare(sizes, 16_000, options), options)
    for epoch_key in range(5):
        for _ in lists.of_epoch(epoch_key, 1).batches():
            pass
    assert calls <= 2000 * 2 * 15  # a search by doubling and halving for each size, whatever the epochs
    before = calls
    for _ in lists.of_epoch(5, 1).batches():
        pass
    assert calls == before


@pytest.mark.slow
def test_a_cost_is_evaluated_once_for_each_size_of_a_dataset_of_many() -> None:
    calls = 0

    def cost(n: int, largest: float) -> float:
        nonlocal calls
        calls += 1
        return n * largest

    sizes, options = np.arange(2**16, 2**16 + 70_000), Options("sequential", cost=cost, shuffle=False)
    lists = BatchLists(prepare(sizes, 2**18, options), options)
    lists.of_epoch(0, 1).count()
    before = calls
    for epoch_key in (1, 2):
        lists.of_epoch(epoch_key, 1).count()
    assert calls == before


@dataclass(frozen=True)
class AttentionCost(CountedCost):
    """The count times size + size**2 / 100 of the largest: all that a further cost needs."""

    name = "attention"

    def counted(self, counts: NDArray[np.int64], longest: NDArray[Any]) -> NDArray[np.float64]:
        return np.asarray(counts * (longest + longest**2 / 100))


def test_a_further_cost_is_one_class() -> None:
    sizes = np.random.default_rng(0).integers(1, 500, 5_000)
    given: Any = AttentionCost()
    sampler = DistributedSizeAwareBatchSampler(sizes, 10_000, strategy="bucketed", cost=given, num_replicas=4, rank=0)
    report = sampler.report()
    assert (report.cost, report.over_budget, report.samples) == ("attention", 0, 5_000)
    assert report.fill > 0.9
    assert sampler.fingerprint != DistributedSizeAwareBatchSampler(sizes, 10_000, num_replicas=4, rank=0).fingerprint
    for strategy in ("stratified", "packed"):
        with pytest.raises(ValueError, match="cost="):
            DistributedSizeAwareBatchSampler(sizes, 10_000, strategy=strategy, cost=given)
    streamed = bucketed_batching(range(5_000), sizes, 10_000, cost=given, buffer_size=1_000)
    batches = [sizes[batch] for batch in streamed]
    assert max(len(batch) * (batch.max() + batch.max() ** 2 / 100) for batch in batches) <= 10_000


def test_a_cost_that_is_a_product_of_columns_is_no_falling_one() -> None:
    random = np.random.default_rng(0)
    clips = np.stack([random.integers(1, 60, 3000), random.integers(64, 720, 3000), random.integers(64, 1280, 3000)], 1)
    clips = clips[clips.prod(axis=1) <= 20_000_000]

    def voxels(count: int, largest: Any) -> float:
        return float(count * np.prod(largest))

    sampler = DistributedSizeAwareBatchSampler(clips, 20_000_000, strategy="bucketed", cost=voxels)
    in_order = DistributedSizeAwareBatchSampler(clips, 20_000_000, strategy="sequential", cost=voxels)
    plan, following = sampler.plan(0), sampler.plan(1)
    assert sorted(plan.indices.tolist()) == list(range(len(clips)))
    assert all(voxels(len(batch), clips[batch].max(axis=0)) <= 20_000_000 for batch in plan)
    assert len(plan) < 0.8 * len(in_order.plan())
    assert plan.report(other=following).co_occurrence < 500  # 842 where all of an epoch is one window


def units(count: int, largest: float) -> float:
    return count * (largest + largest**2 / 1000)


@pytest.mark.parametrize("options", [{}, {"max_items": 7}, {"length_multiple": 8}, {"oversize": "own_batch"}])
def test_a_function_is_the_same_however_many_samples_there_are(options: dict[str, Any]) -> None:
    few, many = (
        DistributedSizeAwareBatchSampler(sizes, 2000, cost=units, num_replicas=1, rank=0, **options)
        for sizes in (np.arange(3, 303), np.tile(np.arange(3, 303), 3))
    )
    with pytest.raises(ValueError, match=r"differs in sizes \(900 samples, here 300\): construct"):
        few.load_state_dict(many.state_dict())


def test_shapes_are_held_against_the_budget_also_beyond_the_number_of_samples() -> None:
    sizes, shape = np.arange(1, 301), (600, 300)
    options: dict[str, Any] = {"shapes": [shape], "num_replicas": 1, "rank": 0}
    for cost in ("padded", lambda count, largest: count * largest):
        options["cost"] = cost
        with pytest.raises(ValueError, match=r"shapes must fit max_total_size .* where 599 samples fit"):
            DistributedSizeAwareBatchSampler(sizes, 179_999, **options)
        assert DistributedSizeAwareBatchSampler(sizes, 180_000, **options).shapes == (shape,)
    with pytest.raises(ValueError, match="where 4 samples fit"):
        DistributedSizeAwareBatchSampler(sizes, 180_000, max_items=4, **options)


def test_a_function_is_asked_for_no_more_than_max_items_also_by_a_report() -> None:
    asked = list[int]()

    def cost(count: int, largest: int) -> float:
        asked.append(count)
        return float(count * largest)

    sampler = DistributedSizeAwareBatchSampler(np.arange(1, 100), 2000, cost=cost, max_items=8, num_replicas=1, rank=0)
    assert sampler.report().fewest > 0
    assert max(asked) == 8
