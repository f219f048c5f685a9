"""The report counts what is really delivered; its picture shows that, and matplotlib stays optional."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler

WEIGHTS = {(0, 100): 0.255, (100, 110): 2, (110, 113): 0}


def samplers(world: int, drop_last: bool, epoch: int = 0) -> list[WeightedDistributedSampler]:
    made = [WeightedDistributedSampler(range(120), WEIGHTS, world, rank, drop_last=drop_last) for rank in range(world)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


@pytest.mark.slow
@given(st.integers(1, 16), st.booleans(), st.integers(0, 9))
def test_delivered_is_what_the_ranks_yield(world: int, drop_last: bool, epoch: int) -> None:
    ranks = samplers(world, drop_last, epoch)
    report = ranks[0].report()
    yielded = Counter(index >= 100 for sampler in ranks for index in sampler)
    assert [line.delivered for line in report.sources] == [yielded[False], yielded[True], 0]
    assert [(line.weight, line.draws) for line in report.sources] == [(Fraction("0.255"), 26), (2, 20), (0, 0)]
    assert [line.asked for line in report.sources] == [25.5 / 45.5, 20 / 45.5, 0]
    assert sum(line.share for line in report.sources) == pytest.approx(1)
    assert sum(yielded.values()) == 46 + len(report.padded) - len(report.dropped)
    assert (report.epoch, report.num_replicas, report.not_drawn) == (epoch, world, 10)


@given(st.integers(0, 9))
def test_seen_and_repeats_are_counted_from_the_first_epoch_on(epoch: int) -> None:
    sampler = samplers(1, False)[0]
    counts = np.zeros(120, np.int64)
    for number in range(epoch + 1):
        sampler.set_epoch(number)
        counts += np.bincount(list(sampler), minlength=120)
    for line, own in zip(sampler.report().sources, (counts[:100], counts[100:110], counts[110:113]), strict=True):
        assert line.seen == np.count_nonzero(own)
        assert line.repeats == own.sum() - line.seen
        assert line.coverage == line.seen / line.size


def test_samples_of_equal_weight_are_counted_too() -> None:
    sampler = WeightedDistributedSampler(range(50), np.arange(50) % 3, num_replicas=7, rank=0, semantics="ratio")
    report = sampler.report()
    assert [line.name for line in report.sources] == ["weight 1", "weight 2"]
    assert sum(line.delivered for line in report.sources) == 7 * len(sampler) == 49 + len(report.padded)
    assert report.not_drawn == 17


def test_the_shares_of_a_schedule_are_averaged() -> None:
    sampler = WeightedDistributedSampler(
        range(20),
        {(0, 10): 1, (10, 20): 0},
        semantics="proportion",
        epoch_length=100,
        schedule=[(50, {(0, 10): 1, (10, 20): 1})],
    )
    assert [line.asked for line in sampler.report().sources] == [0.75, 0.25]
    assert [line.draws for line in sampler.report().sources] == [75, 25]


def test_shares_by_tokens_are_reported_as_such() -> None:
    sizes = np.repeat([10, 90], [100, 50])
    options: dict[str, Any] = {"semantics": "proportion", "per": "token", "sizes": sizes, "epoch_length": 1000}
    report = WeightedDistributedSampler(range(150), {(0, 100): 3, (100, 150): 1}, **options).report()
    assert [line.asked_token_share for line in report.sources] == [0.75, 0.25]
    assert [line.token_share for line in report.sources] == pytest.approx([0.75, 0.25], abs=0.002)
    assert str(report).splitlines()[1].endswith("  asked token share  token share")
    assert str(report).splitlines()[2].split()[-2] == "0.7500"
    assert re.fullmatch(
        r"largest deviation from the token shares: 0\.\d\d of the longest sample \(at most 1\.00\)",
        str(report).splitlines()[-1],
    )


def test_token_shares_are_those_of_the_delivered_samples() -> None:
    sizes = np.concatenate([np.arange(100), np.arange(50) ** 2])
    options: dict[str, Any] = {"semantics": "proportion", "per": "token", "sizes": sizes, "epoch_length": 120}
    sampler = WeightedDistributedSampler(range(150), {(0, 100): 3, (100, 150): 1}, **options)
    drawn = np.zeros(2)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        tokens = np.bincount(np.array(list(sampler)) >= 100, sizes[list(sampler)], minlength=2)
        report = sampler.report()
        assert [line.token_share for line in report.sources] == pytest.approx(list(tokens / tokens.sum()))
        drawn += tokens
        # Any number of epochs together is as exact as one.
        assert np.abs(drawn - drawn.sum() * np.array([0.75, 0.25])).max() <= sizes.max()
        assert report.deviation is not None
        assert report.deviation <= 1


def test_dropped_sources_deliver_the_tokens_that_they_have() -> None:
    sizes = np.concatenate([np.full(100, 2), np.full(50, 8)])
    options: dict[str, Any] = {"semantics": "proportion", "per": "token", "sizes": sizes, "stopping": "drop_exhausted"}
    report = WeightedDistributedSampler(range(150), {(0, 100): 3, (100, 150): 1}, **options).report()
    assert [line.token_share for line in report.sources] == pytest.approx([1 / 3, 2 / 3])
    assert report.deviation is None


@pytest.mark.parametrize("options", [{}, {"per": "token", "sizes": [3] * 20}])
def test_the_heading_says_of_when_a_changing_weight_is(options: dict[str, Any]) -> None:
    both = NamedConcatDataset({"a": range(10), "b": range(10)})
    sampler = WeightedDistributedSampler(
        both, {"a": 1, "b": 0}, epoch_length=100, schedule=[(150, {"a": 1, "b": 4})], **options
    )
    heads: list[Any] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        report = sampler.report()
        heads.append((str(report).splitlines()[1].split("  ")[2].strip(), report.sources[1].weight))
    assert heads == [("weight", 0), ("first weight", 0), ("weight", 4)]


def test_a_schedule_shows_in_the_report() -> None:
    weights, later = {(0, 10): 1, (10, 20): 0}, {(0, 10): 2, (10, 20): 5}
    options: dict[str, Any] = {"semantics": "proportion", "epoch_length": 100, "schedule": [(130, later)]}
    sampler = WeightedDistributedSampler(range(20), weights, **options)
    found = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        report = sampler.report()
        found.append((report.changes, [int(line.weight) for line in report.sources]))
    assert found == [((), [1, 0]), ((30,), [1, 0]), ((), [2, 5])]
    sampler.set_epoch(1)
    assert "the weights change at position 30 of this epoch" in str(sampler.report())


@pytest.mark.parametrize(("drop_last", "extra"), [(False, "2 padded, 0 dropped"), (True, "0 padded, 1 dropped")])
def test_the_table_shows_the_numbers(drop_last: bool, extra: str) -> None:
    sampler = samplers(3, drop_last)[0]
    lines = str(sampler.report()).splitlines()
    assert lines[0] == f"epoch 0: {48 if not drop_last else 45} samples over 3 ranks, {extra}"
    assert lines[1].split() == ["source", "size", "weight", "asked", "share", "delivered", "coverage", "repeats"]
    assert lines[2].split()[:4] == ["0-100", "100", "0.255", "0.5604"]
    assert lines[-1] == "never drawn: 10 samples in no source or of weight 0"
    assert len({len(line) for line in lines[1:-1]}) == 1


def test_one_rank_is_not_called_ranks() -> None:
    assert str(samplers(1, False)[0].report()).startswith("epoch 0: 46 samples over 1 rank, 0 padded")


@pytest.mark.slow
def test_a_long_table_is_cut_and_says_so() -> None:
    report = WeightedDistributedSampler(range(100), {(place, place + 1): 1 for place in range(100)}).report()
    assert "and 60 more sources" in str(report)
    rounded = WeightedDistributedSampler(range(9000), np.random.default_rng(0).uniform(1, 2, 9000)).report()
    assert "weights rounded by at most 0.0" in str(rounded)


def calls_of(work: Callable[[], object]) -> int:
    """Count the Python calls of some work: they tell linear from quadratic, whatever else the machine does."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def report_many(count: int) -> None:
    data = NamedConcatDataset({str(place): range(1) for place in range(count)})
    weights: dict[str, Any] = {"all": (1, {str(place): 1 + place % 7 for place in range(count)})}
    sampler = WeightedDistributedSampler(data, weights, per="token", sizes=np.ones(count, int))
    assert sum(line.token_share or 0 for line in sampler.report().sources) == pytest.approx(1)
    InterleavedDataset({str(place): [place] for place in range(count)}, weights).state_dict()


