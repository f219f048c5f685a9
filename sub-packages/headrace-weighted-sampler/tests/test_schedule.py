"""Schedules of the sampler and of streams: weights that change at positions."""

import json
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from sources_of_items import IGNORE_SKIPS, Again

from headrace.weighted_sampler import (
    InterleavedDataset,
    NamedConcatDataset,
    Stopping,
    WeightedDistributedSampler,
    cosine_schedule,
)

DATA = NamedConcatDataset({"long": range(100), "short": range(300), "off": range(7)})


def test_a_schedule_changes_the_weights_at_its_positions() -> None:
    schedule: list[tuple[int, Any]] = [(100, [0, 1, 0]), (250, {"long": 1, "short": 0, "off": 1})]
    sampler = WeightedDistributedSampler(
        DATA, [1, 0, 0], semantics="proportion", epoch_length=70, schedule=schedule, seed=3
    )
    parts = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        parts.append(sampler.take(0, 70))
    order = np.concatenate(parts)
    kinds = np.searchsorted([100, 400], order, side="right")
    assert (kinds[:100] == 0).all()
    assert (kinds[100:250] == 1).all()
    assert np.bincount(kinds[250:], minlength=3).tolist() == [50, 0, 50]
    # Passes run on through the stages: the first hundred draws of "long" were one whole pass.
    assert sorted(order[:100]) == list(range(100))
    assert len(set(order[250:][kinds[250:] == 0])) == 50


# -- A cosine ------------------------------------------------------------------------------------------------------


def test_a_function_makes_a_schedule() -> None:
    """Any list of pairs is a schedule; this one is of a user."""

    def linear(step: int) -> dict[str, float]:
        return {"long": 10 - step, "short": step, "off": 0}

    schedule = [(400 * step, linear(step)) for step in range(1, 11)]
    sampler = WeightedDistributedSampler(DATA, linear(0), schedule=schedule, epoch_length=400)
    shares = []
    for epoch in range(12):
        sampler.set_epoch(epoch)
        shares.append(sampler.report().sources[1].draws)
    assert shares == [0, 40, 80, 120, 160, 200, 240, 280, 320, 360, 400, 400]


def test_a_cosine_of_weights_for_the_sampler() -> None:
    first, last = {"long": 1, "short": 0, "off": 0}, {"long": 0, "short": 1, "off": 0}
    schedule = cosine_schedule(first, last, start=1000, stop=9000, stages=8)
    assert [position for position, _ in schedule] == [1000 + 1000 * stage for stage in range(1, 9)]
    sampler = WeightedDistributedSampler(DATA, first, schedule=schedule, epoch_length=1000)
    shares = []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        shares.append(sampler.report().sources[1].draws / 1000)
    wanted = [0, *((1 - np.cos(np.pi * stage / 8)) / 2 for stage in range(9))]
    assert shares == pytest.approx(wanted, abs=0.002)


def test_a_cosine_of_weights_for_streams() -> None:
    first, last = {"a": 1, "b": 0}, {"a": 1, "b": 1}
    sources = {name: [name] * 10 for name in "ab"}
    schedule = cosine_schedule(first, last, stop=4096, stages=2)
    assert schedule == [(2048, {"a": 1, "b": Fraction(1, 2)}), (4096, {"a": 1, "b": 1})]
    dataset = InterleavedDataset(sources, first, schedule=schedule, stopping="endless")
    items = list(islice(dataset, 6144))
    counts = [Counter(items[begin : begin + 2048])["b"] for begin in (0, 2048, 4096)]
    assert counts == [0, pytest.approx(2048 / 3, abs=3), 1024]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"last": {"a": 1}}, ValueError, "last lacks 'b'"),
        ({"last": {"a": 1, "b": 1, "c": 1}}, ValueError, "last names 'c', which first does not have; it has 'a', 'b'"),
        ({"first": [1, 0]}, TypeError, r"first must be a mapping {name: weight}, got \[1, 0\]"),
        ({"first": {"a": -1, "b": 1}}, ValueError, r"first\['a'\] must not be negative"),
        ({"stages": 0}, ValueError, "stages must be an int >= 1, got 0"),
        ({"start": 5, "stop": 8, "stages": 4}, ValueError, "stop must be an int from 9 to"),
    ],
)
def test_a_cosine_that_cannot_be_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"first": {"a": 1, "b": 0}, "last": {"a": 0, "b": 1}, "stop": 100} | change
    with pytest.raises(error, match=message):
        cosine_schedule(**options)


# -- Of streams ----------------------------------------------------------------------------------------------------


def scheduled(*schedule: tuple[int, Any], stopping: Stopping = "endless") -> InterleavedDataset[str]:
    sources = {name: Again([name] * 700) for name in "abc"}
    return InterleavedDataset(sources, {"a": 3, "b": 1, "c": 0}, stopping=stopping, schedule=schedule, seed=2)


