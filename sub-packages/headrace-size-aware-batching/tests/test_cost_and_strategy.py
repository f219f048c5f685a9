"""Cost and strategy imply each other: one of them is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler, DistributedSizeAwareBatchSampler
from headrace.size_aware_batching._shared.state_mismatch import StateMismatchError

SIZES = np.clip(np.random.default_rng(3).lognormal(3.5, 0.8, 700), 2, 300).astype(int)
BUDGET = 600


def units(n: int, longest: float) -> float:
    return n * longest


def distributed(**options: Any) -> Any:
    return DistributedSizeAwareBatchSampler(SIZES, BUDGET, num_replicas=2, rank=0, **options)


def blockwise(**options: Any) -> Any:
    shards = [SIZES[:300], SIZES[300:]]
    return BlockwiseSizeAwareBatchSampler(shards, BUDGET, block=400, num_replicas=2, rank=0, **options)


DOORS: list[Callable[..., Any]] = [distributed, blockwise]
# What is given, and the strategy and the cost that it stands for.
IMPLIED: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "stratified", "sum"),
    ({"cost": "sum"}, "stratified", "sum"),
    ({"cost": "padded"}, "bucketed", "padded"),
    ({"cost": units}, "bucketed", units),
    ({"strategy": "stratified"}, "stratified", "sum"),
    ({"strategy": "packed"}, "packed", "sum"),
    ({"strategy": "sequential"}, "sequential", "sum"),
    ({"strategy": "bucketed"}, "bucketed", "padded"),
    ({"strategy": "sequential", "cost": "padded"}, "sequential", "padded"),
    ({"strategy": "bucketed", "cost": "sum"}, "bucketed", "sum"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("options", "strategy", "cost"), IMPLIED)
def test_one_of_them_stands_for_both(door: Callable[..., Any], options: Any, strategy: str, cost: Any) -> None:
    short, both = door(**options), door(strategy=strategy, cost=cost)
    assert (short.options.strategy, short.options.cost) == (strategy, cost)
    assert f", {strategy}, " in repr(short)
    assert list(short) == list(both)
    assert short.fingerprint == both.fingerprint
    recorded = short.state_dict()["run"][0]["options"]
    assert (recorded["strategy"], recorded["cost"]) == (strategy, "a function" if callable(cost) else cost)
    both.load_state_dict(short.state_dict())  # warnings are errors


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("options", [{"cost": "padded"}, {"strategy": "bucketed"}])
def test_padded_batches_stay_within_the_budget(door: Callable[..., Any], options: dict[str, Any]) -> None:
    assert max(len(batch) * SIZES[batch].max() for batch in door(**options)) <= BUDGET


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SequentialSampler(range(len(SIZES)))},
        {"shuffle": False},
        {"curriculum": 9},
        {"shapes": 5},
        {"length_multiple": 8, "batch_size_multiple": 2},
        {"oversize": "split", "max_length": 60},
    ],
)
@pytest.mark.parametrize("cost", ["padded", units])
def test_what_goes_with_padded_batches_goes_with_their_cost_alone(options: dict[str, Any], cost: Any) -> None:
    assert list(distributed(cost=cost, **options)) == list(distributed(cost=cost, strategy="bucketed", **options))


def test_a_state_of_another_cost_names_both_and_is_accepted_by_both() -> None:
    run, padded = distributed(), distributed(cost="padded")
    begun = [batch for _, batch in zip(range(5), run, strict=False)]
    with pytest.raises(ValueError, match=r"accept=\['cost', 'strategy'\]"):
        padded.load_state_dict(run.state_dict())
    with pytest.raises(ValueError, match=r"accept=\['cost', 'strategy'\]"):
        padded.load_state_dict(run.state_dict(), accept={"cost"})
    padded.load_state_dict(run.state_dict(), accept={"cost", "strategy"})
    rest = list(padded)
    assert max(len(batch) * SIZES[batch].max() for batch in rest) <= BUDGET
    other = distributed(cost="padded")
    other.reshard(num_replicas=2, rank=1)
    other.load_state_dict(run.state_dict(), accept={"cost", "strategy"})
    of_rank_1 = [index for step in range(5) for index in run.step(step, rank=1)]
    delivered = [index for batches in (begun, rest, list(other)) for batch in batches for index in batch]
    assert sorted([*delivered, *of_rank_1]) == list(range(len(SIZES)))


def product(count: int, largest: int) -> float:
    return count * largest


@pytest.mark.parametrize("accept", [set(), {"strategy"}, {"cost"}])
@pytest.mark.parametrize(
    ("before", "after"), [({}, {"cost": product}), ({}, {"cost": "padded"}), ({"cost": "padded"}, {})]
)
def test_a_state_of_another_cost_offers_both_to_be_accepted(
    before: dict[str, Any], after: dict[str, Any], accept: set[str]
) -> None:
    saved, resumed = (
        DistributedSizeAwareBatchSampler([4, 1, 3, 2] * 20, 12, num_replicas=1, rank=0, **options)
        for options in (before, after)
    )
    next(iter(saved))
    with pytest.raises(StateMismatchError, match=r"accept=\['cost', 'strategy'\]") as refused:
        resumed.load_state_dict(saved.state_dict(), accept=accept)
    assert refused.value.acceptable | accept == {"cost", "strategy"}
    resumed.load_state_dict(saved.state_dict(), accept={"cost", "strategy"})
    assert sorted(index for batch in resumed for index in batch) != []
