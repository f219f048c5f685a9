"""Batches of rows, padded to their longest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import attention, lengths_lists, sequences
from torch.nn.utils.rnn import pad_sequence

from headrace.size_aware_batching import (
    PackedCollate,
    PaddedBatch,
    PaddedCollate,
)


@given(lengths_lists, st.integers(1, 5), st.sampled_from([(), (2,), (2, 3)]))
def test_padding_loses_nothing_and_adds_only_the_pad_value(
    lengths: list[int], multiple: int, features: tuple[int, ...]
) -> None:
    samples = sequences(lengths, *features)
    values, counts, mask = PaddedCollate(-7, multiple, return_lengths=True, return_mask=True)(samples)
    longest = values.shape[1]
    assert values.shape == (len(samples), longest, *features)
    assert longest % multiple == 0
    assert max(lengths) <= longest < max(lengths) + multiple
    assert counts.tolist() == mask.sum(1).tolist() == lengths
    assert mask.shape == (len(samples), longest)
    assert torch.equal(values[mask], torch.cat(samples))
    assert bool((values[~mask] == -7).all())


@given(lengths_lists)
def test_padding_is_that_of_torch(lengths: list[int]) -> None:
    samples = sequences(lengths)
    assert torch.equal(PaddedCollate(3)(samples), pad_sequence(samples, batch_first=True, padding_value=3))


def test_dicts_as_a_tokenizer_gives_them() -> None:
    samples = [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "weight": 0.5, "__key__": "first"},
        {"input_ids": [8], "labels": [8], "weight": 2.0, "__key__": "second"},
    ]
    collate = PaddedCollate({"input_ids": 1, "labels": -100})
    batch = collate(samples)
    assert list(batch) == ["input_ids", "labels", "weight", "__key__"]  # nothing but what was asked for
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["weight"].tolist() == [0.5, 2.0]
    assert batch["weight"].dtype == torch.float64
    assert batch["__key__"] == ["first", "second"]
    full = PaddedCollate(return_lengths=True, return_mask=True)(samples)
    assert list(full) == [*samples[0], "lengths", "attention_mask"]
    assert full["attention_mask"].tolist() == [[True] * 3, [True, False, False]]


def test_the_mask_is_one_that_attention_takes() -> None:
    samples = sequences([3, 5], 2, 8)
    batch = PaddedCollate(float("nan"), return_mask=True)([{"x": sample} for sample in samples])
    x = batch["x"].nan_to_num(1e6)
    y = attention(x, attn_mask=batch["attention_mask"][:, None, None, :])
    for row, sample in zip(y, samples, strict=True):
        torch.testing.assert_close(row[: len(sample)], attention(sample))


def test_source_and_target_are_padded_each_to_its_own_longest() -> None:
    samples = [(torch.ones(2), torch.ones(5)), (torch.ones(3), torch.ones(1))]
    source, target = PaddedCollate({1: 9}, 2)(samples)
    assert source.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert target.tolist() == [[1, 1, 1, 1, 1, 9], [1, 9, 9, 9, 9, 9]]
    with pytest.raises(ValueError, match=r"samples\[0\]\[1\] has length 5, samples\[0\]\[0\] has 2: .*fixed"):
        PaddedCollate(return_lengths=True)(samples)
    only_source = PaddedCollate(fixed=[1], return_lengths=True)([(s, t[:1]) for s, t in samples])
    assert isinstance(only_source, PaddedBatch)
    assert only_source.attention_mask is None
    assert only_source.lengths is not None
    assert only_source.lengths.tolist() == [2, 3]


def test_fields_named_as_fixed_are_stacked() -> None:
    samples = [{"x": torch.ones(n), "box": torch.ones(3)} for n in (2, 5)]
    assert PaddedCollate(0, 8)(samples)["box"].shape == (2, 8)
    batch = PaddedCollate(0, 8, fixed=["box"], return_lengths=True)(samples)
    assert batch["box"].shape == (2, 3)
    assert batch["lengths"].tolist() == [2, 5]
    with pytest.raises(ValueError, match=r"samples\[1\]\['x'\] has shape \[5\], samples\[0\]\['x'\] has \[2\].*fixed"):
        PaddedCollate(fixed=["x"])(samples)


def test_arguments_of_padding() -> None:
    for wrong, error in (
        ({"pad_value": "0"}, TypeError),
        ({"pad_value": {"x": None}}, TypeError),
        ({"length_multiple": 0}, ValueError),
        ({"length_multiple": 1.5}, TypeError),
        ({"length_multiple": None}, TypeError),
        ({"fixed": "x"}, TypeError),
        ({"return_lengths": "no"}, TypeError),
        ({"return_mask": 1}, TypeError),
        ({"max_length": 0}, ValueError),
        ({"max_total_size": 1.5}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            PaddedCollate(**wrong)
    with pytest.raises(TypeError, match="fixed"):
        PackedCollate(fixed="x")
    with pytest.raises(ValueError, match=r"pad_value must name fields .* got \['label'\]: .*'labels'"):
        PaddedCollate({"label": 1})([{"labels": [1]}])
    with pytest.raises(ValueError, match=r"lengths.*already"):
        PaddedCollate(return_lengths=True)([{"lengths": [1]}])
    with pytest.raises(ValueError, match="no tensor with a dimension 0"):
        PaddedCollate(return_mask=True)([{"a": 1}])
