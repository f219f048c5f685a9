"""Weights by name, position, range and sample, nested ones, exact numbers, and everything that is refused."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler
from headrace.weighted_sampler.weights import MAX_DISTINCT_WEIGHTS, Source, as_fraction, group_by_weight, parse_sources

NAMED = NamedConcatDataset({"a": range(10), "b": range(5), "none": []})
JOINED: ConcatDataset[int] = ConcatDataset([range(10), range(5)])  # type: ignore[list-item]  # a range is a dataset


def read(weights: Any, dataset: Any = range(10)) -> list[tuple[int, int, Fraction]]:
    return [(part.begin, part.end, part.weight) for part in parse_sources("weights", weights, dataset).parts]


@pytest.mark.parametrize(
    "weights", [{"b": 2, "a": 0.5, "none": 0}, {0: 0.5, 2: 0, np.int64(1): 2}, [0.5, 2, 0], np.array([0.5, 2, 0])]
)
def test_datasets_by_name_and_by_position(weights: Any) -> None:
    assert read(weights, NAMED) == [(0, 10, Fraction(1, 2)), (10, 15, 2), (15, 15, 0)]


def test_names_are_kept() -> None:
    parts = parse_sources("weights", {0: 1, 1: 1, 2: 0}, NAMED).parts
    assert [part.name for part in parts] == ["a", "b", "none"]
    assert [part.name for part in parse_sources("weights", [1, 1], JOINED).parts] == ["0", "1"]
    assert NAMED[12] == 2


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_one_weight_per_sample(kind: Any) -> None:
    sources = parse_sources("weights", kind([1.0, 0.0, 3.0, 1.0]), range(4))
    assert sources.parts == (Source("weight 1", 0, 2, Fraction(1)), Source("weight 3", 2, 3, Fraction(3)))
    assert sources.members is not None
    assert sources.members.tolist() == [0, 3, 2]


def test_fractions_for_samples() -> None:
    assert read([Fraction(1, 2), 1, Fraction(1, 2)], range(3)) == [(0, 2, Fraction(1, 2)), (2, 3, 1)]


def test_ranges_come_sorted() -> None:
    weights: dict[Any, float] = {(np.int64(8), np.int64(10)): 2, (3, 5): 0, (0, 3): 0.5}
    assert read(weights) == [(0, 3, Fraction(1, 2)), (3, 5, 0), (8, 10, 2)]


@pytest.mark.parametrize(
    ("weights", "dataset", "fault"),
    [
        ({(5, 2): 1}, range(10), r"weights range \(5, 2\) is reversed"),
        ({(5, 5): 1}, range(10), r"\(5, 5\) is empty"),
        ({(0, 11): 1}, range(10), r"\(0, 11\) reaches outside the dataset of 10 samples: end must be at most 10"),
        ({(-1, 5): 1}, range(10), r"begin of the weights range \(-1, 5\) must be an int >= 0, got -1"),
        ({(0, 5): 1, (4, 8): 1}, range(10), r"\(0, 5\) and \(4, 8\) overlap"),
        ({(4, 8): 1, (0, 10): 1}, range(10), r"\(0, 10\) and \(4, 8\) overlap"),
        ({(4, 8): 1, (4, 9): 0}, range(10), r"\(4, 8\) and \(4, 9\) overlap"),
        ({}, range(10), "at least one weight above 0, got {}"),
        ({(0, 5): 0, (5, 10): 0.0}, range(10), "at least one weight above 0"),
        ([0.0] * 10, range(10), "at least one weight above 0"),
        ({(0, 5): float("nan")}, range(10), r"weight of the weights range \(0, 5\) must be finite, got nan"),
        ({(0, 5): -1}, range(10), "must not be negative, got -1"),
        ([1.0] * 9 + [-2.0], range(10), r"not negative, got -2.0 for sample 9 \(1 such weights\)"),
        ([1.0] * 9 + [float("inf")], range(10), "finite and not negative, got inf for sample 9"),
        ([1.0] * 11, range(10), "one weight for each of the 10 samples, got 11"),
        ([1.0] * 3, JOINED, "one for each of the 2 datasets, or one weight for each of the 15 samples, got 3"),
        (
            {"a": 1, "b": 1, "c": 1},
            NAMED,
            "weights names 'c', which the dataset does not have; it has 'a', 'b', 'none'",
        ),
        ({"a": 1, "none": 0}, NAMED, "weights lacks 'b': every source needs a weight; 0 leaves it out"),
        ({0: 1, 2: 1}, JOINED, "names 2, which the dataset does not have; it has 0, 1"),
        ({"a": 1, "b": 1, "none": 0.5}, NAMED, r"weights\['none'\] is 0.5, but that dataset is empty"),
        ({"a": -1, "b": 1, "none": 0}, NAMED, r"weights\['a'\] must not be negative, got -1"),
    ],
)
def test_weights_that_cannot_be_are_refused(weights: Any, dataset: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read(weights, dataset)


@pytest.mark.parametrize(
    ("weights", "dataset", "fault"),
    [
        (None, range(10), "weights must be a mapping or a sequence of numbers, got NoneType"),
        ({(0, 5)}, range(10), "must be a mapping or a sequence"),
        ("ab", range(2), "must be a mapping or a sequence"),
        ({(1,): 1.0}, range(10), "keys must be tuples"),
        ({1.5: 1.0}, range(10), "keys must be tuples"),
        ({True: 1.0}, range(10), "keys must be tuples"),
        ({(0, 5.0): 1}, range(10), r"end of the weights range \(0, 5.0\) must be an int >= 0, got 5.0"),
        ({(False, 5): 1}, range(10), "must be an int >= 0, got False"),
        ({(0, 5): 1, "a": 1}, NAMED, r"keys of one kind, got \['name', 'range'\]"),
        ({"a": 1}, range(10), "weights by name needs a concatenation of datasets, got range"),
        ({0: 1}, range(10), "weights by position needs a concatenation of datasets, got range"),
        ({"a": 1}, JOINED, "by name needs a dataset with names, and ConcatDataset has none"),
        ({(0, 5): "1"}, range(10), "must be an int, float, Fraction or Decimal, got '1'"),
        (np.ones((2, 2)), range(2), r"one dimension, got dtype float64, shape \(2, 2\)"),
        (np.array([True, False]), range(2), "numbers in one dimension, got dtype bool"),
    ],
)
def test_weights_of_the_wrong_kind_are_refused(weights: Any, dataset: Any, fault: str) -> None:
    with pytest.raises(TypeError, match=fault):
        read(weights, dataset)


@pytest.mark.parametrize(
    ("datasets", "fault"),
    [
        ([range(3)], "must be a mapping"),
        ({1: range(3)}, "strings as names, got 1"),
        ({"a": 5}, "must have a length"),
    ],
)
def test_datasets_that_cannot_be_joined_are_refused(datasets: Any, fault: str) -> None:
    with pytest.raises(TypeError, match=fault):
        NamedConcatDataset(datasets)


def test_no_datasets_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one dataset"):
        NamedConcatDataset({})


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 7.5]), min_size=1, max_size=60).filter(any))
def test_each_sample_is_in_the_group_of_its_weight(weights: list[float]) -> None:
    sources = group_by_weight("weights", np.array(weights))
    assert sources.members is not None
    assert sources.rounding == 0.0
    assert sorted(sources.members.tolist()) == [place for place, weight in enumerate(weights) if weight]
    for part in sources.parts:
        members = sources.members[part.begin : part.end].tolist()
        assert members == sorted(members)
        assert {weights[member] for member in members} == {float(part.weight)}
    assert len(set(sources.weights)) == len(sources.weights)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 14.0])
def test_too_many_weights_are_rounded_a_little(spread: float) -> None:
    weights = np.exp(np.random.default_rng(0).uniform(0, spread, 50_000))
    sources = group_by_weight("weights", weights)
    assert sources.members is not None
    assert 1 < len(sources.parts) <= MAX_DISTINCT_WEIGHTS
    assert 0 < sources.rounding <= 0.004
    rounded = np.repeat(list(map(float, sources.weights)), [part.size for part in sources.parts])
    assert np.abs(rounded / weights[sources.members] - 1).max() == pytest.approx(sources.rounding)


class Batched(list[int]):
    """A dataset that counts how often it is asked."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls += 1
        return [self[index] for index in indices]


