"""The laws: each sample once, no budget exceeded, equal steps, and any position resumes, at any world size."""

from collections import Counter
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import Case, cases, examples

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.planning.distribution import chunk_length
from headrace.size_aware_batching.planning.options import STRATEGIES, TAILS, Oversize, Strategy, Tail
from headrace.size_aware_batching.report import batch_work

Way = tuple[Strategy, Literal["sum", "padded"]]
WAYS: list[Way] = [
    ("sequential", "sum"),
    ("sequential", "padded"),
    ("stratified", "sum"),
    ("bucketed", "sum"),
    ("bucketed", "padded"),
    ("packed", "sum"),
]
ways = st.sampled_from(WAYS)
windows = st.sampled_from([None, 1, 7, 40])
# Where there are fewer samples than ranks, some are repeated; that this is said is tested by itself.
repeats = pytest.mark.filterwarnings("ignore:tail='split'.*:UserWarning")


def make(case: Any, way: Way, world: int = 1, rank: int = 0, **more: Any) -> DistributedSizeAwareBatchSampler:
    sizes, budget = case
    strategy, cost = way
    return DistributedSizeAwareBatchSampler(
        sizes,
        budget,
        strategy=strategy,
        cost=cost,
        num_replicas=world,
        rank=rank,
        **more,
    )


