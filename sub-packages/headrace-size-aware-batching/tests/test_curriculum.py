"""A curriculum: the same batches, the short ones first, at every position and world size."""

import tracemalloc
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples
from test_laws import all_ranks, repeats

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

LENGTHS = np.random.default_rng(0).lognormal(np.log(360), 0.8, 60_000).clip(8, 2048).astype(np.int64)
PADDED: dict[str, Any] = {"strategy": "bucketed", "cost": "padded", "num_replicas": 1, "rank": 0}


def made(sizes: Any, budget: Any, curriculum: int | None, **options: Any) -> DistributedSizeAwareBatchSampler:
    return DistributedSizeAwareBatchSampler(sizes, budget, curriculum=curriculum, **(PADDED | options))


def listed(sampler: DistributedSizeAwareBatchSampler, epoch: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(batch.tolist()) for batch in sampler.plan(epoch))


@examples(60)
@given(cases(), st.sampled_from(["sum", "padded"]), st.integers(1, 300), st.sampled_from([None, 1, 7, 40]))
def test_the_batches_are_those_without_it_in_another_order(
    case: Case, cost: str, curriculum: int, window: int | None
) -> None:
    sampler, plain = (made(*case, steps, cost=cost, window=window) for steps in (curriculum, None))
    for epoch in (0, 1, 5):
        assert listed(sampler, epoch) == listed(plain, epoch)
        sampler.set_epoch(epoch)
        assert list(sampler) == [batch.tolist() for batch in sampler.plan(epoch)]
        assert len(sampler) == len(plain)


@repeats
@examples(40)
@given(cases(), st.integers(1, 200), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2), st.data())
def test_it_resumes_at_any_step_and_world_size(
    case: Case, curriculum: int, world: int, other: int, epoch: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"curriculum": curriculum, "window": 40}
    start = made(*case, curriculum, window=40)
    start.set_epoch(epoch)
    way: Any = ("bucketed", "padded")
    uninterrupted = all_ranks(case, way, world, start.state_dict(), **options)
    stop = data.draw(st.integers(0, len(uninterrupted[0])))
    running = made(*case, curriculum, window=40, num_replicas=world, rank=0)
    running.set_epoch(epoch)
    list(islice(iter(running), stop))
    state = running.state_dict()
    assert all_ranks(case, way, world, state, **options) == [rank[stop:] for rank in uninterrupted]
    rest = all_ranks(case, way, other, state, **options)
    delivered = {i for rank in uninterrupted for batch in rank[:stop] for i in batch}
    assert delivered | {i for rank in rest for batch in rank for i in batch} == set(range(len(case[0])))


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("ramp", [300, 900, 6000])
def test_no_batch_is_longer_than_the_ramp_allows(ramp: int, window: int | None) -> None:
    sampler = made(LENGTHS, 16384, ramp, window=window)
    count = len(sampler)
    for epoch in range(4):
        plan = sampler.plan(epoch)
        work = np.array([len(b) * (s := float(LENGTHS[b].max())) * (1 + s / 2048) for b in plan])
        shares = np.argsort(np.argsort(work)) / count
        passed = epoch * count + np.arange(count)
        allowed = np.sqrt(0.01**2 + (1 - 0.01**2) * np.minimum(passed / ramp, 1))
        planned_together = min(count, 2 * ramp)  # what has to come by its end does
        allowed = np.maximum(allowed, (np.arange(count) + 64) / planned_together)
        chunk = 64 / planned_together  # batches of like work that stay together
        assert (shares <= allowed + 2.5 * chunk).all()
        after = shares[passed >= ramp]
        if ramp == 300 and epoch:
            assert abs(after[: len(after) // 2].mean() - 0.5) < 0.1  # as without it


def test_the_first_batches_are_short_and_the_rest_is_not_starved() -> None:
    sampler, plain = made(LENGTHS, 16384, 500), made(LENGTHS, 16384, None)
    longest = [int(LENGTHS[batch].max()) for batch in sampler]
    usual = [int(LENGTHS[batch].max()) for batch in plain]
    assert np.mean(longest[:64]) < 0.3 * np.mean(usual)
    assert np.mean(longest[:64]) < np.mean(longest[64:192]) < np.mean(longest[192:500])
    assert sampler.report().fill == plain.report().fill
    assert sampler.report(0).padding == plain.report(0).padding
    assert sampler.plan().report(8).imbalance == pytest.approx(plain.plan().report(8).imbalance, abs=0.005)


def test_epochs_behind_the_ramp_are_as_without_it() -> None:
    sampler, plain = made(LENGTHS, 16384, 500), made(LENGTHS, 16384, None)
    for epoch in (1, 7):
        assert [b.tolist() for b in sampler.plan(epoch)] == [b.tolist() for b in plain.plan(epoch)]


def test_looking_at_another_epoch_moves_no_iteration() -> None:
    whole = list(made(LENGTHS[:5000], 4096, 300, window=500))
    sampler = made(LENGTHS[:5000], 4096, 300, window=500)
    batches = iter(sampler)
    begun = list(islice(batches, 40))
    sampler.plan(9)
    sampler.report(1)
    assert [sampler.batch(number) for number in (0, 200)] == [whole[0], whole[200]]
    assert begun + list(batches) == whole


def test_only_what_the_ramp_needs_is_planned_together() -> None:
    sizes = np.tile(LENGTHS, 10)
    tracemalloc.start()
    try:
        peaks = []
        for curriculum in (50, len(sizes)):
            sampler = made(sizes, 16384, curriculum, window=10_000)
            len(sampler)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            next(iter(sampler))
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert peaks[0] < peaks[1] / 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "stratified", "cost": "sum"}, "curriculum=9 goes with strategy='bucketed', got 'stratified'"),
        ({"strategy": "packed", "cost": "sum"}, "curriculum=9 goes with strategy='bucketed', got 'packed'"),
        ({"strategy": "sequential"}, "curriculum=9 goes with strategy='bucketed', got 'sequential'"),
        ({"shuffle": False}, "curriculum=9 goes with shuffle=True"),
        ({"sampler": [1, 2]}, "curriculum=9 was given beside sampler"),
        ({"curriculum": 0}, "curriculum must be an int >= 1, got 0"),
    ],
)
def test_what_has_no_order_of_lengths_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedSizeAwareBatchSampler(LENGTHS, 16384, **(PADDED | {"curriculum": 9} | options))


def test_no_samples_have_no_ramp() -> None:
    assert list(made([], 10, 5)) == []
