"""Sizes in every form that can be given."""

import gzip
import math
import pickle
import sys
import time
from collections import UserDict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching._validation import real_number
from headrace.size_aware_batching.planning.limits import checked_budget
from headrace.size_aware_batching.sizes.files import fasta_lengths, sizes_of_file, sizes_of_files
from headrace.size_aware_batching.sizes.read import checked_size, number_vector, read_sizes, size_lookup, size_vector


def test_numbers_of_any_make() -> None:
    values = (np.int8(4), torch.tensor([4]), Fraction(1, 2), np.array(0.5))
    made = [real_number(value, "size") for value in values]
    assert made == [4, 4, 0.5, 0.5]
    assert [type(number) for number in made] == [int, int, float, float]


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


class Dataset:
    """A dataset that knows its tokens."""

    def __init__(self, num_tokens: Any, samples: int) -> None:
        self.num_tokens, self.samples = num_tokens, samples

    def __len__(self) -> int:
        return self.samples


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


@pytest.mark.parametrize("value", ["10", None, True, [10], 1j])
def test_budget_of_the_wrong_kind(value: object) -> None:
    with pytest.raises(TypeError, match="max_total_size must be a real number"):
        checked_budget(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, -math.inf, torch.tensor(0)])
def test_budget_that_holds_nothing(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_total_size must be (greater than 0, got|a real number, got NaN)"):
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


FASTA = b">one a protein\nMKVLA\nGG\n\n>two\n>three\r\nMK V\r\n"


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("shape", [(5,), (5, 2)])
@pytest.mark.parametrize("kind", [np.uint16, np.int64, np.float64])
def test_npy_comes_back_as_it_was_saved(tmp_path: Path, shape: tuple[int, ...], kind: type) -> None:
    saved: NDArray[Any] = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    np.save(tmp_path / "sizes.npy", saved)
    read = sizes_of_file(tmp_path / "sizes.npy")
    assert read.dtype == kind
    np.testing.assert_array_equal(read, saved)


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_text_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "sizes.txt"
    path.write_text("\n".join(map(str, sizes)))
    assert sizes_of_file(path).tolist() == sizes


def test_text_may_hold_real_numbers_and_end_in_empty_lines(tmp_path: Path) -> None:
    assert sizes_of_file(written(tmp_path / "s.txt", b"3\r\n1.5\r\n2e3\r\n\r\n")).tolist() == [3.0, 1.5, 2000.0]


@pytest.mark.parametrize("ending", [".fasta", ".fa", ".faa", ".fna", ".FASTA"])
def test_fasta_sizes_are_numbers_of_letters(tmp_path: Path, ending: str) -> None:
    assert sizes_of_file(written(tmp_path / f"p{ending}", FASTA)).tolist() == [7, 0, 3]
    assert sizes_of_file(written(tmp_path / f"p{ending}.gz", gzip.compress(FASTA))).tolist() == [7, 0, 3]


@given(st.lists(st.integers(0, 300)), st.integers(1, 90))
def test_fasta_sizes_do_not_depend_on_the_width_of_the_lines(lengths: list[int], width: int) -> None:
    lines: list[bytes] = []
    for n in lengths:
        lines += [b">x", *(b"A" * min(width, n - begin) for begin in range(0, n, width))]
    assert list(fasta_lengths(lines)) == lengths


def test_files_are_joined_in_order(tmp_path: Path) -> None:
    paths = [written(tmp_path / "b.txt", b"9\n8\n"), written(tmp_path / "a.fasta", FASTA)]
    assert sizes_of_files(paths).tolist() == [9, 8, 7, 0, 3]


def test_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"the same columns, got .*two\.npy: \(3, 2\)"):
        sizes_of_files([written(tmp_path / "b.txt", b"9\n"), tmp_path / "two.npy"])


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("s.csv", b"1\n", "the ending must be one of .npy, .txt, .fasta"),
        ("s.txt", b"1\n\n2\n", "line 2: expected one number, got ''"),
        ("s.txt", b"1\ntwo\n", "line 2: expected one number, got 'two'"),
        ("s.txt", b"1\n-2\n", "at index 1"),
        ("s.txt", b"1\nnan\n", "at index 1"),
        ("s.txt", b"\n", "holds no size"),
        ("s.txt", b"\xff\xfe", "not text in UTF-8"),
        ("s.fasta", b"MKV\n>one\nMK\n", "line 1: letters before the first '>'"),
        ("s.fasta", b"", "holds no size"),
        ("s.fasta.gz", FASTA, "[Nn]ot a gzipped file"),
        ("s.fasta.gz", gzip.compress(FASTA * 100)[:-30], "ended before"),
        ("s.npy", b"no array", "does not begin as a .npy file does"),
        ("s.npy", b"\x93NUMPY\x01\x00", "s.npy: "),
    ],
)
def test_what_holds_no_sizes_is_refused_by_name(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        sizes_of_file(written(tmp_path / name, content))
    assert name in str(caught.value)


def test_an_npy_file_never_runs_code(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.array([1, None]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        sizes_of_file(tmp_path / "s.npy")


# What users meet.


def test_parquet_without_pyarrow_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"need pyarrow, to read train\.parquet: pip install pyarrow"):
        DistributedSizeAwareBatchSampler(("train.parquet", "length"), 10)


def test_a_path_alone_says_how_to_name_the_column() -> None:
    with pytest.raises(TypeError, match=r"'train\.parquet': give the file with its column, \(path, 'length'\)"):
        DistributedSizeAwareBatchSampler("train.parquet", 10)


def test_a_module_of_ones_own_may_be_called_datasets() -> None:
    kind = type("Proteins", (Dataset,), {"__module__": "datasets.proteins"})
    assert read_sizes(kind(lambda index: index, 3)).tolist() == [0, 1, 2]


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


def test_max_length_cuts_the_column_it_names() -> None:
    graphs = np.array([[5, 50], [20, 60], [30, 40]])
    sampler = DistributedSizeAwareBatchSampler(graphs, (10, 60), strategy="sequential", max_length=(10, None))
    assert sampler.plan().sizes.tolist() == [[5, 50], [10, 60], [10, 40]]
    assert graphs.max() == 60
    for wrong in (10, (10,), (10, 20, 30)):
        with pytest.raises(ValueError, match="max_length must have one entry for each of the 2 columns"):
            DistributedSizeAwareBatchSampler(graphs, (30, 60), max_length=wrong)
    capped = DistributedSizeAwareBatchSampler([5, 20.5], 10, max_length=10).plan().sizes
    assert capped.tolist() == [5.0, 10.0]
    with pytest.raises(ValueError, match=r"max_length must be a single number for sizes of one column, got \(10, 20\)"):
        DistributedSizeAwareBatchSampler([5, 20], 30, max_length=(10, 20))
