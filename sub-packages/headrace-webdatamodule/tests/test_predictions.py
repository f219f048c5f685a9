"""Predictions of batches, taken apart and put in the order of the samples."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.webdatamodule.loading.predictions import in_order, rows


class Scored(NamedTuple):
    score: Any
    label: Any


def split(order: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({min(cut, len(order)) for cut in cuts} | {0, len(order)})
    return [order[start:stop] for start, stop in pairwise(ends)]


@given(st.permutations(range(12)), st.lists(st.integers(0, 12)))
def test_every_sample_gets_its_row(order: list[int], cuts: list[int]) -> None:
    batches = split(list(order), cuts)
    expected = [(sample, 10 * sample) for sample in range(12)]
    for make in (list, np.array, torch.tensor):
        outputs: list[Any] = [make([10 * sample for sample in batch]) for batch in batches]
        assert [(sample, int(row)) for sample, row in in_order(outputs, batches)] == expected


def test_a_sample_that_came_twice_is_there_once() -> None:
    assert in_order([["a", "b"], ["b again"]], [[0, 1], [1]]) == [(0, "a"), (1, "b")]


def test_rows_keep_the_kind_of_what_they_were() -> None:
    score, label = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ["x", "y"]
    (pair, _), (named, _), (mapped, _) = (
        list(rows(output, 2)) for output in ((score, label), Scored(score, label), {"s": {"in": score}, "l": label})
    )
    assert type(pair) is tuple
    assert torch.equal(pair[0], score[0])
    assert isinstance(named, Scored)
    assert named.label == "x"
    assert torch.equal(mapped["s"]["in"], score[0])


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ([1], "each of the 2 samples of a batch, got 1 rows"),
        (torch.zeros(3), "got 3 rows"),
        (torch.tensor(1.0), "got a single Tensor"),
        (np.float64(1.0), "got a single float64"),
        (None, "got a single NoneType"),
        ({"a": [1, 2], "b": [1]}, "got 1 rows"),
        (([1, 2], 3), "got a single int"),
        ((), "got 0 rows"),
        ({}, "got 0 rows"),
    ],
)
def test_outputs_without_a_row_for_each_sample(output: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list(rows(output, 2))


def test_outputs_of_other_batches() -> None:
    with pytest.raises(ValueError, match=r"what Trainer\.predict returned last, one for each of its 2 batches, got 1"):
        in_order([[1]], [[0], [1]])


def test_rows_that_lack_in_a_later_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1 rows"):
        in_order([[1], [2]], [[0], [1, 2]])
