import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace.size_aware_batching._sizes import number_vector, real_number, size_vector


def test_numbers_of_any_make() -> None:
    values = (np.int8(4), torch.tensor([4]), Fraction(1, 2), np.array(0.5))
    made = [real_number(value, "size") for value in values]
    assert made == [4, 4, 0.5, 0.5]
    assert [type(number) for number in made] == [int, int, float, float]


def test_faulty_sizes_are_counted_and_the_first_is_named() -> None:
    with pytest.raises(ValueError, match="sizes holds 2 negative sizes, the first is -4 at index 1"):
        size_vector([1, -4, -5], "sizes")
    with pytest.raises(ValueError, match="sizes holds 1 NaN, the first at index 1"):
        size_vector(np.array([1.0, math.nan]), "sizes")
    assert number_vector([1, -4], "numbers").tolist() == [1, -4]


@pytest.mark.parametrize(
    "values",
    [[1, 2], (1, 2), np.array([1, 2], np.int8), np.array([1, 2], np.uint64), torch.tensor([1, 2])],
)
def test_integers_become_int64(values: Any) -> None:
    array = number_vector(values, "v")
    assert array.dtype == np.int64
    assert array.tolist() == [1, 2]


def test_large_arrays_are_not_copied() -> None:
    array, tensor = np.arange(4), torch.arange(4)
    assert np.shares_memory(number_vector(array, "v"), array)
    assert np.shares_memory(number_vector(tensor, "v"), tensor.numpy())


@pytest.mark.parametrize("values", [[], np.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32)])
def test_empty(values: Any) -> None:
    assert number_vector(values, "v").shape == (0,)


@pytest.mark.parametrize("values", [np.zeros((2, 2)), torch.tensor(1), torch.zeros(1, 1)])
def test_only_one_dimension(values: Any) -> None:
    with pytest.raises(ValueError, match="v must be 1-D"):
        number_vector(values, "v")


@pytest.mark.parametrize(
    "values", [3, "12", [[1], [1, 2]], [True], ["a"], [1j], [None], torch.tensor([True]), np.array(["a"])]
)
def test_only_real_numbers(values: Any) -> None:
    with pytest.raises(TypeError, match=r"v.* must"):
        number_vector(values, "v")


@pytest.mark.parametrize("values", [[2**63], np.array([2**63], dtype=np.uint64)])
def test_integers_that_do_not_fit(values: Any) -> None:
    with pytest.raises(ValueError, match=f"v holds {2**63}, beyond the 64-bit integers"):
        number_vector(values, "v")
