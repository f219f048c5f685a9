from typing import Any

import pytest

from headrace.webdatamodule import Split
from headrace.webdatamodule.splits import by_split, needed_by


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
    with pytest.raises(ValueError, match=r"n_samples has 'val' twice: as a member of Split and by its name"):
        by_split("n_samples", {**given, "val": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": 1}, "keys must be 'train', .* or members of Split, got 'training': it is 'train' here"),
        ({"Validation": 1}, "got 'Validation': it is 'val' here"),
        ({"books": 1}, "got 'books'$"),
        ({5: 1}, "or members of Split, got 5"),
        (5, r"n_samples must be a mapping from Split.*got 5: give {'train': ...}"),
    ],
)
def test_what_is_no_mapping_from_splits_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        by_split("n_samples", given)


def test_predict_takes_the_test_split_where_there_is_no_other() -> None:
    assert needed_by("predict", ()) == needed_by("predict", {Split.test, Split.predict}) == Split.predict
    assert needed_by("predict", {Split.test}) == Split.test
