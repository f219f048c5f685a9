"""Sizes in files."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.size_aware_batching.sizes.files import fasta_lengths, sizes_of_file, sizes_of_files

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


@pytest.mark.parametrize(("name", "content"), [("s.txt", b"9\n2\n"), ("s.fasta", b">a\r\nMKVLAGGGG\r\n>b\r\nMK\r\n")])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, content: bytes) -> None:
    assert sizes_of_file(written(tmp_path / name, b"\xef\xbb\xbf" + content)).tolist() == [9, 2]


def test_an_npy_file_never_runs_code(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.array([1, None]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        sizes_of_file(tmp_path / "s.npy")
