"""Laws of the sampler itself."""

import pickle
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import in_steps
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from headrace.weighted_sampler import WeightedDistributedSampler

WORLDS = st.integers(1, 16)
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 10**6)
LENGTH = 120


@st.composite
def weightings(draw: st.DrawFn) -> dict[tuple[int, int], float]:
    cuts = sorted(draw(st.sets(st.integers(0, LENGTH), min_size=2, max_size=5)))
    ratios = st.integers(1, 250).map(lambda hundredths: hundredths / 100)
    return {(low, high): draw(ratios) for low, high in pairwise(cuts)}


def all_ranks(
    weights: dict[tuple[int, int], float], world: int, epoch: int = 0, **options: Any
) -> list[WeightedDistributedSampler]:
    ranks = [
        WeightedDistributedSampler(range(LENGTH), weights, num_replicas=world, rank=rank, **options)
        for rank in range(world)
    ]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    return ranks


def deal(ranks: list[WeightedDistributedSampler]) -> list[int]:
    """Run all ranks in step and return what they deliver, in global order."""
    return [index for step in zip(*ranks, strict=True) for index in step]


@pytest.mark.slow
@given(weightings(), WORLDS, SEEDS, EPOCHS)
def test_padded_ranks_deliver_the_epoch_and_then_its_beginning(
    weights: dict[tuple[int, int], float], world: int, seed: int, epoch: int
) -> None:
    ranks = all_ranks(weights, world, epoch, seed=seed)
    order = ranks[0].take(0, ranks[0].epoch_length).tolist()
    padded = ranks[0].padded().tolist()
    delivered = deal(ranks)
    assert in_steps(delivered, world) == in_steps(order + padded, world)
    assert not padded or delivered[-len(padded) :] == padded  # of the last ranks
    assert len(padded) < world
    assert padded == [order[place % len(order)] for place in range(len(padded))]
    assert ranks[0].dropped().size == 0


@pytest.mark.slow
@given(weightings(), WORLDS, SEEDS, EPOCHS)
def test_ranks_that_drop_deliver_a_beginning_of_the_epoch(
    weights: dict[tuple[int, int], float], world: int, seed: int, epoch: int
) -> None:
    ranks = all_ranks(weights, world, epoch, seed=seed, drop_last=True)
    order = ranks[0].take(0, ranks[0].epoch_length).tolist()
    if len(order) < world:
        with pytest.raises(ValueError, match="drop_last=True leaves nothing"):
            len(ranks[0])
        return
    dropped = ranks[0].dropped().tolist()
    assert in_steps(deal(ranks), world) == in_steps(order[: len(order) - len(dropped)], world)
    assert order[len(order) - len(dropped) :] == dropped
    assert len(dropped) == len(order) % world
    assert ranks[0].padded().size == 0


@given(weightings(), WORLDS, EPOCHS)
def test_every_rank_has_the_length_it_says(weights: dict[tuple[int, int], float], world: int, epoch: int) -> None:
    ranks = all_ranks(weights, world, epoch)
    [length] = {len(sampler) for sampler in ranks}
    assert {len(list(sampler)) for sampler in ranks} == {length}
    assert ranks[0].num_samples == length
    assert ranks[0].total_size == length * world == ranks[0].epoch_length + len(ranks[0].padded())


@given(weightings(), SEEDS, EPOCHS)
def test_the_same_seed_and_epoch_give_the_same_order(
    weights: dict[tuple[int, int], float], seed: int, epoch: int
) -> None:
    [one], [two] = all_ranks(weights, 1, epoch, seed=seed), all_ranks(weights, 1, 0, seed=seed)
    list(two)
    two.set_epoch(epoch)
    assert list(one) == list(one) == list(two)