def test_a_batch_asks_each_dataset_once() -> None:
    batched, plain = Batched(range(100, 110)), list(range(200, 205))
    both = NamedConcatDataset({"empty": [], "batched": batched, "plain": plain})
    indices = [9, 12, 0, 14, 9, 10, 3]
    loader: Any = torch.utils.data.DataLoader(both, batch_sampler=[indices], collate_fn=list)
    assert list(loader) == [[both[index] for index in indices]]
    assert batched.calls == 1
    assert both.__getitems__([]) == []
    assert both.__getitems__([-1, 0]) == [204, 100]
    with pytest.raises(IndexError):
        both.__getitems__([0, 15])


def test_a_class_that_changes_samples_changes_those_of_batches() -> None:
    class Doubled(NamedConcatDataset[int]):
        def __getitem__(self, index: int) -> int:
            return 2 * int(super().__getitem__(index))  # type: ignore[no-untyped-call]

    assert Doubled({"a": Batched([1, 2]), "b": [3]}).__getitems__([2, 0]) == [6, 2]


# -- Exact numbers -----------------------------------------------------------------------------------------------


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_a_float_counts_as_its_shortest_decimal(ratio: float) -> None:
    assert as_fraction("weight", ratio) == Fraction(repr(ratio))
    assert float(as_fraction("weight", ratio)) == ratio