def all_ranks(
    case: Case, way: Way, world: int, state: dict[str, Any] | None = None, **more: Any
) -> list[list[list[int]]]:
    """Return what every rank gets, after loading a state if there is one."""
    samplers = [make(case, way, world, rank, **more) for rank in range(world)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    assert len({len(sampler) for sampler in samplers}) == 1
    lengths = [len(sampler) if state is None else sampler.remaining for sampler in samplers]
    ranks = [list(sampler) for sampler in samplers]
    assert [len(batches) for batches in ranks] == lengths
    assert len(set(lengths)) == 1
    return ranks


def samples(ranks: list[list[list[int]]]) -> Counter[int]:
    return Counter(index for batches in ranks for batch in batches for index in batch)


def cost_of(batch: list[int], sizes: Any, cost: str) -> int:
    chosen = [int(sizes[index]) for index in batch]
    return sum(chosen) if cost == "sum" else len(chosen) * max(chosen)


@examples(50)
@given(cases(), ways, windows, st.booleans(), st.integers(0, 3))
def test_each_sample_once_and_within_the_budget(
    case: Case, way: Way, window: int | None, shuffle: bool, epoch: int
) -> None:
    sampler = make(case, way, window=window, shuffle=shuffle)
    sampler.set_epoch(epoch)
    length, batches = len(sampler), list(sampler)
    assert len(batches) == length
    assert all(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(len(case[0])))
    assert all(cost_of(batch, case[0], way[1]) <= case[1] for batch in batches)


@repeats
@examples(30)
@given(cases(), ways, windows, st.booleans(), st.integers(1, 16))
def test_every_rank_has_as_many_steps_and_nothing_is_lost(
    case: Case, way: Way, window: int | None, shuffle: bool, world: int
) -> None:
    ranks = all_ranks(case, way, world, window=window, shuffle=shuffle)
    found = samples(ranks)
    steps = len(ranks[0])
    assert set(found) == set(range(len(case[0])))
    if len(case[0]) >= steps * world:  # there are samples for all batches: none is there twice
        assert set(found.values()) <= {1}
    assert all(cost_of(batch, case[0], way[1]) <= case[1] for batches in ranks for batch in batches)


@pytest.mark.slow
@repeats
@examples(30)
@given(cases(), ways, windows, st.booleans(), st.integers(1, 16), st.integers(1, 16), st.data())
def test_resuming_at_any_step_and_any_world_size_leaves_the_exact_remainder(
    case: Case, way: Way, window: int | None, shuffle: bool, world: int, other: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"window": window, "shuffle": shuffle}
    uninterrupted = all_ranks(case, way, world, **options)
    steps = len(uninterrupted[0])
    stop = data.draw(st.integers(0, steps))
    running = make(case, way, world, 0, **options)
    batches = iter(running)
    for _ in range(stop):
        next(batches)
    state = running.state_dict()
    assert set(state) == {"version", "seed", "epoch", "position", "fingerprint", "step", "starts", "run"}
    kinds = {"fingerprint": str, "starts": list, "run": tuple}
    assert all(type(value) is kinds.get(name, int) for name, value in state.items())
    assert all_ranks(case, way, world, state, **options) == [rank[stop:] for rank in uninterrupted]
    delivered = samples([rank[:stop] for rank in uninterrupted])
    rest = samples(all_ranks(case, way, other, state, **options))
    everything = set(range(len(case[0])))
    if len(case[0]) >= steps * world:
        assert set(rest) == everything - set(delivered)
    assert set(rest) | set(delivered) == everything


balanced_ranks = st.sampled_from([1, 2, 3, 6, 8, 12, 48, 64, 100])
shuffled_ways = st.sampled_from([way for way in WAYS if way[0] != "sequential"])


@examples(50)
@given(cases(), shuffled_ways, windows, st.booleans(), st.integers(0, 3), balanced_ranks)
def test_the_balanced_ranks_change_the_order_of_the_batches_alone(
    case: Case, way: Way, window: int | None, shuffle: bool, epoch: int, ranks: int
) -> None:
    found = []
    for number in (64, ranks):
        sampler = make(case, way, window=window, shuffle=shuffle, balanced_ranks=number)
        sampler.set_epoch(epoch)
        found.append([*map(tuple, sampler)])
        assert len(found[-1]) == len(sampler)
    assert sorted(found[0]) == sorted(found[1])
    assert all(cost_of(list(batch), case[0], way[1]) <= case[1] for batch in found[1])


@examples(50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1500), shuffled_ways, st.integers(0, 3), balanced_ranks)
def test_steps_hold_neighbours_in_work_on_every_divisor_of_the_balanced_ranks(
    seed: int, count: int, way: Way, epoch: int, ranks: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, 100, count)  # some hundred batches
    sampler = make((sizes, 300), way, balanced_ranks=ranks, window=max(1, count))
    plan = sampler.plan(epoch)
    length, work = chunk_length(len(plan), ranks), batch_work(plan)
    runs = work[: len(work) // length * length]
    for world in range(1, length + 1):
        if length % world == 0:
            steps = np.sort(runs.reshape(-1, world), axis=1)
            steps = steps[np.lexsort((steps[:, -1], steps[:, 0]))]  # no batch of one is between two of another
            assert (steps[1:, 0] >= steps[:-1, -1] * (1 - 1e-9)).all()


@pytest.mark.slow
@repeats
@examples(30)
@given(cases(), shuffled_ways, windows, balanced_ranks, st.integers(1, 16), st.integers(1, 16), st.data())
def test_any_balanced_ranks_resume_at_any_step_and_any_world_size(
    case: Case, way: Way, window: int | None, ranks: int, world: int, other: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"window": window, "balanced_ranks": ranks}
    uninterrupted = all_ranks(case, way, world, **options)
    steps = len(uninterrupted[0])
    stop = data.draw(st.integers(0, steps))
    running = make(case, way, world, 0, **options)
    assert [*islice(running, stop)] == uninterrupted[0][:stop]
    state = running.state_dict()
    assert all_ranks(case, way, world, state, **options) == [rank[stop:] for rank in uninterrupted]
    delivered = samples([rank[:stop] for rank in uninterrupted])
    rest = samples(all_ranks(case, way, other, state, **options))
    if len(case[0]) >= steps * world:
        assert set(rest) == set(range(len(case[0]))) - set(delivered)
    assert set(rest) | set(delivered) == set(range(len(case[0])))


@repeats
@examples(25)
@given(cases(), ways, st.integers(1, 8), st.sampled_from(TAILS))
def test_what_each_tail_does(case: Case, way: Way, world: int, tail: Tail) -> None:
    sampler = make(case, way)
    listed = [batch.tolist() for batch in sampler.plan()]
    if tail == "drop" and 0 < len(listed) < world:
        with pytest.raises(ValueError, match="tail='drop' must leave each of"):
            all_ranks(case, way, world, tail=tail)
        return
    ranks = all_ranks(case, way, world, tail=tail)
    dealt = [ranks[rank][step] for step in range(len(ranks[0])) for rank in range(world)]
    over = len(listed) % world
    if tail == "drop":
        assert dealt == listed[: len(listed) - over]
    elif tail == "pad":
        again = [listed[len(listed) - over + place % over] for place in range(-len(listed) % world)] if over else []
        assert dealt == listed + again
    else:
        # A step takes the next samples of the list, so that the rest is the same at any world size.
        flat = [index for batch in listed for index in batch]
        for first in range(0, len(dealt), world):
            taken = [index for batch in dealt[first : first + world] for index in batch][: len(flat)]
            assert sorted(taken) == sorted(flat[: len(taken)])
            assert taken == flat[: len(taken)] or len(dealt) - first <= world * world, "only the last steps are dealt"
            flat = flat[len(taken) :]
        assert not flat


@repeats
@examples(25)
@given(cases(), ways, st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_the_list_is_a_function_of_sizes_seed_and_epoch(case: Case, way: Way, seed: int, epoch: int) -> None:
    first, second = make(case, way, seed=seed), make(case, way, world=3, rank=1, seed=seed)
    for other in (9, 4):  # what was iterated before makes no difference
        second.set_epoch(other)
        list(second)
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    assert [b.tolist() for b in first.plan()] == [b.tolist() for b in second.plan()]
    assert [b.tolist() for b in first.plan(epoch)] == list(first)


@examples(25)
@given(cases(), ways, windows, st.data())
def test_a_batch_by_its_number(case: Case, way: Way, window: int | None, data: st.DataObject) -> None:
    sampler = make(case, way, window=window)
    plan = sampler.plan()
    if len(plan):
        number = data.draw(st.integers(0, len(plan) - 1))
        assert sampler.batch(number) == plan[number].tolist()
    with pytest.raises(IndexError, match=r"number must be an int from 0 to .*, the batches of the epoch, got"):
        sampler.batch(len(plan))


@examples(25)
@given(cases(), ways, st.integers(1, 9), st.integers(1, 4))
def test_most_items_and_multiples(case: Case, way: Way, most: int, multiple: int) -> None:
    strategy, _ = way
    multiple = min(multiple, most) if strategy in ("bucketed", "sequential") else 1
    sampler = make(case, way, max_items=most, batch_size_multiple=multiple, shuffle=False)
    batches = [len(batch) for batch in sampler]
    assert sum(batches) == len(case[0])
    assert all(count <= most for count in batches)
    ends = [count for count in batches if count > multiple and count % multiple]
    assert len(ends) <= 1


@examples(25)
@given(cases(), ways, st.sampled_from(["skip", "own_batch"]), st.integers(1, 3))
def test_samples_that_are_too_large(case: Case, way: Way, oversize: Oversize, giants: int) -> None:
    sizes = np.concatenate([case[0], np.full(giants, case[1] + 1)])
    if oversize == "skip" and giants == len(sizes):
        with pytest.raises(ValueError, match="oversize='skip' must leave samples to train on"):
            make((sizes, case[1]), way, oversize=oversize)
        return
    sampler = make((sizes, case[1]), way, oversize=oversize)
    named = list(range(len(case[0]), len(sizes)))
    assert sampler.oversize_indices.tolist() == named
    assert sampler.skipped_indices.tolist() == (named if oversize == "skip" else [])
    left_out = pytest.warns(UserWarning, match=f"^{giants} samples? (is|are) left out as larger than")
    with left_out if oversize == "skip" else nullcontext():
        batches = list(sampler)
    found = sorted(index for batch in batches for index in batch)
    if oversize == "skip":
        assert found == list(range(len(case[0])))
        return
    assert found == list(range(len(sizes)))
    for batch in batches:
        if cost_of(batch, sizes, way[1]) > case[1]:
            assert sum(int(sizes[index]) > 0 for index in batch) == 1
            assert set(batch) & set(named)


@examples(25)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), max_size=200),
    st.sampled_from(STRATEGIES),
)
def test_several_budgets_at_once(pairs: list[tuple[int, int]], strategy: Strategy) -> None:
    sizes = np.array(pairs, np.int64).reshape(-1, 2)
    sampler = DistributedSizeAwareBatchSampler(sizes, (50, 90), strategy=strategy, cost="sum")
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all((sizes[batch].sum(axis=0) <= (50, 90)).all() for batch in batches)


