import math
import pickle
import time
from collections import UserDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching._sizes import (
    checked_budget,
    checked_size,
    number_vector,
    real_number,
    size_array,
    size_lookup,
    size_vector,
)

FORMS: dict[str, Any] = {
    "callable": lambda index: [3, 1, 2][index],
    "mapping": {0: 3, 1: 1, 2: 2},
    "other mapping": UserDict({0: 3, 1: 1, 2: 2}),
    "list": [3, 1, 2],
    "tuple": (3, 1, 2),
    "list of tensors": [torch.tensor(3), torch.tensor(1), torch.tensor(2)],
    "list of numpy scalars": list(np.array([3, 1, 2], dtype=np.int16)),
    "int array": np.array([3, 1, 2], dtype=np.uint8),
    "int tensor": torch.tensor([3, 1, 2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_integers_gives_the_same_exact_integers(form: str) -> None:
    lookup = size_lookup(FORMS[form])
    sizes = [checked_size(lookup(index), "index", index) for index in range(3)]
    assert sizes == [3, 1, 2]
    assert all(type(size) is int for size in sizes)
    array = size_array(FORMS[form], 3)
    assert array.dtype == np.int64
    assert array.tolist() == [3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_tensors(dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
    assert checked_size(size_lookup(sizes)(0), "index", 0) == 0.5
    assert size_array(sizes, 2).tolist() == [0.5, 2.0]


@given(st.lists(st.one_of(st.integers(0, 2**63 - 1), st.floats(0, allow_nan=False)), min_size=1))
def test_size_array_is_int64_only_when_nothing_is_lost(values: list[float]) -> None:
    array = size_array(values, len(values))
    whole = all(isinstance(value, int) for value in values)
    assert array.dtype == (np.int64 if whole else np.float64)
    assert array.tolist() == (values if whole else [float(value) for value in values])


@pytest.mark.parametrize("sizeof", [None, 3, {1, 2}, "123", b"123", bytearray(b"1")])
def test_other_forms_are_refused(sizeof: Any) -> None:
    with pytest.raises(TypeError, match="sizeof must be a callable, a mapping, a sequence"):
        size_lookup(sizeof)


@pytest.mark.parametrize("value", [True, False, "3", None, 1j, [1, 2], torch.tensor([1, 2]), np.True_])
def test_what_is_no_real_number_is_no_size(value: object) -> None:
    with pytest.raises(TypeError, match="the size of index 7 must be a real number, got"):
        checked_size(value, "index", 7)


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, -math.inf, torch.tensor(math.nan), np.float32(-1)])
def test_nan_and_negative_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"the size of index 7 is (NaN|-.*number from 0 on)"):
        checked_size(value, "index", 7)


def test_numbers_of_any_make() -> None:
    made = [real_number(value, "size") for value in (np.int8(4), torch.tensor([4]), Fraction(1, 2), np.array(0.5))]
    assert made == [4, 4, 0.5, 0.5]
    assert [type(number) for number in made] == [int, int, float, float]
    assert checked_size(math.inf, "index", 7) == math.inf


@pytest.mark.parametrize("value", ["10", None, True, [10], 1j])
def test_budget_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match="max_total_size must be a real number"):
        checked_budget(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, -math.inf, torch.tensor(0)])
def test_budget_that_holds_nothing(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_total_size (must be greater than 0, got|is NaN)"):
        checked_budget(value)


def test_budgets() -> None:
    assert [checked_budget(value) for value in (1, 0.5, math.inf, np.int64(3), torch.tensor(2.5))] == [
        1,
        0.5,
        math.inf,
        3,
        2.5,
    ]


def test_errors_name_the_index_and_the_value() -> None:
    with pytest.raises(ValueError, match="sizes holds 2 negative sizes, the first is -4 at index 1"):
        size_vector([1, -4, -5], "sizes")
    with pytest.raises(ValueError, match="sizeof holds 1 NaN, the first at index 2"):
        size_lookup(torch.tensor([0.0, 1.0, math.nan]))
    with pytest.raises(ValueError, match="the size of index 1 is -2"):
        size_array({0: 1, 1: -2}, 2)
    with pytest.raises(ValueError, match="the size of index 0 is NaN"):
        size_array(lambda index: math.nan, 2)
    with pytest.raises(KeyError, match="sizeof has no size for 7"):
        size_lookup({1: 1})(7)
    with pytest.raises(ValueError, match="sizeof has 2 sizes for 3 elements"):
        size_array([1, 2], 3)


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        (np.ones((2, 2)), ValueError, r"x must be 1-D, got shape \(2, 2\)"),
        (torch.tensor(1), ValueError, "x must be 1-D"),
        (np.array([True]), TypeError, "x must hold integers or floats, got dtype bool"),
        (torch.tensor([1j]), TypeError, "got dtype complex"),
        (np.array(["a"]), TypeError, "got dtype <U1"),
        ([1, True], TypeError, r"x\[1\] must be a real number, got True"),
        ([[1], [2]], TypeError, r"x\[0\] must be a real number"),
        ([0, 2**63], ValueError, f"x holds {2**63}, beyond the 64-bit integers"),
        (np.array([2**63], dtype=np.uint64), ValueError, "beyond the 64-bit integers"),
        ("12", TypeError, "x must be a 1-D tensor, array or sequence, got str"),
        ({1: 2}, TypeError, "got dict"),
    ],
)
def test_vectors_that_are_refused(values: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        number_vector(values, "x")


def test_vectors_of_any_make() -> None:
    assert number_vector([], "x").shape == (0,)
    assert number_vector([-1, 2.5, Fraction(1, 4)], "x").tolist() == [-1, 2.5, 0.25]
    assert number_vector(range(3), "x").dtype == np.int64
    assert number_vector(np.array([0.5], dtype=np.float32), "x").dtype == np.float64


@pytest.mark.parametrize("index", [2, -1])
@pytest.mark.parametrize("sizeof", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_an_index_outside_is_refused(sizeof: Any, index: int) -> None:
    with pytest.raises(IndexError, match=f"sizeof holds 2 sizes and was asked for index {index}"):
        size_lookup(sizeof)(index)


@pytest.mark.parametrize("sizeof", [len, {1: 2}, [1, 2], np.arange(3), torch.arange(3)])
def test_lookups_can_be_pickled(sizeof: Any) -> None:
    key = "a" if sizeof is len else 1
    assert pickle.loads(pickle.dumps(size_lookup(sizeof)))(key) == size_lookup(sizeof)(key)


def test_a_callable_is_evaluated_once_for_each_index() -> None:
    seen: list[int] = []

    def sizeof(index: int) -> int:
        seen.append(index)
        return index

    assert size_array(sizeof, 50).tolist() == seen == list(range(50))


def test_a_progress_bar_shows_up_only_when_it_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    size_array(lambda index: index, 1000)
    assert capfd.readouterr().err == ""

    def slow(index: int) -> int:
        time.sleep(0.4)
        return index

    size_array(slow, 5)
    assert "sizes" in capfd.readouterr().err