@pytest.mark.parametrize(
    ("weight", "want"),
    [
        (1.1, Fraction(11, 10)),
        (np.float32(1.1), Fraction(11, 10)),
        (np.float64(1.1), Fraction(11, 10)),
        (np.longdouble("1.1"), Fraction(11, 10)),
        (Decimal("1.1"), Fraction(11, 10)),
        (Fraction(1, 3), Fraction(1, 3)),
        (2, 2),
        (np.int8(2), 2),
        (10**17, 10**17),
    ],
)
def test_kinds_of_numbers(weight: Any, want: Fraction) -> None:
    assert as_fraction("weight", weight) == want


@pytest.mark.parametrize("weight", [True, np.True_, "1.1", None, 1j, [1.0]])
def test_what_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match=r"weight of ours must be an int, float"):
        as_fraction("weight of ours", weight)


NOT_FINITE = [
    *(math.nan, math.inf, -math.inf, np.float32("nan")),
    *map(Decimal, ("NaN", "sNaN", "inf", "-inf")),
]


@pytest.mark.parametrize("weight", NOT_FINITE, ids=str)
def test_what_is_not_finite_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight of ours must be finite, got"):
        as_fraction("weight of ours", weight)


@pytest.mark.parametrize("weight", [-1, -0.5, Fraction(-1, 3), Decimal("-1e-9"), np.float64(-2)], ids=str)
def test_what_is_negative_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -"):
        as_fraction("weight of ours", weight)


# -- Nested weights ----------------------------------------------------------------------------------------------

NESTED: dict[str, Any] = {"web": (0.7, {"en": 3, "rest": (1, {"de": 1, "fi": 1})}), "code": 0.3}
LANGUAGES = NamedConcatDataset({"de": range(100), "code": range(300), "en": range(900), "fi": range(50)})


def test_nested_weights_are_proportions_of_their_groups() -> None:
    sampler = WeightedDistributedSampler(LANGUAGES, NESTED, epoch_length=4000)
    flat = {"en": 0.525, "de": 0.0875, "fi": 0.0875, "code": 0.3}
    assert list(sampler) == list(WeightedDistributedSampler(LANGUAGES, flat, epoch_length=4000))
    assert {line.name: line.draws for line in sampler.report().sources} == {
        "de": 350,
        "code": 1200,
        "en": 2100,
        "fi": 350,
    }
    sources = {name: [name] * 50 for name in flat}
    streams = [InterleavedDataset(sources, weights, stopping="endless") for weights in (NESTED, flat)]
    assert list(islice(streams[0], 2000)) == list(islice(streams[1], 2000))


@pytest.mark.parametrize(
    ("weights", "options", "fault"),
    [
        ({"web": (1, {"en": 1}), "en": 1}, {}, "weights names 'en' twice"),
        ({"web": (1, {"en": 0})}, {}, r"weights\['web'\]\[1\] must hold at least one weight above 0"),
        ({"web": (-1, {"en": 1})}, {}, r"weights\['web'\] must not be negative"),
        ({"web": (1, {"en": -1})}, {}, r"weights\['web'\]\[1\]\['en'\] must not be negative"),
        (NESTED, {"semantics": "count"}, "nested weights need semantics='proportion', got 'count'"),
    ],
)
def test_nested_weights_that_cannot_be_are_refused(weights: Any, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        WeightedDistributedSampler(LANGUAGES, weights, **options)


def test_nested_weights_and_schedules_may_come_from_json() -> None:
    web: dict[str, Any] = {"web": [0.7, {"en": 3, "de": 1}], "code": 0.3, "fi": 0}
    read: Any = json.loads(json.dumps({"weights": [1, 0, 0, 0], "schedule": [[100, web]]}))
    want = WeightedDistributedSampler(
        LANGUAGES, [1, 0, 0, 0], schedule=[(100, {**web, "web": (0.7, {"en": 3, "de": 1})})]
    )
    assert WeightedDistributedSampler(LANGUAGES, **read).fingerprint == want.fingerprint


def test_a_group_without_a_weight_says_how_to_write_one() -> None:
    bare: dict[str, Any] = {"web": {"en": 3, "de": 1, "fi": 0}, "code": 0.3}
    message = r"weights\['web'\] must be a weight, or \(weight, {name: weight}\), got {'de': 1"
    with pytest.raises(TypeError, match=message):
        WeightedDistributedSampler(LANGUAGES, bare)
    with pytest.raises(TypeError, match=message):
        InterleavedDataset({name: [1] for name in LANGUAGES.names}, bare)


@pytest.mark.parametrize("semantics", ["ratio", "temperature"])
def test_nested_weights_are_proportions_only(semantics: Any) -> None:
    temperature = 2 if semantics == "temperature" else None
    with pytest.raises(ValueError, match=f"nested weights need semantics='proportion', got '{semantics}'"):
        InterleavedDataset(
            {"en": [1], "de": [2]}, {"web": (1, {"en": 3, "de": 1})}, semantics=semantics, temperature=temperature
        )
