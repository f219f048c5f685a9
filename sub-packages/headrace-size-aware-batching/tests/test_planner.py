"""Planners: when an order is planned, and what they keep in memory."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.size_aware_batching.planning.options import STRATEGIES, Options, Strategy
from headrace.size_aware_batching.planning.order import SliceOrder
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.strategies import BatchLists


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_order_is_planned_once_for_all_numbers_of_batches(strategy: Strategy) -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 40_000)
    options = Options(strategy, shuffle=False, window=4000)
    asked = 0

    def give(start: int, stop: int) -> NDArray[np.int64]:
        nonlocal asked
        asked += stop - start
        return np.arange(start, stop)

    planned = BatchLists(prepare(sizes, 1000, options), options).of_epoch(7, 8, order=SliceOrder(len(sizes), give))
    count = planned.count()
    assert asked <= 2 * len(sizes)  # next-fit looks twice at what a chunk leaves over
    for number in (0, 17, count // 2, count - 1):
        asked = 0
        batch = planned.batch(number)
        assert asked <= 4000
        assert 0 < sizes[batch].sum() <= 1000
        asked = 0
        planned.batch(number)
        assert asked <= len(batch)
    listed = [batch for indices, offsets in planned.batches() for batch in np.split(indices, offsets[1:-1])]
    assert [planned.batch(number).tolist() for number in (0, 17, count - 1)] == [
        listed[number].tolist() for number in (0, 17, count - 1)
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    **{strategy: {"strategy": strategy} for strategy in STRATEGIES},
    "a sampler": {"sampler": list(range(3000))},
    "a curriculum": {"curriculum": 10},
    "a plan cache": {"plan_cache": "cache"},
    "tokens": {"tokens_per_step": 5000},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_arrays_of_a_sampler_go_with_its_last_reference(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(1, 99, 3000)
    if "plan_cache" in options:
        options = options | {"plan_cache": tmp_path}
    made = OptimizerStepBatchSampler if "tokens_per_step" in options else DistributedSizeAwareBatchSampler

    def used() -> weakref.ref[Any]:
        sampler = made(sizes, 500, **options)
        batches = iter(sampler)
        next(batches)
        assert len(sampler) > sampler.remaining > 0
        assert sampler.plan().keys(0) != sampler.step(1)
        assert sampler.state_dict()["step"] == 1
        assert repr(sampler)
        return weakref.ref(sampler.sizes)

    gc.disable()  # which would free what refers to itself, but late
    try:
        assert used()() is None
    finally:
        gc.enable()
