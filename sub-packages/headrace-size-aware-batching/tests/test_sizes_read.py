"""Sizes in every form that can be given."""

import math
import pickle
import time
from collections import UserDict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sets_of_sizes import Dataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.sizes.read import checked_size, number_vector, read_sizes, size_lookup, size_vector


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
    with pytest.raises(ValueError, match=f"v must hold integers of 64 bits, got {2**63}"):
        number_vector(values, "v")


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
    array = read_sizes(Dataset(FORMS[form], 3) if callable(FORMS[form]) else FORMS[form])
    assert array.dtype.kind in "iu"
    assert array.tolist() == [3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_tensors(dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.5, 2.0], dtype=dtype, requires_grad=True)
    assert checked_size(size_lookup(sizes)(0), "index", 0) == 0.5
    assert read_sizes(sizes).tolist() == [0.5, 2.0]


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
    with pytest.raises(ValueError, match=r"the size of index 7 must be (a real number, got NaN|a number >= 0, got -)"):
        checked_size(value, "index", 7)


def test_errors_name_the_index_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"sizes must hold numbers >= 0, got -4 at index 1 \(2 are negative\)"):
        size_vector([1, -4, -5], "sizes")
    with pytest.raises(ValueError, match="sizeof must hold numbers, got NaN at index 2"):
        size_lookup(torch.tensor([0.0, 1.0, math.nan]))
    with pytest.raises(ValueError, match=r"sizes must be numbers .* got -2 at index 1"):
        read_sizes({0: 1, 1: -2})
    with pytest.raises(ValueError, match="the size of index 0 must be a real number, got NaN"):
        read_sizes(Dataset(lambda index: math.nan, 2))
    with pytest.raises(KeyError, match="sizeof must hold a size for each key, got none for 7"):
        size_lookup({1: 1})(7)


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
        ([0, 2**63], ValueError, f"x must hold integers of 64 bits, got {2**63}"),
        (np.array([2**63], dtype=np.uint64), ValueError, "x must hold integers of 64 bits"),
        ("12", TypeError, "x must be a 1-D tensor, array or sequence, got str"),
        ({1: 2}, TypeError, "got dict"),
    ],
)
def test_vectors_that_are_refused(values: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        number_vector(values, "x")


@pytest.mark.parametrize("index", [2, -1])
@pytest.mark.parametrize("sizeof", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
def test_an_index_outside_is_refused(sizeof: Any, index: int) -> None:
    with pytest.raises(IndexError, match=f"sizeof must hold a size for each index, got index {index} and 2 sizes"):
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

    assert read_sizes(Dataset(sizeof, 50)).tolist() == seen == list(range(50))


@pytest.mark.slow
def test_a_progress_bar_shows_up_only_when_it_takes_long(capfd: pytest.CaptureFixture[str]) -> None:
    read_sizes(Dataset(lambda index: index, 1000))
    assert capfd.readouterr().err == ""

    start = time.monotonic()

    def slow(index: int) -> int:
        while time.monotonic() < start + 1.1:  # the bar waits for a second
            time.sleep(0.01)
        return index

    read_sizes(Dataset(slow, 5))
    assert "sizes" in capfd.readouterr().err


def test_a_path_alone_says_how_to_name_the_column() -> None:
    with pytest.raises(TypeError, match=r"'train\.parquet': give the file with its column, \(path, 'length'\)"):
        DistributedSizeAwareBatchSampler("train.parquet", 10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["ab", "c"],
            r"'ab' of type str at index 0: give a number for each, such as \[len\(item\) for item in column\]",
        ),
        ([3, [1, 2]], r"\[1, 2\] of type list at index 1: give .*len\(item\)"),
        ([{"n": 3}, {"n": 4}], r"\{'n': 3\} of type dict at index 0: give .* \[item\[\.\.\.\] for item in column\]"),
        ([3, None], r"None of type NoneType at index 1: give each sample a number"),
        ([1, 2], r"numbers of type int: give np.array\(column\).astype\('int64'\)"),
        ([Decimal(1), Decimal(2)], r"numbers of type Decimal: give np.array\(column\).astype\('int64'\)"),
    ],
)
def test_objects_are_refused_with_what_came_and_the_cure(values: list[Any], message: str) -> None:
    column = np.empty(len(values), object)  # as object, text and list columns of other libraries arrive
    column[:] = values
    with pytest.raises(TypeError, match=f"^sizes must be numbers, .* got an array of object, {message}"):
        read_sizes(column)
    with pytest.raises(TypeError, match=f"^sizeof must hold integers or floats, got dtype object, {message}"):
        size_vector(column, "sizeof")


def test_lists_of_other_things_are_refused_with_what_came() -> None:
    with pytest.raises(TypeError, match=r"must be an array or a sequence, got generator: give list\(sizes\)"):
        read_sizes(len(one) for one in ["ab", "c"])
    with pytest.raises(TypeError, match=r"got list of <U2, 'ab' of type str at index 0: give"):
        read_sizes(["ab", "c"])
    with pytest.raises(ValueError, match=r"got rows that differ in length: give a number for each, such as \[len"):
        read_sizes([[1, 2], [3]])
    for scalar in (5, np.array(5), torch.tensor(5)):
        with pytest.raises(ValueError, match=r"sizes must have shape \[n\] or \[n, k\], got \(\)"):
            read_sizes(scalar)
    with pytest.raises(TypeError, match=r"got an array of bool$"):
        read_sizes(np.array([True]))
    with pytest.raises(ValueError, match=r"sizeof must hold numbers, got NaN at index 1 \(1 are null or NaN\)"):
        size_vector(np.array([1, np.nan]), "sizeof")


def test_a_memory_map_stays_one(tmp_path: Path) -> None:
    np.save(tmp_path / "sizes.npy", np.arange(9, dtype=np.uint16))
    mapped = np.load(tmp_path / "sizes.npy", mmap_mode="r")
    assert np.shares_memory(DistributedSizeAwareBatchSampler(mapped, 10).sizes, mapped)


def test_a_mapping_without_an_index_names_sizes_and_the_index() -> None:
    with pytest.raises(ValueError, match=r"sizes must be a mapping with the keys 0 to 2, got one without 1: give the"):
        DistributedSizeAwareBatchSampler({0: 5, "b": 6, 2: 7}, 10)
    with pytest.raises(ValueError, match="keys 0 to 1, got one without 0"):
        DistributedSizeAwareBatchSampler({"P12345": 5, "Q67890": 6}, 10)
