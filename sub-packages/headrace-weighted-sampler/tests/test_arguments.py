"""Integers and exact weights as arguments, and what the errors say."""

import numpy as np
import pytest
import torch

from headrace.weighted_sampler._arguments import as_int


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_python_and_numpy_integers_are_accepted(value: object) -> None:
    got = as_int("rank", value, 0)
    assert (got, type(got)) == (3, int)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, np.array([1, 2]), torch.tensor([1, 2])])
def test_everything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"^rank must be an int >= 0, got"):
        as_int("rank", value, 0)


@pytest.mark.parametrize(
    ("value", "high", "allowed"), [(-1, None, ">= 0"), (-1, 5, "from 0 to 5"), (6, 5, "from 0 to 5")]
)
def test_bounds_are_named(value: int, high: int | None, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^epoch must be an int {allowed}, got {value}$"):
        as_int("epoch", value, 0, high)