def test_a_schedule_changes_the_weights_of_a_stream() -> None:
    nested = {"old": (1, {"a": 1, "b": 1}), "c": 1}
    items = list(islice(scheduled((1024, {"a": 0, "b": 1, "c": 1}), (3072, nested)), 7168))
    assert Counter(items[:1024]) == {"a": 768, "b": 256}
    assert Counter(items[1024:3072]) == {"b": 1024, "c": 1024}
    assert Counter(items[3072:]) == {"a": 1024, "b": 1024, "c": 2048}
    assert items[:1024] == list(islice(scheduled(), 1024))


FUTURES: list[Any] = [
    (1024, [], [(1024, {"a": 0, "b": 1, "c": 1})]),
    (1000, [], [(1024, {"a": 0, "b": 1, "c": 1})]),
    (1800, [(500, {"a": 0, "b": 1, "c": 1})], [(500, {"a": 0, "b": 1, "c": 1}), (2600, {"a": 1, "b": 1, "c": 0})]),
    (1800, [(2548, {"a": 0, "b": 1, "c": 1})], []),
    (0, [(1, {"a": 0, "b": 1, "c": 1})], []),
]


@IGNORE_SKIPS
@pytest.mark.parametrize(("position", "old", "new"), FUTURES)
def test_a_stream_accepts_another_future(position: int, old: list[Any], new: list[Any]) -> None:
    before, after = scheduled(*old), scheduled(*new)
    begin = list(islice(before, position))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert begin + list(islice(after, 2000)) == list(islice(scheduled(*new), position + 2000))


@pytest.mark.parametrize(
    ("position", "old", "new"),
    [
        (1000, [], [(999, {"a": 1, "b": 1, "c": 0})]),
        (1000, [], [(999, {"a": 1, "b": 1, "c": 1})]),
        (1000, [(990, {"a": 1, "b": 1, "c": 0})], []),
        (2000, [(500, {"a": 0, "b": 1, "c": 1})], [(501, {"a": 0, "b": 1, "c": 1})]),
        (2000, [(500, {"a": 0, "b": 1, "c": 1})], []),
    ],
)
def test_a_stream_refuses_another_past(position: int, old: list[Any], new: list[Any]) -> None:
    before, after = scheduled(*old), scheduled(*new)
    list(islice(before, position))
    state = before.state_dict()
    with pytest.raises(ValueError, match=r"an earlier part of the schedule differs|this dataset draws from"):
        after.load_state_dict(state)


def until_all_have_ended(*schedule: tuple[int, list[int]]) -> InterleavedDataset[str]:
    sources = [[f"a{n}" for n in range(1000)], ["b0", "b1"], ["c0", "c1", "c2"]]
    return InterleavedDataset(sources, [1, 1, 0], stopping="all_exhausted", schedule=schedule, seed=2)


def test_a_source_that_a_schedule_draws_from_no_more_counts_as_ended() -> None:
    last_stage = list(islice(until_all_have_ended((100, [0, 1, 0])), 1000))
    assert len(last_stage) == 100  # "b" has run out before: nothing is left to wait for
    waiting = list(islice(until_all_have_ended((100, [0, 1, 0]), (200, [0, 1, 1])), 1000))
    assert 200 < len(waiting) < 220  # "c" comes later: until then "b" begins again
    assert {"c0", "c1", "c2"} < set(waiting[200:])
    again = list(islice(until_all_have_ended((100, [0, 1, 0]), (200, [1, 0, 0])), 5000))
    assert "a999" in again  # "a" comes back
    from_the_start = until_all_have_ended((1, [0, 0, 1]))
    assert len(list(islice(from_the_start, 1000))) == 4  # one item of "a" or "b", then all of "c"


@IGNORE_SKIPS
@pytest.mark.parametrize("position", [50, 99, 100])
def test_a_stream_ends_there_after_a_resume_too(position: int) -> None:
    whole, before, after = (until_all_have_ended((100, [0, 1, 0])) for _ in range(3))
    begin = list(islice(before, position))
    after.load_state_dict(before.state_dict())
    assert begin + list(islice(after, 1000)) == list(islice(whole, 1000))


@pytest.mark.parametrize(
    ("schedule", "stopping", "error", "message"),
    [
        ([(0, {})], "endless", ValueError, r"schedule\[0\] position must be an int from 1"),
        ([(5, {"a": 1})], "endless", ValueError, r"schedule\[0\] weights lacks 'b', 'c'"),
        ([(5, {"a": 0, "b": 0, "c": 0})], "endless", ValueError, r"schedule\[0\] weights must hold at least one"),
        ([5], "endless", TypeError, "schedule must be a list of tuples"),
        ([(5, {"a": 1, "b": 1, "c": 1})], "drop_exhausted", ValueError, "schedule cannot be followed with stopping"),
    ],
)
def test_a_schedule_of_a_stream_that_cannot_be_is_refused(
    schedule: Any, stopping: Stopping, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scheduled(*schedule, stopping=stopping)