@pytest.mark.slow
def test_four_times_as_many_sources_take_four_times_the_work() -> None:
    report_many(8)  # what is imported at the first use does not count
    few = calls_of(lambda: report_many(2**8))
    assert calls_of(lambda: report_many(2**10)) < 5 * few  # a sum over all of them for each: 15 times


NESTED: dict[str, Any] = {"web": (0.7, {"en": 3, "rest": (1, {"de": 1, "fi": 1})}), "code": 0.3}
LANGUAGES = NamedConcatDataset({"de": range(100), "code": range(300), "en": range(900), "fi": range(50)})


def test_the_report_of_nested_weights_is_a_tree() -> None:
    report = WeightedDistributedSampler(LANGUAGES, NESTED, epoch_length=4000).report()
    lines = [(line.groups, line.name, line.draws, line.size) for line in report.tree]
    assert lines == [
        ((), "web", 2800, 1050),
        (("web",), "rest", 700, 150),
        (("web", "rest"), "de", 350, 100),
        (("web", "rest"), "fi", 350, 50),
        (("web",), "en", 2100, 900),
        ((), "code", 1200, 300),
    ]
    shown = [line[:7].rstrip() for line in str(report).splitlines()[1:-1]]
    assert shown == ["source", "web", "  rest", "    de", "    fi", "  en", "code"]
    assert report.tree[0].share == pytest.approx(0.7)


@pytest.mark.slow
def test_importing_the_package_loads_no_optional_module() -> None:
    code = """
import sys, headrace.weighted_sampler
loaded = {"webdataset", "torchdata", "lightning", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_empty_source_of_weight_0_is_reported_by_tokens() -> None:
    data = NamedConcatDataset({"web": range(10), "none": []})
    sampler = WeightedDistributedSampler(
        data, {"web": 1, "none": 0}, per="token", sizes=range(1, 11), num_replicas=1, rank=0
    )
    assert [source.draws for source in sampler.report().sources] == [10, 0]