@pytest.mark.slow
@repeats
@examples(25)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90), st.integers(0, 3)), min_size=1, max_size=300),
    st.sampled_from(STRATEGIES),
    windows,
    st.integers(1, 8),
    st.data(),
)
def test_several_budgets_resume_exactly(
    rows: list[tuple[int, int, int]], strategy: Strategy, window: int | None, world: int, data: st.DataObject
) -> None:
    case: Any = np.array(rows), (50, 90, 7)
    way: Way = strategy, "sum"
    uninterrupted = all_ranks(case, way, world, window=window)
    stop = data.draw(st.integers(0, len(uninterrupted[0])))
    running = make(case, way, world, 0, window=window)
    batches = iter(running)
    for _ in range(stop):
        next(batches)
    assert all_ranks(case, way, world, running.state_dict(), window=window) == [r[stop:] for r in uninterrupted]
    assert set(samples(uninterrupted)) == set(range(len(rows)))


@examples(25)
@given(st.lists(st.floats(0, 1, allow_subnormal=False), max_size=200), ways)
def test_real_sizes_never_exceed_a_real_budget(sizes: list[float], way: Way) -> None:
    array = np.array(sizes)
    batches = list(DistributedSizeAwareBatchSampler(array, 1.0, strategy=way[0], cost=way[1]))
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    for batch in batches:
        cost = array[batch].sum() if way[1] == "sum" else len(batch) * array[batch].max()
        assert cost <= 1.0 + 1e-12


