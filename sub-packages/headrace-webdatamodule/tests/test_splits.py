from typing import Any

import numpy as np
import pytest

from headrace.webdatamodule import Split
from headrace.webdatamodule.splits import by_split, positive_int


def test_the_splits() -> None:
    assert [split.name for split in Split] == ["train", "val", "test", "predict"]


def test_a_mapping_is_copied() -> None:
    given = {Split.val: 1}
    checked = by_split("n_samples", given)
    given.clear()
    assert checked == {Split.val: 1}
    assert by_split("kwargs_wds", None) == {}


def test_names_of_splits_do_as_well() -> None:
    given: dict[Split | str, int] = {"predict": 1, Split.val: 2}
    assert by_split("n_samples", given) == {Split.predict: 1, Split.val: 2}
    with pytest.raises(ValueError, match=r"n_samples has Split.val twice: as a member of Split and by its name"):
        by_split("n_samples", {**given, "val": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": 1}, "keys must be Split.train, .* or their names, got 'training': it is 'train' here"),
        ({"Validation": 1}, "got 'Validation': it is 'val' here"),
        ({"books": 1}, "got 'books'$"),
        ({5: 1}, "or their names, got 5"),
        (5, r"n_samples must be a mapping from Split.*got 5: give {'train': ...}"),
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
