"""Checks that all packages share."""

import numpy as np
import pytest
import torch

from headrace.size_aware_batching._shared.checks import checked_int


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_of_every_library_are_accepted(value: object) -> None:
    number = checked_int("rank", value)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, np.array([1, 2]), torch.tensor([1, 2])])
def test_everything_else_is_refused_by_name_and_type(value: object) -> None:
    with pytest.raises(
        TypeError, match=rf"^rank must be an int >= 0, got (.|\n)* of type {type(value).__name__}: a cure$"
    ):
        checked_int("rank", value, cure="a cure")


@pytest.mark.parametrize(
    ("value", "high", "allowed"), [(-1, None, ">= 0"), (-1, 5, "from 0 to 5"), (np.int8(6), 5, "from 0 to 5")]
)
def test_bounds_are_named(value: int, high: int | None, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^epoch must be an int {allowed}, got {value}$"):
        checked_int("epoch", value, 0, high)
