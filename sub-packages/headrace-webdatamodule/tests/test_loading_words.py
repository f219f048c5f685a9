"""Options as a checkpoint tells them: the same when they mean the same, and another when they do not."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.webdatamodule.loading.options import describe_option, differences


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