@pytest.mark.slow
@given(weightings(), WORLDS, WORLDS, EPOCHS, st.data())
def test_resuming_anywhere_at_any_world_size_gives_the_exact_remainder(
    weights: dict[tuple[int, int], float], world: int, new_world: int, epoch: int, data: st.DataObject
) -> None:
    first = all_ranks(weights, world, epoch)
    order = first[0].take(0, first[0].epoch_length).tolist()
    steps = data.draw(st.integers(0, len(first[0])))
    state = first[0].state_dict(position=steps * world)
    position = min(steps * world, len(order))

    ranks = all_ranks(weights, new_world)
    for sampler in ranks:
        sampler.load_state_dict(state)
    assert {sampler.remaining for sampler in ranks} == {-(-(len(order) - position) // new_world)}
    padded = ranks[0].padded(position).tolist()
    assert in_steps(deal(ranks), new_world) == in_steps(order[position:] + padded, new_world)
    assert len(padded) < new_world
    # And the iteration after that is whole.
    assert in_steps(deal(ranks), new_world) == in_steps(order + ranks[0].padded(0).tolist(), new_world)


@given(weightings(), WORLDS, st.integers(1, 9), st.booleans(), st.data())
def test_skipping_batches_gives_the_rest_of_an_uninterrupted_epoch(
    weights: dict[tuple[int, int], float], world: int, size: int, drop_last: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    sampler = all_ranks(weights, world, 3, drop_last=drop_last)[rank]
    if drop_last and sampler.epoch_length < world:
        return
    whole = list(sampler)
    skip = data.draw(st.integers(0, -(-len(whole) // size)))
    sampler.set_skip_batches(skip, size)
    assert sampler.remaining == max(0, len(whole) - skip * size)
    assert len(sampler) == len(whole)
    assert list(sampler) == whole[skip * size :]
    assert list(sampler) == whole


@given(weightings(), st.data())
def test_take_is_a_stretch_of_the_global_sequence(weights: dict[tuple[int, int], float], data: st.DataObject) -> None:
    [sampler] = all_ranks(weights, 1, 2)
    stop = data.draw(st.integers(0, sampler.epoch_length))
    start = data.draw(st.integers(0, stop))
    taken = sampler.take(start, stop)
    assert taken.dtype == np.int64
    assert taken.tolist() == list(sampler)[start:stop]
    taken[:] = -1
    assert -1 not in list(sampler)


@pytest.mark.parametrize(("start", "stop"), [(3, 2), (-1, 2), (0, 12), (11, 12)])
def test_take_refuses_positions_outside_the_epoch(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"^(start|stop) must be an int from 0 to"):
        WeightedDistributedSampler(range(11), {(0, 11): 1}).take(start, stop)


def test_samples_in_no_range_or_of_ratio_zero_are_never_drawn() -> None:
    sampler = WeightedDistributedSampler(range(30), {(0, 10): 1, (10, 20): 0})
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sorted(sampler) == list(range(10))


def test_it_is_one_of_torchs_samplers() -> None:
    sampler = WeightedDistributedSampler([0, 1, 2], {(0, 3): 1})
    assert isinstance(sampler, Sampler)
    assert isinstance(sampler, DistributedSampler)  # or Lightning deals its share out again
    assert {type(index) for index in sampler} == {int}


def test_numpy_integers_are_accepted_everywhere() -> None:
    three = np.int64(3)
    weights: dict[Any, Any] = {(np.int32(0), np.int64(30)): np.float32(0.5)}
    sampler = WeightedDistributedSampler(range(30), weights, np.int16(4), np.uint8(3), seed=three)  # type: ignore[arg-type]  # numpy integers are no int to mypy, but users have them
    sampler.set_epoch(three)  # type: ignore[arg-type]  # as above
    sampler.set_skip_batches(np.int64(1), three)  # type: ignore[arg-type]  # as above
    plain = WeightedDistributedSampler(range(30), {(0, 30): 0.5}, 4, 3, seed=3)
    plain.set_epoch(3)
    plain.set_skip_batches(1, 3)
    assert list(sampler) == list(plain)


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dataset": Stream()}, TypeError, "dataset must have a length, got Stream"),
        ({"dataset": None}, TypeError, "dataset must have a length, got NoneType"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas must be an int >= 1, got 0"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas must be an int >= 1, got 2.0"),
        ({"num_replicas": 4, "rank": 4}, ValueError, "rank must be from 0 to 3 with num_replicas=4, got 4"),
        ({"num_replicas": 4, "rank": -1}, ValueError, "rank must be an int >= 0, got -1"),
        ({"num_replicas": 4, "rank": True}, TypeError, "rank must be an int >= 0, got True"),
        ({"seed": -1}, ValueError, "seed must be an int from 0 to"),
        ({"seed": 2**64}, ValueError, "seed must be an int from 0 to"),
        ({"seed": 1.5}, TypeError, "seed must be an int from 0 to"),
        ({"drop_last": "no"}, TypeError, "drop_last must be True or False, got 'no'"),
        ({"weight_dict": {(0, 11): 1}}, ValueError, "outside the dataset of 10 samples"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        WeightedDistributedSampler(**{"dataset": range(10), "weight_dict": {(0, 10): 1}, **options})


def test_bad_calls_are_refused_by_name() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"epoch must be an int from 0 to .*, got -1"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match=r"num_skip_batches=4 is more .*: 5 samples on this rank are 3 batch"):
        sampler.set_skip_batches(4, 2)
    with pytest.raises(ValueError, match="micro_batch_size must be an int >= 1, got 0"):
        sampler.set_skip_batches(1, 0)
    with pytest.raises(ValueError, match="position must be an int from 0 to 11, got 12"):
        sampler.state_dict(position=12)
    with pytest.raises(ValueError, match="start must be an int from 0 to 10, got 11"):
        sampler.padded(11)
    assert sampler.position == 0


def test_a_skip_outlives_set_epoch_but_a_loaded_position_holds_for_its_epoch_only() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
    sampler.set_skip_batches(1, 4)
    sampler.set_epoch(2)
    assert len(list(sampler)) == 6

    state = sampler.state_dict(position=10)  # saved at the end of epoch 2
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    assert sampler.remaining == 0
    sampler.set_epoch(3)
    assert len(list(sampler)) == 10


def test_state_before_the_iteration_holds_what_was_asked_to_skip() -> None:
    sampler = WeightedDistributedSampler(range(40), {(0, 40): 1}, num_replicas=4, rank=2)
    sampler.set_epoch(6)
    sampler.set_skip_batches(2, 3)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (6, 24)
    other = WeightedDistributedSampler(range(40), {(0, 40): 1}, num_replicas=4, rank=2)
    other.load_state_dict(state)
    assert list(other) == list(sampler)


def test_nothing_is_used_up_before_the_first_sample() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
    sampler.set_skip_batches(1, 4)
    iter(sampler)
    assert sampler.remaining == 6


def test_a_sampler_survives_pickling_with_its_position() -> None:
    sampler = WeightedDistributedSampler(list(range(50)), {(0, 50): 1.5}, num_replicas=3, rank=1, seed=9)
    sampler.set_epoch(4)
    sampler.set_skip_batches(2, 5)
    copy = pickle.loads(pickle.dumps(sampler))
    assert list(copy) == list(sampler)


@pytest.mark.slow
def test_a_million_draws_are_iterated_in_small_pieces() -> None:
    sampler = WeightedDistributedSampler(range(10**6), {(0, 10**6): 1}, num_replicas=2, rank=0)
    sampler.take(0, 0)  # makes the order: its array is the epoch's memory
    tracemalloc.start()
    count = sum(1 for _ in sampler)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 500_000
    assert peak < 6 * 2**20  # a list of all of them takes 20 MB


@pytest.mark.nightly
def test_ten_million_draws_are_whole() -> None:
    size = 10**7
    sampler = WeightedDistributedSampler(range(size), {(0, size // 2): 0.5, (size // 2, size): 1.5})
    counts = Counter(np.bincount(sampler.take(0, sampler.epoch_length), minlength=size).tolist())
    assert counts == {0: size // 4, 1: size // 2, 2: size // 4}
