"""Passes that come again, and places that are asked for again: nothing is lost, repeated or numbered otherwise."""

import json
import os
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doors import sampler_with
from torch.utils.data import RandomSampler

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler
from headrace.size_aware_batching.integrations.accelerate import PreparedBatchSampler

SIZES = np.random.default_rng(0).integers(1, 50, 400)
ALL = list(range(len(SIZES)))
WITHOUT_THREE = [sample for sample in ALL if sample != 3]


def make(rank: int = 0, sizes: Any = SIZES, **options: Any) -> Any:
    usual: dict[str, Any] = {"max_total_size": 180, "num_replicas": 1, "rank": rank}
    return sampler_with(sizes, **usual | options)


def samples(batches: Iterable[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(batches))


def as_saved(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


def test_a_pass_after_a_change_and_a_break_is_whole() -> None:
    sampler = make()
    list(islice(sampler, 7))
    sampler.exclude([3])
    list(islice(sampler, 2))
    assert samples(sampler) == WITHOUT_THREE


@pytest.mark.parametrize("shuffle", [True, False])
def test_passes_without_set_epoch_are_whole_after_an_accepted_change(shuffle: bool) -> None:
    saved = make(shuffle=shuffle)
    first = list(islice(saved, 7))
    sampler = make(shuffle=shuffle, max_total_size=120)
    sampler.load_state_dict(as_saved(saved), accept={"max_total_size"})
    assert samples([*first, *sampler]) == ALL
    assert samples(sampler) == ALL
    begun = list(islice(sampler, 4))
    resumed = make(shuffle=shuffle, max_total_size=120)
    resumed.load_state_dict(as_saved(sampler))
    assert samples([*begun, *resumed]) == ALL
    assert samples(sampler) == ALL


def test_a_pass_is_whole_after_a_change_between_two_epochs() -> None:
    sampler = make()
    assert samples(sampler) == ALL
    sampler.exclude([3])
    assert samples(sampler) == WITHOUT_THREE
    assert len(sampler) == len(list(sampler))


def test_a_pass_is_whole_after_a_resume_with_a_change_at_the_end_of_an_epoch() -> None:
    saved = make()
    list(saved)
    sampler = make(max_total_size=120)
    sampler.load_state_dict(as_saved(saved), accept={"max_total_size"})
    assert list(sampler) == [], "the epoch was complete"
    assert samples(sampler) == ALL
    assert samples(sampler) == ALL


def test_an_order_that_cannot_be_read_again_is_kept_where_a_sample_is_excluded() -> None:
    order = RandomSampler(range(400), generator=torch.Generator().manual_seed(0))
    sampler, delivered = make(sampler=order), list[int]()
    for number, batch in enumerate(sampler):
        delivered += batch
        if number == 5:
            left_out = sorted(set(ALL) - set(delivered))[:20]
            sampler.exclude(left_out)
    assert sorted(delivered) == sorted(set(ALL) - set(left_out))


@pytest.mark.parametrize("tokens", [None, 2500])
def test_other_optimizer_steps_are_refused_inside_an_optimizer_step(tokens: int | None) -> None:
    ranks = [make(rank, num_replicas=2, tokens_per_step=1800) for rank in range(2)]
    for sampler in ranks:
        list(islice(sampler, 7))
    state = as_saved(ranks[0])
    assert state["inside_step"]
    sampler = make(num_replicas=2, tokens_per_step=tokens)
    with pytest.raises(ValueError, match=r"tokens_per_step.* at the beginning of an epoch only"):
        sampler.load_state_dict(state, accept={"tokens_per_step"})
    assert sampler.state_dict()["position"] == 0


@pytest.mark.parametrize("skip", [0, 2])
def test_a_state_of_an_earlier_position_has_its_step(skip: int) -> None:
    sampler = make(num_replicas=2)
    known = [(0, 0)]
    for number, _ in enumerate(islice(sampler, 7), 1):
        known.append((number, sampler.state_dict()["position"]))
    sampler.exclude([3])
    if skip:
        sampler.skip(skip)
    for number, _ in enumerate(islice(sampler, 5), 8):
        known.append((number, sampler.state_dict()["position"]))
    assert [(sampler.state_dict(position)["step"], position) for _, position in known] == known


def test_optimizer_steps_are_numbered_alike_after_a_change_and_a_resume() -> None:
    def fresh() -> Any:
        return make(tokens_per_step=[(0, 700), (12, 1500)])

    running = fresh()
    before = list(running)
    assert samples(before) == ALL
    running.set_epoch(1)
    running.exclude(ALL[:200])
    resumed = fresh()
    resumed.load_state_dict(as_saved(running))
    for sampler in (running, resumed):
        steps = sampler.plan().steps
        assert steps is not None
        assert set(steps.asked[:-1]) == {1500}, "epoch 0 had more than 12 steps"
    whole = list(running)
    assert list(resumed) == whole
    begun, resumed = list(islice(running, 4)), fresh()
    resumed.load_state_dict(as_saved(running))
    assert [*begun, *resumed] == whole


def test_an_epoch_may_be_a_time_stamp() -> None:
    sampler = make()
    list(sampler)
    sampler.set_epoch(1_700_000)
    first = list(islice(sampler, 5))
    state = as_saved(sampler)
    assert len(json.dumps(state)) < 2000
    resumed = make()
    resumed.load_state_dict(state)
    assert samples([*first, *resumed]) == ALL
    assert sampler.step(state["step"] - 1) == [first[-1]]
    assert sampler.step(0) == [next(iter(make()))]
    sampler.set_epoch(1_700_000_000)
    assert samples(sampler) == ALL


def test_prepared_batches_of_blocks_resume() -> None:
    def prepared() -> PreparedBatchSampler:
        shards = [SIZES[:150], SIZES[150:]]
        return PreparedBatchSampler(BlockwiseSizeAwareBatchSampler(shards, 180, block=100, num_replicas=1, rank="all"))

    sampler = prepared()
    delivered = list(islice(sampler.delivered(sampler), 9))
    resumed = prepared()
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert samples([*delivered, *resumed]) == ALL


def test_runs_over_other_sizes_share_a_directory_of_plans(tmp_path: Path) -> None:
    def blocks(sizes: Any) -> BlockwiseSizeAwareBatchSampler:
        return BlockwiseSizeAwareBatchSampler(
            [sizes[:150], sizes[150:]], 180, block=100, num_replicas=1, rank=0, plan_cache=tmp_path
        )

    for sizes in (SIZES, SIZES[::-1], SIZES):
        sampler = blocks(sizes)
        assert len(sampler) == len(list(sampler))
        assert samples(sampler) == ALL


def test_a_relative_directory_of_plans_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    sampler = make(plan_cache="plans")
    os.chdir(tmp_path / "second")
    next(iter(sampler))
    assert list((tmp_path / "first" / "plans").iterdir())
    assert not list((tmp_path / "second").iterdir())
