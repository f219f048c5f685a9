"""Arguments that may differ from split to split, names of sources, seeds, and options in words."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.webdatamodule import Split
from headrace.webdatamodule.loading.options import checked_int, describe_option, differences, seed_int
from headrace.webdatamodule.splits import PerSplit, named_sources


def test_one_value_serves_all_splits() -> None:
    one = PerSplit("batch_size", 4, 9)
    assert not one.mapped
    assert [one[split] for split in Split] == [4, 4, 4, 4]
    assert all(split in one for split in Split)


def test_a_mapping_serves_its_splits_and_leaves_the_others_the_default() -> None:
    some = PerSplit("num_workers", {Split.val: 3}, 1)
    assert some.mapped
    assert [some[split] for split in Split] == [1, 3, 1, 1]
    assert [split in some for split in Split] == [False, True, False, False]


def test_a_mapping_that_is_a_value_is_one() -> None:
    named = {"json": None, "text": len}
    one = PerSplit("decode", named, mappings=True)
    assert not one.mapped
    assert one[Split.test] is named
    assert PerSplit("decode", {Split.train: {"json": None}}, mappings=True)[Split.train] == {"json": None}
    with pytest.raises(TypeError, match=r"decode: keys must be .* got 'json'; ask for values"):
        PerSplit("decode", named, cure="ask for values")


def test_none_is_no_split() -> None:
    none = PerSplit("shards", None)
    assert not any(split in none for split in Split)
    assert none[Split.train] is None


def test_splits_and_other_keys_do_not_mix() -> None:
    with pytest.raises(TypeError, match=r"batch_size: keys must be 'train', .* or members of Split, got 'books'"):
        PerSplit("batch_size", {Split.train: 1, "books": 2})


def test_names_of_splits_are_splits() -> None:
    named = PerSplit("batch_size", {"train": 64, Split.val: 128})
    assert [named[split] for split in (Split.train, Split.val, Split.test)] == [64, 128, None]
    assert PerSplit("shards", {"train": "/x", "val": "/y"}).mapped
    with pytest.raises(ValueError, match=r"batch_size has 'train' twice"):
        PerSplit("batch_size", {"train": 64, Split.train: 128})


def test_sources_are_named() -> None:
    assert named_sources("shards", "/x", "train") == {"train": "/x"}
    assert named_sources("shards", ["/x.tar"], "val") == {"val": ["/x.tar"]}
    assert named_sources("shards", {"a": "/x", "b": "/y"}, "train") == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({}, ValueError, "shards is empty: name at least one source"),
        ({1: "/x"}, TypeError, "names of sources must be text, got 1"),
        ({"": "/x"}, TypeError, "names of sources must be text, got ''"),
        ({"train": "/x"}, TypeError, "'train' is the name of a split"),
        ({"a": "/x", "test": "/y"}, TypeError, "'test' is the name of a split"),
    ],
)
def test_what_names_no_source(given: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        named_sources("shards", given, "train")


@pytest.mark.parametrize("value", [1, 10**12, np.int64(7)])
def test_counts(value: Any) -> None:
    assert checked_int("n", value, 1) == value
    assert type(checked_int("n", value, 1)) is int


@pytest.mark.parametrize(
    ("value", "kind"),
    [*((low, ValueError) for low in (0, -1, np.int8(0))), *((no, TypeError) for no in (True, 1.0, "1", None, "/a"))],
)
def test_what_is_no_count(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"n must be an int >= 1, got .*: some cure$"):
        checked_int("n", value, 1, "some cure")


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(7), np.uint64(2**64 - 1)])
def test_seeds(seed: Any) -> None:
    assert type(seed_int(seed)) is int
    assert seed_int(seed) == seed


@pytest.mark.parametrize(
    ("seed", "kind"), [(-1, ValueError), (2**64, ValueError), ("x", TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_what_is_no_seed(seed: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="seed must be"):
        seed_int(seed)


@pytest.mark.parametrize("name", ["training", "validation", "valid", "dev", "Test", "prediction"])
def test_a_split_in_other_words_is_no_source(name: str) -> None:
    with pytest.raises(TypeError, match=f"shards names sources, and {name!r} is the name of a split"):
        named_sources("shards", {name: "somewhere"}, "train")


@pytest.mark.parametrize("given", [{"a": {Split.train: "x"}}, {"a": Split.train}])
def test_a_mapping_the_wrong_way_round_is_told_the_right_one(given: Any) -> None:
    with pytest.raises(TypeError, match="for several sources"):
        named_sources("shards", given, "train")


def made(by: int) -> Any:
    return lambda sample: sample[by]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (4, np.int64(4)),
        (0.3, np.float64(0.3)),
        (1, 1.0),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (partial(sorted, key=len, reverse=True), partial(sorted, reverse=True, key=len)),
        (made(1), made(1)),
        (torch.arange(9), torch.arange(9)),
    ],
)
def test_what_means_the_same_reads_the_same(one: Any, other: Any) -> None:
    assert describe_option(one) == describe_option(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float64(0.3), np.float64(0.9)),
        (np.arange(9), np.arange(9) + 1),
        (torch.arange(9), torch.arange(9) + 1),
        ("a" * 200 + "b", "a" * 200 + "c"),
        (list(range(200)), [*range(199), 7]),
        (made(1), made(2)),
        (partial(sorted, key=made(1)), partial(sorted, key=made(2))),
        (True, 1),
        ("1", 1),
    ],
)
def test_what_differs_reads_otherwise(one: Any, other: Any) -> None:
    assert describe_option(one) != describe_option(other)
    assert "checkpoint has x=" in differences({"x": describe_option(one)}, {"x": describe_option(other)})


def test_what_is_short_is_told_as_it_is() -> None:
    assert describe_option({"web": 3, "books": [0.5, None, "a"]}) == "{'books': [0.5, None, 'a'], 'web': 3}"
    assert describe_option(partial(sorted, reverse=True)) == "sorted(reverse=True)"
    assert describe_option(dict) == "dict"
