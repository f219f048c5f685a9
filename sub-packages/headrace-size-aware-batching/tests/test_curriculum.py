"""A curriculum: short samples first, batches as full as before, at every position and world size."""

import tracemalloc
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples
from test_laws import all_ranks, cost_of, repeats, samples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

LENGTHS = np.random.default_rng(0).lognormal(np.log(360), 0.8, 60_000).clip(8, 2048).astype(np.int64)
MIXED = ["stratified", "packed"]  # strategies whose batches hold samples of all sizes
WAYS: Any = [("stratified", "sum"), ("packed", "sum"), ("bucketed", "sum"), ("bucketed", "padded")]
PADDED: dict[str, Any] = {"strategy": "bucketed", "cost": "padded", "num_replicas": 1, "rank": 0}


def made(sizes: Any, budget: Any, curriculum: int | None, **options: Any) -> Any:
    return sampler_with(sizes, budget, curriculum=curriculum, **(PADDED | options))


def listed(sampler: DistributedSizeAwareBatchSampler, epoch: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(batch.tolist()) for batch in sampler.plan(epoch))


def lengths_over(sampler: DistributedSizeAwareBatchSampler, steps: int, parts: int, epoch: int = 0) -> Any:
    """Return the mean and the longest length in equal parts of the first steps of an epoch."""
    batches = list(sampler.plan(epoch))[: steps * sampler.num_replicas]
    each = [
        np.concatenate([LENGTHS[b] for b in batches[len(batches) * k // parts :][: len(batches) // parts]])
        for k in range(parts)
    ]
    return [part.mean() for part in each], [part.max() for part in each]


@repeats
@examples(50)
@given(cases(), st.sampled_from(WAYS), st.integers(1, 200), st.sampled_from([1, 2, 5]), st.integers(0, 2))
def test_each_sample_comes_once_and_no_batch_is_over_the_budget(
    case: Case, way: Any, curriculum: int, world: int, epoch: int
) -> None:
    state = made(*case, curriculum, strategy=way[0], cost=way[1])
    state.set_epoch(epoch)
    ranks = all_ranks(case, way, world, state.state_dict(), curriculum=curriculum)
    found = samples(ranks)
    assert set(found) == set(range(len(case[0])))
    if len(case[0]) >= len(ranks[0]) * world:
        assert set(found.values()) <= {1}
    assert all(cost_of(batch, case[0], way[1]) <= case[1] for batches in ranks for batch in batches)


@examples(20)
@given(cases(), st.sampled_from(MIXED), st.integers(1, 9), st.sampled_from([None, 7, 40]), st.integers(1, 99))
def test_the_number_of_samples_and_the_window_are_limits_as_without_it(
    case: Case, strategy: str, max_items: int, window: int | None, curriculum: int
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum", "max_items": max_items, "window": window}
    sampler = made(*case, curriculum, **options)
    plan = list(sampler.plan())
    assert [sampler.batch(number) for number in range(len(plan))] == [batch.tolist() for batch in plan]
    assert all(len(batch) <= max_items for batch in plan)
    assert all(case[0][batch].sum() <= case[1] for batch in plan)
    assert sorted(np.concatenate([*plan, np.zeros(0, np.int64)]).tolist()) == list(range(len(case[0])))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 5, 8])
@pytest.mark.parametrize("steps", [1, 30, 100, 400])
@pytest.mark.parametrize("strategy", MIXED)
def test_batches_are_as_full_as_without_it(strategy: str, steps: int, world: int) -> None:
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum", "num_replicas": world}
    sampler, plain = (made(LENGTHS[:20_000], 16384, curriculum, **options) for curriculum in (steps, None))
    assert sampler.report().fill > 0.99 * plain.report().fill
    assert sampler.report().imbalance < plain.report().imbalance + 0.005
    assert len(sampler) <= 1.01 * len(plain) + 1


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("strategy", MIXED)
def test_lengths_rise_over_the_steps_that_were_asked_for(strategy: str, world: int) -> None:
    steps = 800 // world
    sampler = made(LENGTHS, 16384, steps, strategy=strategy, cost="sum", num_replicas=world)
    mean, longest = lengths_over(sampler, steps, 8)
    assert mean == sorted(mean)
    assert longest == sorted(longest)
    assert 3 * mean[0] < LENGTHS.mean()
    before = np.concatenate(list(sampler.plan())[: steps * world])
    ranked = np.argsort(np.argsort(LENGTHS, kind="stable"))
    behind = np.concatenate(list(sampler.plan())[steps * world :])
    assert ranked[before].max() >= 0.95 * len(LENGTHS)
    assert LENGTHS[behind].max() == LENGTHS.max()
    thirds = [LENGTHS[part].mean() for part in np.array_split(behind, 3)]
    assert max(thirds) < 1.03 * min(thirds)  # then any of those left come, the long ones that waited everywhere


@pytest.mark.parametrize("strategy", MIXED)
def test_no_sample_is_longer_than_the_ramp_allows(strategy: str) -> None:
    sampler = made(LENGTHS, 16384, 100, strategy=strategy, cost="sum", num_replicas=8)
    ascending = np.sort(LENGTHS)
    for number, batch in enumerate(list(sampler.plan())[64:800], 64):  # at first the shortest 1 % make no window
        share = np.sqrt(0.01**2 + (1 - 0.01**2) * number / 800)
        assert LENGTHS[batch].max() <= ascending[int(share * len(LENGTHS))]


@pytest.mark.parametrize("strategy", MIXED)
def test_what_is_short_is_decided_by_work(strategy: str) -> None:
    work = LENGTHS.max() - LENGTHS + 1.0
    sampler = made(LENGTHS, 16384, 400, strategy=strategy, cost="sum", work=work)
    mean, _ = lengths_over(sampler, 400, 4)
    assert mean == sorted(mean, reverse=True)


@pytest.mark.parametrize("strategy", MIXED)
def test_a_curriculum_of_several_epochs_goes_on_in_each(strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum"}
    plain = made(LENGTHS[:20_000], 16384, None, **options)
    sampler = made(LENGTHS[:20_000], 16384, 3 * len(plain), **options)
    first = [lengths_over(sampler, 100, 1, epoch)[0] for epoch in range(4)]
    assert first == sorted(first)
    assert 1.1 * first[0][0] < first[1][0]
    for epoch in (3, 8):
        assert [b.tolist() for b in sampler.plan(epoch)] == [b.tolist() for b in plain.plan(epoch)]
    assert sorted(sampler.plan(1).indices.tolist()) == list(range(20_000))


@pytest.mark.parametrize("strategy", MIXED)
def test_the_last_step_of_an_epoch_has_samples_for_all_ranks(strategy: str) -> None:
    for count in range(4000, 4100, 9):
        for curriculum in (60, 1000):
            sampler = made(
                LENGTHS[:count], 16384, curriculum, strategy=strategy, cost="sum", num_replicas=8, rank="all"
            )
            found = [index for batch in sampler for index in batch]  # a repeated sample would be a warning
            assert sorted(found) == list(range(count))


@pytest.mark.parametrize("strategy", [*MIXED, "bucketed"])
def test_steps_of_a_rank_are_counted_on_any_number_of_ranks(strategy: str) -> None:
    for world in (1, 2, 8):
        sampler = made(LENGTHS, 16384, 80, strategy=strategy, cost="sum", num_replicas=world)
        mean, _ = lengths_over(sampler, 80, 2)
        batches = list(sampler.plan())
        assert 1.2 * mean[0] < mean[1]
        assert np.mean(LENGTHS[np.concatenate(batches[: 80 * world])]) < 0.8 * np.mean(
            LENGTHS[np.concatenate(batches[80 * world : 160 * world])]
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*MIXED, "bucketed"])
def test_a_run_keeps_its_curriculum_when_the_number_of_ranks_changes(strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum"}
    sampler = made(LENGTHS[:20_000], 4096, 200, num_replicas=4, **options)
    whole = [
        list(one)
        for one in (made(LENGTHS[:20_000], 4096, 200, num_replicas=4, **(options | {"rank": r})) for r in range(4))
    ]
    list(islice(iter(sampler), 30))
    state = sampler.state_dict()
    assert state["run"][0]["world"] == 4, "the ranks that the curriculum counts"
    other = made(LENGTHS[:20_000], 4096, 200, num_replicas=1, **options)
    other.load_state_dict(state)
    assert list(other)[:200] == [whole[number % 4][30 + number // 4] for number in range(200)]
    other.set_epoch(1)
    sampler.set_epoch(1)
    assert [b.tolist() for b in other.plan()] == [b.tolist() for b in sampler.plan()]
    assert other.state_dict()["run"][0]["world"] == 4


def test_a_sampler_built_before_the_process_group_counts_the_ranks_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"strategy": "stratified", "cost": "sum", "num_replicas": None, "rank": None}
    sampler = made(LENGTHS, 16384, 100, **options)
    assert len(sampler) == len(sampler.plan())
    begun = sampler.state_dict()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    again = made(LENGTHS, 16384, 100, strategy="stratified", cost="sum", num_replicas=4, rank=1)
    sampler.load_state_dict(begun)
    assert list(islice(sampler, 50)) == list(islice(again, 50))


@pytest.mark.parametrize("strategy", MIXED)
def test_several_budgets_hold(strategy: str) -> None:
    atoms = np.random.default_rng(1).lognormal(3.2, 0.5, 20_000).clip(2, 200).astype(np.int64)
    edges = (atoms * np.random.default_rng(2).uniform(5, 14, 20_000)).astype(np.int64)
    sizes = np.stack([atoms, edges], axis=1)
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum", "num_replicas": 2}
    sampler, plain = (made(sizes, (400, 4000), curriculum, **options) for curriculum in (200, None))
    plan = sampler.plan()
    assert sorted(plan.indices.tolist()) == list(range(20_000))
    totals = np.add.reduceat(sizes[plan.indices], plan.offsets[:-1], axis=0)
    assert (totals <= (400, 4000)).all()
    assert sampler.report().fill > 0.99 * plain.report().fill
    means = [part.mean() for part in np.array_split(totals[:400, 0] / np.diff(plan.offsets)[:400], 4)]
    assert means == sorted(means)


@pytest.mark.slow
@pytest.mark.parametrize("oversize", ["skip", "own_batch"])
@pytest.mark.parametrize("strategy", MIXED)
def test_samples_that_are_too_large_are_treated_as_without_it(strategy: str, oversize: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "cost": "sum", "oversize": oversize}
    sampler, plain = (made(LENGTHS[:6000], 1500, curriculum, **options) for curriculum in (300, None))
    assert sorted(sampler.plan().indices.tolist()) == sorted(plain.plan().indices.tolist())
    assert sampler.report().over_budget == plain.report().over_budget


def test_shapes_go_with_it_and_short_ones_come_first() -> None:
    sampler = made(LENGTHS, 16384, 100, shapes=6, num_replicas=8)
    plain = made(LENGTHS, 16384, None, shapes=6, num_replicas=8)
    assert sampler.shapes == plain.shapes
    assert listed(sampler, 0) == listed(plain, 0)
    mean, _ = lengths_over(sampler, 100, 2)
    assert 1.2 * mean[0] < mean[1]


TOKENS: dict[str, Any] = {"strategy": "stratified", "cost": "sum", "tokens_per_step": 60_000}
SCHEDULE = [(0, 30_000), (40, 60_000), (90, 120_000)]


def steps_of(sampler: Any, world: int) -> list[list[int]]:
    """Return the samples of each optimizer step, whatever the rank."""
    ranks = [
        list(one.optimizer_steps(one))
        for one in (
            made(
                LENGTHS[:20_000],
                16384,
                sampler.options.curriculum,
                **(
                    TOKENS
                    | {
                        "tokens_per_step": sampler.tokens_per_step,
                        "num_replicas": world,
                        "rank": rank,
                        "strategy": sampler.options.strategy,
                        "cost": sampler.options.cost,
                    }
                ),
            )
            for rank in range(world)
        )
    ]
    return [sorted({i for rank in ranks for batch in rank[k] for i in batch}) for k in range(len(ranks[0]))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padded", "tokens"),
    [
        (False, 60_000),
        (True, SCHEDULE),
        pytest.param(False, SCHEDULE, marks=pytest.mark.nightly),
        pytest.param(True, 60_000, marks=pytest.mark.nightly),
    ],
)
def test_with_tokens_per_step_optimizer_steps_are_counted(padded: bool, tokens: Any) -> None:
    options = TOKENS | {"tokens_per_step": tokens} | ({"strategy": "bucketed", "cost": "padded"} if padded else {})
    sampler = made(LENGTHS[:20_000], 16384, 50, **options)
    steps = steps_of(sampler, 2)
    assert sorted(i for step in steps for i in step) == list(range(20_000))
    assert len(steps) == sampler.num_optimizer_steps()
    for number, step in enumerate(steps[:-1]):
        assert abs(LENGTHS[step].sum() - sampler.tokens_at(number)) <= LENGTHS.max()
    mean = [LENGTHS[step].mean() for step in steps]
    parts = [np.mean(part) for part in np.array_split(mean[:50], 5)]
    assert parts == sorted(parts)
    assert 2 * parts[0] < np.mean(mean[50:])
    ranked = np.argsort(np.argsort(LENGTHS[:20_000], kind="stable"))
    for number, step in enumerate(steps[5:50], 5):
        share = np.sqrt(0.01**2 + (1 - 0.01**2) * (number + 1) / 50)
        assert np.quantile(ranked[step], 0.95) < share * 20_000
    assert steps_of(sampler, 3) == steps
    plain = made(LENGTHS[:20_000], 16384, None, **options)
    assert plain.num_optimizer_steps() == sampler.num_optimizer_steps()
    assert [b.tolist() for b in sampler.plan(1)] == [b.tolist() for b in plain.plan(1)]


@pytest.mark.slow
@repeats
@examples(4)
@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 5), st.integers(0, 1), st.data())
def test_with_tokens_per_step_it_resumes_at_any_batch_and_world_size(
    curriculum: int, world: int, other: int, epoch: int, data: st.DataObject
) -> None:
    sizes = LENGTHS[:4000]
    options = TOKENS | {"tokens_per_step": [(0, 30_000), (20, 60_000)], "num_replicas": world}
    samplers = [made(sizes, 16384, curriculum, **(options | {"rank": rank})) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    ranks = [list(sampler) for sampler in samplers]
    stop = data.draw(st.integers(0, len(ranks[0])))
    running = made(sizes, 16384, curriculum, **options)
    running.set_epoch(epoch)
    list(islice(iter(running), stop))
    state = running.state_dict()
    resumed = made(sizes, 16384, curriculum, **options)
    resumed.load_state_dict(state)
    assert list(resumed) == ranks[0][stop:]
    rest = [made(sizes, 16384, curriculum, **(options | {"num_replicas": other, "rank": r})) for r in range(other)]
    for one in rest:
        one.load_state_dict(state)
    delivered = [i for rank in ranks for batch in rank[:stop] for i in batch]
    assert sorted(delivered + [i for one in rest for batch in one for i in batch]) == list(range(4000))


@examples(30)
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
@examples(20)
@given(
    cases(),
    st.sampled_from(WAYS),
    st.integers(1, 200),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 2),
    st.data(),
)
def test_it_resumes_at_any_step_and_world_size(
    case: Case, way: Any, curriculum: int, world: int, other: int, epoch: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"curriculum": curriculum, "window": 40}
    kind: dict[str, Any] = {"window": 40, "strategy": way[0], "cost": way[1]}
    start = made(*case, curriculum, **kind)
    start.set_epoch(epoch)
    uninterrupted = all_ranks(case, way, world, start.state_dict(), **options)
    stop = data.draw(st.integers(0, len(uninterrupted[0])))
    running = made(*case, curriculum, num_replicas=world, **kind)
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
    assert np.mean(longest[:64]) < 0.35 * np.mean(usual)
    assert np.mean(longest[:64]) < np.mean(longest[64:192]) < np.mean(longest[192:500])
    assert sampler.report().fill == plain.report().fill
    assert sampler.report(0).padding == plain.report(0).padding
    of_8 = {"num_replicas": 8, "rank": 0}
    imbalances = [made(LENGTHS, 16384, steps, **of_8).report().imbalance for steps in (500, None)]
    assert imbalances[0] == pytest.approx(imbalances[1], abs=0.005)


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
        (
            {"strategy": "sequential"},
            "curriculum=9 goes with .* got 'sequential', which keeps the order of the samples",
        ),
        ({"shuffle": False}, "curriculum=9 goes with shuffle=True"),
        ({"sampler": [1, 2]}, "curriculum=9 and sampler were both given"),
        ({"curriculum": 0}, "curriculum must be an int from 1 to 2147483648, got 0"),
    ],
)
def test_what_has_no_order_of_lengths_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedSizeAwareBatchSampler(LENGTHS, 16384, **(PADDED | {"curriculum": 9} | options))


@pytest.mark.parametrize("strategy", ["stratified", "packed", "bucketed"])
def test_no_samples_have_no_ramp(strategy: str) -> None:
    assert list(made([], 10, 5, strategy=strategy, cost="sum")) == []


def test_more_steps_than_any_run_has_are_refused() -> None:
    with pytest.raises(ValueError, match="curriculum must be an int from 1 to 2147483648, got"):
        DistributedSizeAwareBatchSampler([4, 1, 3, 2], 5, curriculum=2**62)
