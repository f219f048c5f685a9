"""Options of loaders, integers, seeds, and options in words."""

from collections import UserDict, UserList
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.webdatamodule.loading.options import Loading, describe_option, differences, seed_int


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


def made(by: int) -> Any:
    return lambda sample: sample[by]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (4, np.int64(4)),
        (0.3, np.float64(0.3)),
        (1, 1.0),
        ([1, 2], (1, 2)),
        ([1, {"a": [2]}], UserList([1, UserDict({"a": UserList([2])})])),
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


def test_options_of_workers_are_left_out_without_them() -> None:
    numpys: Any = np.int64(2)
    alone, ahead = (Loading(num_workers=workers, prefetch_factor=3).of_torch() for workers in (0, numpys))
    assert (alone["prefetch_factor"], alone["timeout"], alone["persistent_workers"]) == (None, 0, False)
    assert (ahead["prefetch_factor"], ahead["num_workers"], ahead["persistent_workers"]) == (3, 2, True)
    assert type(ahead["num_workers"]) is int


def test_options_of_a_split_are_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"num_workers\['val'\] must be an int >= 0, got -1: 0 reads in this process"):
        Loading(num_workers=-1, where="['val']")
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match=r"on_error\['val'\] must be 'raise' or 'skip', got 'ignore'"):
        Loading(on_error=wrong, where="['val']")
    assert Loading(on_error="skip", where="['val']") == Loading(**Loading(on_error="skip").arguments())
