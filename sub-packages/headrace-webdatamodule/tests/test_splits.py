from typing import Any

import numpy as np
import pytest

from headrace.webdatamodule import Split
from headrace.webdatamodule.splits import by_split, positive_int, suffix_keys


def test_the_splits() -> None:
    assert [split.name for split in Split] == ["train", "val", "test", "predict"]


def test_a_mapping_is_copied() -> None:
    given = {Split.val: 1}
    checked = by_split("n_samples", given)
    given.clear()
    assert checked == {Split.val: 1}
    assert by_split("kwargs_wds", None) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": 1}, "keys must be Split.train, .* or their names, got 'training'"),
        (5, r"n_samples must be a mapping from Split.*got 5"),
    ],
)
def test_what_is_no_mapping_from_splits_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        by_split("n_samples", given)


@pytest.mark.parametrize("value", [1, 10**12, np.int64(7)])
def test_counts(value: Any) -> None:
    assert positive_int("n", value) == value
    assert type(positive_int("n", value)) is int


@pytest.mark.parametrize("value", [0, -1, np.int8(0)])
def test_counts_below_one_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="n must be a positive int"):
        positive_int("n", value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, "/a/directory"])
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="n must be a positive int"):
        positive_int("n", value)


def test_suffix_keys() -> None:
    assert suffix_keys("a.pyd") == ("a.pyd",)
    assert suffix_keys(iter(["a", "b"])) == ("a", "b")


@pytest.mark.parametrize("given", [5, [b"a"], None])
def test_keys_that_are_no_text(given: Any) -> None:
    with pytest.raises(TypeError, match="suffix_keys_wds must be"):
        suffix_keys(given)


@pytest.mark.parametrize("given", [[], "", ["a", ""]])
def test_no_keys(given: Any) -> None:
    with pytest.raises(ValueError, match="at least one member key"):
        suffix_keys(given)


@pytest.mark.parametrize("given", [".pkl", ["json", ".pkl"]])
def test_member_keys_go_without_a_leading_dot(given: Any) -> None:
    with pytest.raises(ValueError, match=r"without a leading dot: write 'pkl', got '\.pkl'"):
        suffix_keys(given)
