"""Weights that change in a running mixture."""

import copy
import pickle
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples, in_steps

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

DATA = NamedConcatDataset({"web": range(400), "books": range(90), "code": range(30)})
BOUNDS = np.array([0, 400, 490, 520])
SIZES = np.random.default_rng(0).integers(1, 60, 520)
FIRST, LATER = {"web": 5, "books": 3, "code": 2}, {"web": 1, "books": 1, "code": 4}


def mixture(**options: Any) -> WeightedDistributedSampler:
    arguments: dict[str, Any] = {"epoch_length": 600, "num_replicas": 1, "rank": 0, "seed": 4} | options
    return WeightedDistributedSampler(DATA, FIRST, **arguments)


def by_tokens(**options: Any) -> WeightedDistributedSampler:
    return mixture(per="token", sizes=SIZES, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixture, by_tokens])
@examples(20)
@given(
    world=st.sampled_from([1, 2, 3, 7]),
    steps=st.lists(st.integers(0, 28), min_size=1, max_size=3),
    epoch=st.integers(0, 2),
)
def test_it_is_a_schedule_that_was_not_known_before(make: Any, world: int, steps: list[int], epoch: int) -> None:
    ranks = [make(num_replicas=world, rank=rank) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    running, delivered = [iter(rank) for rank in ranks], []
    schedule: list[tuple[int, Any]] = []
    for number, count in enumerate(steps):
        delivered += [[next(one) for one in running] for _ in range(count)]
        if epoch == 0 and not delivered:
            continue
        weights = LATER if number % 2 == 0 else {"web": 7, "books": 1, "code": 0}
        [position] = {rank.reweight(weights) for rank in ranks}
        assert position == epoch * 600 + len(delivered) * world
        schedule = [(at, old) for at, old in schedule if at < position] + [(position, weights)]
    delivered += list(map(list, zip(*running, strict=True)))
    planned = make(schedule=schedule)
    planned.set_epoch(epoch)
    whole = planned.take(0, 600).tolist()
    whole += whole[: -600 % world]
    # Behind a change, steps are counted from where the epoch began: they are the same.
    assert [sorted(step) for step in delivered] == in_steps(whole, world)
    for rank in ranks:
        rank.set_epoch(epoch + 1)
    planned.set_epoch(epoch + 1)
    assert ranks[0].take(0, 600).tolist() == planned.take(0, 600).tolist()


def test_passes_go_on_unbroken() -> None:
    sampler = mixture()
    running = iter(sampler)
    drawn = list(islice(running, 123))
    sampler.reweight(LATER)
    drawn += running
    for begin, end in pairwise(BOUNDS):
        own = [index for index in drawn if begin <= index < end]
        for low in range(0, len(own), end - begin):
            one_pass = own[low : low + end - begin]
            assert len(set(one_pass)) == len(one_pass)


@pytest.mark.parametrize("make", [mixture, by_tokens])
def test_a_resumed_run_needs_the_change(make: Any) -> None:
    sampler = make()
    running = iter(sampler)
    list(islice(running, 100))
    position = sampler.reweight(LATER)
    list(islice(running, 50))
    state, rest = sampler.state_dict(), list(running)
    with pytest.raises(ValueError, match="an earlier part of the schedule differ"):
        make().load_state_dict(state)
    scheduled, told = make(schedule=[(position, LATER)]), make()
    assert told.reweight(LATER, position) == position == 100
    for resumed in (scheduled, told):
        resumed.load_state_dict(state)
        assert list(resumed) == rest


def test_a_copy_has_the_change() -> None:
    sampler = mixture()
    running = iter(sampler)
    list(islice(running, 100))
    sampler.reweight(LATER)
    copies = [copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    rest = list(running)
    assert all(list(one) == rest for one in copies)


def test_what_batch_samplers_have_taken_stays_as_it_is() -> None:
    sampler = mixture()
    begun = sampler.take(0, 256).tolist()
    assert sampler.reweight(LATER) == 256
    assert sampler.take(0, 256).tolist() == begun
    kinds = np.searchsorted(BOUNDS, sampler.take(256, 600), side="right") - 1
    assert np.bincount(kinds) == pytest.approx(np.array([1, 1, 4]) / 6 * 344, abs=2)


def test_a_change_that_waits_for_the_next_epoch_says_so(recwarn: pytest.WarningsRecorder) -> None:
    sampler = mixture()
    sampler.set_epoch(2)
    sampler.take(0, 256)
    sampler.reweight(LATER)
    assert not recwarn
    sampler.take(0, 600)
    with pytest.warns(UserWarning, match="so the weights change with epoch 3, at position 1800: to change"):
        assert sampler.reweight(LATER) == 1800
    done = mixture()
    list(done)
    assert done.reweight(LATER) == 600
    assert not recwarn


def test_a_source_may_leave_by_its_passes_after_a_change() -> None:
    sampler = mixture(max_passes={"code": 2})
    running = iter(sampler)
    drawn = list(islice(running, 100))
    sampler.reweight(LATER)
    drawn += running
    assert sum(index >= 490 for index in drawn) == 60


def test_what_cannot_be_changed_is_refused_and_nothing_moves() -> None:
    fresh = mixture()
    with pytest.raises(ValueError, match="reweight must come after the first samples: construct the sampler with"):
        fresh.reweight(LATER)
    sampler = mixture(schedule=[(300, {"web": 1, "books": 0, "code": 0})])
    running = iter(sampler)
    list(islice(running, 100))
    state = sampler.state_dict()
    for weights, position, says in [
        (LATER, 99, "position must be at least 100, the first that was not taken, got 99"),
        (LATER, 200, "position must not lie before the last change of the schedule, at 300, got 200"),
        ({"web": 1, "poems": 2}, 400, "reweight weights .*poems"),
        ({"web": 0, "books": 0, "code": 0}, 400, "weight"),
    ]:
        with pytest.raises(ValueError, match=says):
            sampler.reweight(weights, position)
    assert sampler.state_dict() == state
    assert list(running) == mixture(schedule=[(300, {"web": 1, "books": 0, "code": 0})]).take(100, 600).tolist()
    with pytest.raises(ValueError, match="it takes no schedule"):
        WeightedDistributedSampler(DATA, FIRST, stopping="drop_exhausted").reweight(LATER, 50)
