"""What a reader sees in a notebook: signatures and one-line descriptions."""

import inspect
from itertools import islice
from typing import Any

import pytest

import headrace.weighted_sampler
from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler

WEIGHTS = {(0, 100): 0.25, (100, 110): 2}


@pytest.mark.parametrize(
    "name", [name for name in headrace.weighted_sampler.__all__ if name not in ("Weight", "Stopping")]
)
def test_signatures_fit_on_a_screen(name: str) -> None:
    text = str(inspect.signature(getattr(headrace.weighted_sampler, name)))
    assert len(text) < 900
    assert "numpy.ndarray[" not in text


@pytest.mark.parametrize("argument", ["semantics", "per", "stopping"])
def test_a_signature_says_what_may_be_chosen(argument: str) -> None:
    assert "Literal['" in str(inspect.signature(WeightedDistributedSampler).parameters[argument]).replace('"', "'")


def test_a_sampler_says_where_it_is() -> None:
    sampler = WeightedDistributedSampler(range(110), WEIGHTS, num_replicas=4, rank=0)
    sampler.set_epoch(3)
    items = iter(sampler)
    list(islice(items, 3))
    assert repr(sampler) == (
        "WeightedDistributedSampler(110 samples of 2 sources, 45 an epoch, rank 0 of 4, epoch 3 at 12, seed 0)"
    )
    assert "1 source, " in repr(WeightedDistributedSampler(range(9), {(0, 9): 1}))


def test_a_sampler_of_ranks_that_are_not_known_yet_has_a_repr() -> None:
    sampler = WeightedDistributedSampler(range(110), WEIGHTS, rank=3)
    assert "ranks not known yet, epoch 0, seed 0" in repr(sampler)
    assert "ranks not known yet" in repr(InterleavedDataset([[1]], [1], rank=3))


def test_a_mixture_of_streams_says_where_it_is() -> None:
    dataset = InterleavedDataset({"a": [1] * 50, "b": [2] * 50}, {"a": 1, "b": 1}, num_replicas=2, rank=1, seed=5)
    dataset.set_epoch(2)
    wanted = "InterleavedDataset(2 sources, 'first_exhausted', rank 1 of 2, epoch 2 at {}, seed 5)"
    assert repr(dataset) == wanted.format(0)
    list(islice(dataset, 7))
    assert repr(dataset) == wanted.format(7)
    resumed = InterleavedDataset({"a": [1] * 50, "b": [2] * 50}, {"a": 1, "b": 1}, num_replicas=2, rank=1, seed=5)
    resumed.load_state_dict(dataset.state_dict())
    assert repr(resumed) == wanted.format(7)


def test_a_report_has_one_line_and_a_table() -> None:
    report = WeightedDistributedSampler(range(110), WEIGHTS, num_replicas=4, rank=0).report()
    assert repr(report) == "MixtureReport(epoch 0: 48 samples of 2 sources over 4 ranks, 3 padded, 0 dropped)"
    assert "\n" in str(report)


def test_a_repr_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = WeightedDistributedSampler(range(110), WEIGHTS, num_replicas=4, rank=0)
    dataset = InterleavedDataset([[1], [2]], [1, 1])

    def refuse(*_: Any) -> None:
        raise AssertionError("a repr planned")

    monkeypatch.setattr(type(sampler._order), "at", refuse)
    monkeypatch.setattr(type(dataset), "__iter__", refuse)
    assert repr(sampler)
    assert repr(dataset)
