"""What stands where a sample has no values of its own."""

from typing import Any

import pytest
import torch

from headrace.size_aware_batching import (
    PackedCollate,
    PaddedCollate,
)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-1, torch.uint8), (0.5, torch.int64), (float("nan"), torch.int32), (2, torch.bool), (300, torch.int8)],
)
def test_a_pad_value_that_a_dtype_cannot_hold(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"pad_value must be .*samples\[i\]\['x'\] of torch"):
        PaddedCollate({"x": value})([{"x": torch.ones(2, dtype=dtype)}])


UNNAMED = [
    {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": [1, 1, 1]},
    {"input_ids": [8], "labels": [8], "attention_mask": [1]},
]


@pytest.mark.parametrize("pad_value", [0, 9, {"input_ids": 9}])
def test_padding_is_never_a_target_nor_attended_to(pad_value: Any) -> None:
    padding = pad_value if isinstance(pad_value, int) else 9
    rows = PaddedCollate(pad_value, 4)(UNNAMED)
    assert rows["input_ids"].tolist() == [[5, 6, 7, padding], [8, padding, padding, padding]]
    assert rows["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    total = PackedCollate(total_multiple=6, pad_value=pad_value)(UNNAMED)
    assert total["input_ids"].tolist() == [5, 6, 7, 8, padding, padding]
    assert total["labels"].tolist() == [5, 6, 7, 8, -100, -100]
    assert total["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    each = PackedCollate(length_multiple=2, pad_value=pad_value)(UNNAMED)
    assert each["labels"].tolist() == [5, 6, 7, -100, 8, -100]


def test_a_mapping_that_names_labels_and_masks_holds() -> None:
    named: dict[str | int, float] = {"labels": 2, "attention_mask": 3}
    rows = PaddedCollate(named)(UNNAMED)
    assert (rows["labels"].tolist()[1], rows["attention_mask"].tolist()[1]) == ([8, 2, 2], [1, 3, 3])
    total = PackedCollate(pad_value=named, total_length=5)(UNNAMED)
    assert (total["labels"].tolist(), total["attention_mask"].tolist()) == ([5, 6, 7, 8, 2], [1, 1, 1, 1, 3])
    flags = [{"x": torch.ones(n), "labels": torch.tensor([True, False])} for n in (1, 2)]
    assert PaddedCollate()(flags)["labels"].dtype == torch.bool  # of one length: nothing to pad
    with pytest.raises(ValueError, match=r"pad_value must be .*samples\[i\]\['labels'\] of torch.bool, got -100"):
        PaddedCollate(0, 4)(flags)
    assert PaddedCollate({"labels": 0}, 3)(flags)["labels"].tolist() == [[True, False, False]] * 2
