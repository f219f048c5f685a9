"""Digests: equal numbers of any type have one, and anything that differs has another."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.size_aware_batching._shared.digest import PIECE, array_digest, bytes_digest, text_digest
from headrace.size_aware_batching._shared.random import key_of, text_key


@given(st.lists(st.integers(0, 2**40), max_size=20), st.sampled_from([np.uint64, ">i8", np.float64]))
def test_equal_numbers_have_one_digest_in_any_type(numbers: list[int], kind: Any) -> None:
    array = np.array(numbers, np.int64)
    assert array_digest(array.astype(kind)) == array_digest(array)
    assert array_digest(np.repeat(array, 2).astype(kind)[::2]) == array_digest(array)


@pytest.mark.parametrize("kind", [np.uint16, np.int64, np.float64])
def test_other_numbers_shapes_and_orders_have_other_digests(kind: Any) -> None:
    count = PIECE + 100  # more than is hashed at once
    plain = (np.arange(count) % 251).astype(kind)
    larger, last, swapped = plain.copy(), plain.copy(), plain.copy()
    larger[5], last[-1] = 300, 252
    swapped[:2] = swapped[1::-1]
    arrays = [plain, larger, last, swapped, plain[:-1], plain.reshape(-1, 2), plain[:0], plain[:0].reshape(0, 2)]
    if kind is np.float64:
        arrays += [plain + 0.5, -plain, np.where(plain == 7, np.inf, plain), np.where(plain == 7, np.nan, plain)]
    assert len({array_digest(array) for array in arrays}) == len(arrays)


def test_digests_and_keys_are_the_same_everywhere() -> None:
    assert text_digest("headrace \udcff") == "543a53435e47d8cea9acb31d77aebd85"
    assert bytes_digest(b"head", b"race") == bytes_digest(b"headrace")
    assert array_digest(np.array([3, 700, 2**40])) == "c5e79463e9c3938e565b3d913a7651e4"
    assert key_of(7, [1, -2]) == 0x259A77001499055A
    assert text_key("headrace", 4).hex() == "7c519f78"
