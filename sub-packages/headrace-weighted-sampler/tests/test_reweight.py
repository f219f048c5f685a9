"""Weights that a batch sampler changes in the middle of a run: a schedule that was not known before."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples

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


def changed(position: int, weights: Any = LATER, **options: Any) -> WeightedDistributedSampler:
    sampler = mixture(**options)
    sampler.reweights = sampler.reweighted(weights, position)
    return sampler


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixture, by_tokens])
@examples(20)
@given(positions=st.lists(st.integers(1, 1800), min_size=1, max_size=3), epoch=st.integers(0, 2))
def test_it_is_a_schedule_that_was_not_known_before(make: Any, positions: list[int], epoch: int) -> None:
    sampler, schedule = make(), list[tuple[int, Any]]()
    for number, position in enumerate(positions):
        weights = LATER if number % 2 == 0 else {"web": 7, "books": 1, "code": 0}
        sampler.set_epoch(position // 600)
        begun = sampler.take(0, position % 600).tolist()
        sampler.reweights = sampler.reweighted(weights, position)
        assert sampler.take(0, position % 600).tolist() == begun
        schedule = [(at, old) for at, old in schedule if at < position] + [(position, weights)]
    planned, loaded = make(schedule=schedule), make()
    loaded.reweights = sampler.reweights  # as a state has them
    for one in (sampler, planned, loaded):
        one.set_epoch(epoch)
    assert sampler.take(0, 600).tolist() == planned.take(0, 600).tolist() == loaded.take(0, 600).tolist()
    assert sampler.fingerprint == planned.fingerprint == loaded.fingerprint


def test_passes_go_on_unbroken() -> None:
    sampler = changed(123)
    drawn = [*sampler]
    sampler.set_epoch(1)
    drawn += sampler
    for begin, end in pairwise(BOUNDS):
        own = [index for index in drawn if begin <= index < end]
        for low in range(0, len(own), end - begin):
            one_pass = own[low : low + end - begin]
            assert len(set(one_pass)) == len(one_pass)


@pytest.mark.parametrize("make", [mixture, by_tokens])
def test_a_run_without_a_batch_sampler_changes_the_schedule_where_it_resumes(make: Any) -> None:
    sampler = make()
    running = iter(sampler)
    begin = [next(running) for _ in range(100)]
    resumed = make(schedule=[(100, LATER)])
    resumed.load_state_dict(sampler.state_dict())
    rest = list(resumed)
    kinds = np.searchsorted(BOUNDS, rest, side="right") - 1
    assert begin + rest == make(schedule=[(100, LATER)]).take(0, 600).tolist()
    assert make is by_tokens or np.bincount(kinds) == pytest.approx(np.array([1, 1, 4]) / 6 * 500, abs=2)


def test_a_copy_has_the_change() -> None:
    sampler = changed(100)
    copies = [copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    whole = list(sampler)
    assert all(list(one) == whole for one in copies)
    copies[0].reweights = []
    assert list(copies[0]) == list(mixture())
    assert sampler.take(0, 600).tolist() == whole, "a copy's changes are its own"


def test_a_source_may_leave_by_its_passes_after_a_change() -> None:
    assert sum(index >= 490 for index in changed(100, max_passes={"code": 2})) == 60


def test_what_cannot_be_changed_is_refused_and_nothing_moves() -> None:
    schedule = [(300, {"web": 1, "books": 0, "code": 0})]
    sampler = mixture(schedule=schedule)
    for weights, position, says in [
        (LATER, 0, "reweight must come after the first samples: construct the sampler with"),
        (LATER, 200, "position must not lie before the last change of the schedule, at 300, got 200"),
        ({"web": 1, "poems": 2}, 400, "reweight weights .*poems"),
        ({"web": 0, "books": 0, "code": 0}, 400, "weight"),
    ]:
        with pytest.raises(ValueError, match=says):
            sampler.reweighted(weights, position)
    for damage in (["x"], [[7]], [[7, [1, 1]]], [[0, [1, 1, 1]]], [[400, ["1/0", 1, 1]]], [[400, [0, 0, 0]]]):
        with pytest.raises(ValueError, match=r"reweights|weight above 0"):
            sampler.reweights = damage
    assert sampler.reweights == []
    assert list(sampler) == mixture(schedule=schedule).take(0, 600).tolist()
    with pytest.raises(ValueError, match="it takes no schedule"):
        WeightedDistributedSampler(DATA, FIRST, stopping="drop_exhausted").reweighted(LATER, 50)
