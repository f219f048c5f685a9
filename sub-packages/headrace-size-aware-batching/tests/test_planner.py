"""The parts of planning, each against a plain way of doing the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies_of_sizes import Case, cases

from headrace.size_aware_batching import _order
from headrace.size_aware_batching._binpacking import cut_descending, lower_bound, next_fit, pack
from headrace.size_aware_batching._budget import FunctionCapacity, Limits, PaddedCapacity, prepare
from headrace.size_aware_batching._options import STRATEGIES, Options, Strategy
from headrace.size_aware_batching._order import ShuffledOrder, SliceOrder, Strata
from headrace.size_aware_batching._planner import make_planner
from headrace.size_aware_batching._random import (
    LONGEST_ROW,
    derive,
    random_words,
    shuffle_blocks,
    shuffle_groups,
    shuffle_rows,
    splitmix64,
)
from headrace.size_aware_batching._sharding import shuffle_sorted_chunks
from headrace.size_aware_batching._validation import UNLIMITED


def greedy(sizes: list[int], budget: int, most: int, padded: bool) -> list[int]:
    """Cut sizes element by element: where batches begin, and the end."""
    cuts, batch = [0], list[int]()
    for place, size in enumerate(sizes):
        more = [*batch, size]
        cost = max(more) * len(more) if padded else sum(more)
        if batch and (cost > budget or len(more) > most):
            cuts.append(place)
            batch = []
        batch.append(size)
    return [*cuts, len(sizes)] if sizes else cuts


@settings(max_examples=300)
@given(cases(), st.one_of(st.just(UNLIMITED), st.integers(1, 50)))
def test_next_fit_is_the_greedy_loop(case: Case, most: int) -> None:
    sizes, budget = case
    limits = Limits((budget,), most_items=most)
    assert next_fit(sizes, limits).tolist() == greedy(sizes.tolist(), budget, most, padded=False)
    capacity = Limits(capacity=PaddedCapacity(budget), most_items=most)
    assert next_fit(sizes, capacity).tolist() == greedy(sizes.tolist(), budget, most, padded=True)
    falling = np.sort(sizes)[::-1]
    assert cut_descending(falling, capacity).tolist() == greedy(falling.tolist(), budget, most, padded=True)
    assert cut_descending(falling, limits).tolist() == greedy(falling.tolist(), budget, most, padded=False)


@settings(max_examples=100)
@given(cases())
def test_an_open_batch_is_left_for_the_next_piece(case: Case) -> None:
    sizes, budget = case
    limits = Limits((budget,))
    whole, piece = next_fit(sizes, limits).tolist(), next_fit(sizes, limits, last=False).tolist()
    assert piece == (whole[:-1] if len(whole) > 1 else whole)


@settings(max_examples=100)
@given(cases(), st.integers(1, 400), st.sampled_from([1, 4, 128]), st.integers(1, 3), st.integers(0, 9))
def test_packing_fits_or_says_that_it_does_not(case: Case, n_batches: int, block: int, columns: int, key: int) -> None:
    sizes, budget = case
    if not len(sizes):
        return
    n_batches = min(n_batches, len(sizes))
    table = np.sort(sizes)[::-1][:, None] * np.array([1, 1, 0])[:columns]
    table[:, -1] = table[::-1, -1]
    capacity = np.full(columns, budget)
    assert (lower_bound(table, capacity) <= len(sizes)) or budget == 0
    batches = pack(table, capacity, n_batches, key, block)
    if batches is not None:
        assert sorted(set(batches.tolist())) == list(range(n_batches))
        for column in table.T:
            assert np.bincount(batches, column, minlength=n_batches).max() <= budget
        assert n_batches >= lower_bound(table, capacity)


@settings(max_examples=100)
@given(st.integers(1, 300), st.data())
def test_strata_give_every_sample_to_one_window(n_samples: int, data: st.DataObject) -> None:
    strata = Strata(n_samples, data.draw(st.integers(1, n_samples)))
    shifts = strata.shifts(data.draw(st.integers(0, 2**64 - 1)))
    found: list[int] = []
    for window in range(strata.n_windows):
        depth = strata.depth if window < strata.n_full else strata.depth - 1
        assert strata.start(window) == len(found)
        assert all(strata.window_of(len(found) + place) == window for place in range(depth))
        places = strata.places(window, window + 1, shifts)[0, :depth]
        # No sample is larger than the first of its stratum: it stands behind it in the sorted order.
        assert (places >= strata.firsts()[:depth]).all()
        assert (places // strata.n_windows == np.arange(depth)).all()
        found += places.tolist()
    assert sorted(found) == list(range(n_samples))


@settings(max_examples=100)
@given(st.integers(0, 2**11), st.integers(0, 2**63))
def test_rows_are_shuffled_in_themselves(length: int, key: int) -> None:
    for row in shuffle_rows(derive(key, np.arange(3, dtype=np.uint64)), length):
        assert sorted(row.tolist()) == list(range(length))


@settings(max_examples=100)
@given(st.lists(st.floats(0, 1e9), max_size=300), st.integers(0, 500), st.sampled_from([1, 4, 64]))
def test_arranging_is_a_permutation_whose_groups_are_alike(work: list[float], before: int, group: int) -> None:
    costs = np.array(work)
    places = shuffle_sorted_chunks(costs, 7, before, group)
    assert sorted(places.tolist()) == list(range(len(work)))
    ordered = np.empty(len(work))
    ordered[places] = np.argsort(np.argsort(costs, kind="stable"))
    first = -before % group
    for start in range(first, len(work) - group + 1, group):  # whole groups hold neighbours in the sorted costs
        ranks = ordered[start : start + group]
        assert ranks.max() - ranks.min() == group - 1


@settings(max_examples=100)
@given(st.lists(st.integers(0, 70_000), max_size=400), st.sampled_from([np.int16, np.int32, np.int64, np.float32]))
def test_sorting_is_stable_and_falls(sizes: list[int], kind: type[np.generic]) -> None:
    array: NDArray[np.generic] = np.array([size % 30_000 if kind is np.int16 else size for size in sizes], kind)
    expected = np.argsort(-array.astype(np.float64), kind="stable")
    order, descending = _order.sorted_by_size(array)
    assert order.tolist() == expected.tolist()
    assert descending.tolist() == array[expected].tolist()


def test_sorting_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "SORTED_AT_ONCE", 100)
    sizes = (random_words(3, 5000) % np.uint64(300)).astype(np.int32)
    assert _order.sorted_by_size(sizes)[0].tolist() == np.argsort(-sizes, kind="stable").tolist()


@settings(max_examples=50)
@given(st.integers(1, 100_000), st.integers(0, 2**63), st.data())
def test_a_shuffle_is_a_permutation_readable_anywhere(n_samples: int, key: int, data: st.DataObject) -> None:
    order = ShuffledOrder(n_samples)
    everything = order.take(key, 0, n_samples)
    assert (np.bincount(everything, minlength=n_samples) == 1).all()
    start = data.draw(st.integers(0, n_samples))
    stop = data.draw(st.integers(start, n_samples))
    assert order.take(key, start, stop).tolist() == everything[start:stop].tolist()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=50), st.integers(1, 400), st.integers(1, 8))
def test_capacity_is_the_largest_count_that_fits(sizes: list[int], budget: int, multiple: int) -> None:
    array = np.array(sizes)
    padded = PaddedCapacity(budget, multiple)(array)
    for size, count in zip(sizes, padded.tolist(), strict=True):
        length = -(-size // multiple) * multiple
        assert (count == UNLIMITED) if length == 0 else count * length <= budget < (count + 1) * length
    by_function = FunctionCapacity(lambda n, longest: n * longest, budget, 1000, multiple)(array)
    assert by_function.tolist() == np.minimum(padded, 1000).tolist()


def test_the_first_random_words_stay_what_they_are() -> None:
    # A change here changes every plan of every run that is to be resumed.
    assert [hex(word) for word in splitmix64(np.arange(2, dtype=np.uint64))] == [
        "0xe220a8397b1dcdaf",
        "0x910a2dec89025cc1",
    ]
    assert hex(derive(7, 1)[0]) == "0x9cd42d1744f0e31e"


def test_a_few_batches_of_very_many_samples() -> None:
    # Many small samples and some giants: handfuls of them are dealt at once, the giants one by one.
    sizes = np.sort(np.concatenate([np.full(20, 300_000), np.full(300_000, 7)]))[::-1, None]
    batches = pack(sizes, np.array([1_000_000]), 9, key=1, block=128)
    assert batches is not None
    sums = np.bincount(batches, sizes[:, 0], minlength=9)
    assert sums.max() <= 1_000_000
    assert sums.sum() == sizes.sum()


@pytest.mark.parametrize(
    ("sizes", "capacity", "fewest"), [([34] * 10, 100, 5), ([51] * 7, 100, 7), ([60, 40] * 5, 100, 5)]
)
def test_the_lower_bound_knows_coarse_sizes(sizes: list[int], capacity: int, fewest: int) -> None:
    assert lower_bound(np.array(sizes)[:, None], np.array([capacity])) == fewest


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5), max_size=300), st.integers(0, 2**63))
def test_groups_are_shuffled_in_themselves(lengths: list[int], key: int) -> None:
    groups = np.repeat(np.arange(len(lengths)), lengths)
    shuffled = shuffle_groups(key, groups)
    assert sorted(shuffled.tolist()) == list(range(len(groups)))
    assert groups[shuffled].tolist() == groups.tolist()


@settings(max_examples=100)
@given(st.integers(0, 5000), st.sampled_from([1, 2, 7, LONGEST_ROW, LONGEST_ROW + 1, 2**20]), st.integers(0, 2**63))
def test_blocks_are_shuffled_in_themselves(count: int, block: int, key: int) -> None:
    shuffled = shuffle_blocks(key, count, block)
    assert sorted(shuffled.tolist()) == list(range(count))
    assert (shuffled // block == np.arange(count) // block).all()


def test_blocks_are_shuffled_each_by_itself_and_evenly() -> None:
    drawn = np.stack([shuffle_blocks(key, 20, 8) for key in range(4000)])
    expected = {first: 4000 / length for first, length in ((0, 8), (8, 8), (16, 4))}
    for first, often in expected.items():
        counts = np.bincount(drawn[:, first] - first)
        assert abs(counts - often).max() < 5 * often**0.5
    together = (drawn[:, 0] == drawn[:, 8] - 8).mean()
    assert abs(together - 1 / 8) < 0.03


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_order_is_planned_once_for_all_numbers_of_batches(strategy: Strategy) -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 40_000)
    options = Options(strategy, shuffle=False, window=4000)
    asked = 0

    def give(start: int, stop: int) -> NDArray[np.int64]:
        nonlocal asked
        asked += stop - start
        return np.arange(start, stop)

    planner = make_planner(prepare(sizes, 1000, options), options, SliceOrder(len(sizes), give))
    count = planner.count(7, 0)
    assert asked <= 2 * len(sizes)  # next-fit looks twice at what a chunk leaves over
    for number in (0, 17, count // 2, count - 1):
        asked = 0
        batch = planner.batch(7, number)
        assert asked <= 4000
        assert 0 < sizes[batch].sum() <= 1000
        asked = 0
        planner.batch(7, number)
        assert asked <= len(batch)
    listed = [batch for indices, offsets in planner.chunks(7, 0) for batch in np.split(indices, offsets[1:-1])]
    assert [planner.batch(7, number).tolist() for number in (0, 17, count - 1)] == [
        listed[number].tolist() for number in (0, 17, count - 1)
    ]


def test_a_cost_is_evaluated_a_few_times_for_each_distinct_size() -> None:
    calls = 0

    def cost(n: int, largest: float) -> float:
        nonlocal calls
        calls += 1
        return n * largest

    sizes = np.random.default_rng(0).permutation(np.repeat(np.arange(1, 2001), 10))
    options = Options("bucketed", cost=cost)
    planner = make_planner(prepare(sizes, 16_000, options), options)
    for epoch_key in range(5):
        for _ in planner.chunks(epoch_key, 0):
            pass
    assert calls <= 2000 * 2 * 15  # a search by doubling and halving for each size, whatever the epochs
    before = calls
    for _ in planner.chunks(5, 0):
        pass
    assert calls == before


def test_a_cost_is_evaluated_once_for_each_size_of_a_dataset_of_many() -> None:
    calls = 0

    def cost(n: int, largest: float) -> float:
        nonlocal calls
        calls += 1
        return n * largest

    sizes, options = np.arange(2**16, 2**16 + 70_000), Options("sequential", cost=cost, shuffle=False)
    planner = make_planner(prepare(sizes, 2**18, options), options)
    planner.count(0, 0)
    before = calls
    for epoch_key in (1, 2):
        planner.count(epoch_key, 0)
    assert calls == before


def test_steps_are_balanced_by_the_work_that_is_given() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 100, 20_000)
    work = generator.lognormal(0, 1.5, 20_000)
    options = Options()
    imbalances = []
    for given_work in (None, work):
        planner = make_planner(replace(prepare(sizes, 800, options), work=given_work), options)
        batches = [np.add.reduceat(work[indices], offsets[:-1]) for indices, offsets in planner.chunks(1, 0)]
        per_batch = np.concatenate(batches)
        steps = per_batch[: len(per_batch) // 8 * 8].reshape(-1, 8)
        imbalances.append(float((steps.max(axis=1) / steps.mean(axis=1)).mean()))
    assert imbalances[0] > 1.2
    assert imbalances[1] < 1.02