@examples(25)
@given(ways, st.sampled_from(["int64", "uint64", "uint8", "int16", "float16", "float32", "float64"]), st.data())
def test_any_kind_of_number(way: Way, kind: str, data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 200), max_size=60)), kind)
    budget = data.draw(st.sampled_from([200, 1000, 10**6, 2**50, 2**62 - 1, float("inf"), 250.5]))
    batches = list(make((sizes, budget), way))
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all(cost_of(batch, sizes, way[1]) <= budget for batch in batches)


@examples(25)
@given(ways, st.integers(41, 61), st.lists(st.integers(0, 2**20), min_size=1, max_size=200), st.integers(1, 50))
def test_numbers_whose_sums_leave_64_bits(way: Way, power: int, shares: list[int], times: int) -> None:
    budget = 2**power
    sizes = np.array([budget * share // 2**20 for share in shares] * times, np.int64)
    batches = list(make((sizes, budget), way))
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    assert all(cost_of(batch, sizes, way[1]) <= budget for batch in batches)


@examples(25)
@given(ways, st.lists(st.sampled_from([0.0, 5e-324, 1e-310, 1e-301, 3e-301]), min_size=1, max_size=100))
def test_tiny_real_sizes(way: Way, sizes: list[float]) -> None:
    array = np.array(sizes)
    batches = list(make((array, 1e-300), way))
    assert sorted(index for batch in batches for index in batch) == list(range(len(sizes)))
    for batch in batches:
        cost = array[batch].sum() if way[1] == "sum" else len(batch) * array[batch].max()
        assert cost <= 1e-300 * (1 + 1e-9)


def test_budgets_below_one() -> None:
    for way in WAYS:
        assert sorted(i for b in make((np.zeros(5, np.int64), 0.5), way) for i in b) == list(range(5))
        with pytest.raises(ValueError, match="exceed max_total_size"):
            make((np.ones(5, np.int64), 0.5), way)
