import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from headrace.size_aware_batching import (
    DistributedSizeAwareBatchSampler,
    PackedBatch,
    PackedCollate,
    PaddedBatch,
    PaddedCollate,
)
from headrace.size_aware_batching.collate import cumulative_lengths

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def sequences(lengths: list[int], *features: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.rand(length, *features, generator=generator) + 1 for length in lengths]


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Self-attention over ``[length, heads, features]``."""
    heads_first = x.transpose(-3, -2)
    return scaled_dot_product_attention(heads_first, heads_first, heads_first, **options).transpose(-3, -2)


class Protein(NamedTuple):
    """A sample with names."""

    tokens: torch.Tensor
    charge: float


# Padded.


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


@pytest.mark.parametrize("kind", [PaddedCollate, PackedCollate])
def test_numbers_and_texts_may_be_named_as_fixed(kind: Any) -> None:
    samples: list[Any] = [{"ids": [1, 2], "label": 3, "name": "a"}, {"ids": [4], "label": 5, "name": "b"}]
    batch = kind(fixed=["label", "name"])(samples)
    assert batch["label"].tolist() == [3, 5]
    assert batch["name"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"fixed must name fields .* got \['lable'\]: the samples have .*'label'"):
        kind(fixed=["lable"])(samples)
    with pytest.raises(ValueError, match=r"pad_value must name fields with a dimension 0, got \['label'\]"):
        kind(pad_value={"label": 0})(samples)


@given(lengths_lists, st.integers(1, 10))
def test_samples_are_cut_to_their_first_elements(lengths: list[int], most: int) -> None:
    samples: list[Any] = [{"x": x, "y": [float(n) for n in range(len(x))]} for x in sequences(lengths, 2)]
    cut = [{"x": sample["x"][:most], "y": sample["y"][:most]} for sample in samples]
    kinds: list[Any] = [PaddedCollate, PackedCollate]
    for kind in kinds:
        batch, expected = kind(max_length=most)(samples), kind()(cut)
        assert batch.keys() == expected.keys()
        assert all(torch.as_tensor(batch[key]).equal(torch.as_tensor(expected[key])) for key in batch)
    assert [len(sample["x"]) for sample in samples] == lengths


def test_what_is_fixed_is_not_cut() -> None:
    samples = [{"ids": [1, 2, 3], "features": [4, 5, 6]}, {"ids": [1], "features": [7, 8, 9]}]
    batch = PaddedCollate(max_length=2, fixed=["features"], return_lengths=True)(samples)
    assert batch["ids"].tolist() == [[1, 2], [1, 0]]
    assert batch["lengths"].tolist() == [2, 1]
    assert batch["features"].tolist() == [[4, 5, 6], [7, 8, 9]]


def test_a_cut_and_a_sampler_that_counts_it_stay_within_the_budget() -> None:
    sizes = [int(n) for n in np.random.default_rng(0).integers(1, 900, 300)]
    samples = [torch.zeros(size) for size in sizes]
    ways: list[tuple[Any, Any]] = [(PackedCollate, {}), (PaddedCollate, {"strategy": "bucketed", "cost": "padded"})]
    for kind, options in ways:
        batches = DistributedSizeAwareBatchSampler(sizes, 2048, max_length=512, **options)
        for batch in batches:
            kind(max_length=512, max_total_size=2048)([samples[index] for index in batch])
        loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # a list is a dataset of the map style
            batch_sampler=batches,
            collate_fn=kind(max_total_size=2048),
        )
        with pytest.raises(ValueError, match=r"max_total_size=2048 .* got \d+ of \d+ samples, .* max_length="):
            list(loader)


def test_a_batch_over_the_budget_is_refused() -> None:
    samples = [{"ids": [1, 2, 3]}, {"ids": [1]}]
    assert PaddedCollate(max_total_size=6)(samples)["ids"].numel() == 6
    with pytest.raises(ValueError, match=r"max_total_size=5 .* got 6 of 2 samples, the longest with 3"):
        PaddedCollate(max_total_size=5)(samples)
    with pytest.raises(ValueError, match=r"max_total_size=7 .* got 8"):
        PaddedCollate(length_multiple=4, max_total_size=7)(samples)
    assert PackedCollate(max_total_size=4, total_multiple=8)(samples)["cu_seqlens"].tolist() == [0, 3, 4, 7, 8]
    with pytest.raises(ValueError, match=r"max_total_size=3 .* got 4 of 2 samples, the longest with 3"):
        PackedCollate(max_total_size=3)(samples)
    with pytest.raises(ValueError, match=r"max_total_size=4 .* got 6"):
        PaddedCollate(max_total_size=4)([{"source": [1], "target": [1, 2, 3]}, {"source": [1, 2], "target": [1]}])


def test_the_form_of_a_sample_is_kept() -> None:
    batch = PaddedCollate()([Protein(torch.ones(2), 1.0), Protein(torch.ones(1), -1.0)])
    assert isinstance(batch, Protein)
    assert batch.tokens.shape == (2, 2)
    nested = PaddedCollate({"b": 4})([{"a": ({"b": torch.ones(n)}, [torch.ones(n), n])} for n in (1, 2)])
    assert nested["a"][0]["b"].tolist() == [[1, 4], [1, 1]]
    assert isinstance(nested["a"][1], list)
    assert nested["a"][1][1].tolist() == [1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.arange(3)[::-1],
        np.arange(3, dtype=">i4"),
        np.arange(6, dtype=np.float32)[::2],
        np.array([True]),
    ],
)
def test_numpy_arrays_of_every_make(array: NDArray[Any]) -> None:
    read_only = array.copy()
    read_only.flags.writeable = False  # as memory-mapped ones are; torch would warn
    for collated in (PaddedCollate()([array, read_only]), PackedCollate()([array, read_only]).values.reshape(2, -1)):
        assert collated.tolist() == [array.tolist()] * 2
    assert PaddedCollate()([np.float32(1), np.float32(2)]).dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-1, torch.uint8), (0.5, torch.int64), (float("nan"), torch.int32), (2, torch.bool), (300, torch.int8)],
)
def test_a_pad_value_that_a_dtype_cannot_hold(value: float, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"pad_value must be .*samples\[i\]\['x'\] of torch"):
        PaddedCollate({"x": value})([{"x": torch.ones(2, dtype=dtype)}])


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


# Packed.


@given(lengths_lists, st.sampled_from([(), (4,)]))
def test_packing_is_undone_by_its_offsets(lengths: list[int], features: tuple[int, ...]) -> None:
    samples = sequences(lengths, *features)
    values, cu_seqlens, max_seqlen, position_ids = PackedCollate()(samples)
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == lengths
    assert cu_seqlens[0] == 0
    assert max_seqlen == max(lengths)
    assert isinstance(max_seqlen, int)
    assert position_ids.tolist() == [place for length in lengths for place in range(length)]
    for begin, end, sample in zip(cu_seqlens[:-1], cu_seqlens[1:], samples, strict=True):
        assert torch.equal(values[begin:end], sample)


def test_packed_dicts() -> None:
    samples = [{"ids": torch.arange(n), "name": str(n), "box": torch.ones(4), "y": n / 2} for n in (2, 3)]
    batch = PackedCollate(fixed=["box"])(samples)
    assert list(batch) == ["ids", "name", "box", "y", "cu_seqlens", "max_seqlen", "position_ids"]
    assert batch["ids"].tolist() == batch["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert batch["box"].shape == (2, 4)
    assert batch["name"] == ["2", "3"]
    assert batch["y"].tolist() == [1.0, 1.5]
    with pytest.raises(ValueError, match=r"samples\[0\]\['box'\] has length 4, samples\[0\]\['ids'\] has 2: .*fixed"):
        PackedCollate()(samples)
    with pytest.raises(ValueError, match=r"fixed must name fields .* got \['bix'\]"):
        PackedCollate(fixed=["bix"])(samples)
    with pytest.raises(ValueError, match=r"max_seqlen.*already"):
        PackedCollate()([{"x": [1], "max_seqlen": 1}])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_attention_over_a_nested_tensor_is_attention_within_each_sample() -> None:
    samples = sequences([3, 1, 6, 4], 2, 8)  # [length, heads, features]
    packed = PackedCollate()(samples)
    nested = torch.nested.nested_tensor_from_jagged(packed.values, packed.cu_seqlens, max_seqlen=packed.max_seqlen)
    torch.testing.assert_close(attention(nested).values(), torch.cat([attention(sample) for sample in samples]))


def test_attention_by_offsets_is_attention_within_each_sample() -> None:
    # What a variable-length kernel does with cu_seqlens, written as one block-diagonal mask.
    samples = sequences([3, 0, 6, 4], 2, 8)
    x, cu_seqlens, _, position_ids = PackedCollate()(samples)
    owner = torch.bucketize(torch.arange(len(x)), cu_seqlens[1:], right=True)
    causal = position_ids[:, None] >= position_ids
    mask = (owner[:, None] == owner) & causal
    alone = [attention(sample, is_causal=True) for sample in samples if len(sample)]
    torch.testing.assert_close(attention(x, attn_mask=mask), torch.cat(alone))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_variable_length_kernel_takes_the_offsets() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")  # from torch 2.10 on
    samples = [sample.to("cuda", torch.float16) for sample in sequences([30, 1, 64, 17], 2, 64)]
    packed = PackedCollate()(samples)
    offsets, longest = packed.cu_seqlens.cuda(), packed.max_seqlen
    attended = varlen.varlen_attn(packed.values, packed.values, packed.values, offsets, offsets, longest, longest)
    alone = [attention(sample) for sample in samples]
    torch.testing.assert_close(attended, torch.cat(alone), atol=2e-3, rtol=2e-3)


def test_more_tokens_than_offsets_can_count() -> None:
    assert cumulative_lengths([2**31 - 1])[-1] == 2**31 - 1
    with pytest.raises(ValueError, match="got 2147483648"):
        cumulative_lengths([2**30, 2**30])


# Packed, for models of Hugging Face.

TOKENIZED: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7], "labels": [15, 16, 17], "attention_mask": [1, 1, 1]},
    {"input_ids": [8], "labels": [18], "attention_mask": [1]},
]


def test_the_layout_of_hugging_face() -> None:
    batch = PackedCollate(layout="huggingface")(TOKENIZED)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 16, 17, -100]]  # or the last token of a sample would predict the next
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 3, 4]
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == 3
        assert type(batch[f"max_length_{side}"]) is int
    assert set(batch) == {
        *("input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    }  # a mask of ones would keep models from seeing where samples begin
    for label, fixed in ((1, []), ([0.0, 1.0], ["labels"])):  # one for each sample: no targets of tokens
        classes = PackedCollate(layout="huggingface", fixed=fixed)([{"input_ids": [5, 6], "labels": label}] * 2)
        assert classes["labels"].tolist() == [label, label]
    unlabelled = PackedCollate(layout="huggingface", position_start=2)([{"input_ids": np.arange(2)}] * 2)
    assert "labels" not in unlabelled
    assert unlabelled["position_ids"].tolist() == [[2, 3, 2, 3]]


def test_padded_samples_and_samples_without_names_are_refused_in_the_layout_of_hugging_face() -> None:
    collate = PackedCollate(layout="huggingface")
    with pytest.raises(ValueError, match=r"samples\[1\]\['attention_mask'\] has zeros.*without padding"):
        collate([TOKENIZED[0], {"input_ids": [8, 0], "labels": [1, 1], "attention_mask": [1, 0]}])
    with pytest.raises(TypeError, match=r"samples must be dicts for layout='huggingface', got list"):
        collate([[1, 2]])


def test_separators_replace_the_first_element_of_each_sample_where_asked() -> None:
    assert PackedCollate()(TOKENIZED)["labels"].tolist() == [15, 16, 17, 18]
    assert PackedCollate(layout="huggingface", separator={})(TOKENIZED)["labels"].tolist() == [[15, 16, 17, 18]]
    batch = PackedCollate(separator={"labels": -100, "input_ids": 1})(TOKENIZED)
    assert batch["labels"].tolist() == [-100, 16, 17, -100]
    assert batch["input_ids"].tolist() == [1, 6, 7, 1]
    label = torch.arange(3)
    values = PackedCollate(separator={1: -1})([(torch.zeros(3), label), (torch.zeros(0), label[:0])]).values
    assert values[1].tolist() == [-1, 1, 2]  # an empty sample has no first element
    assert label.tolist() == [0, 1, 2]  # and samples stay as they are
    with pytest.raises(ValueError, match=r"separator must name fields .* got \['label'\]"):
        PackedCollate(separator={"label": -100})(TOKENIZED)
    with pytest.raises(ValueError, match=r"separator must be a whole number .*torch.uint8, got -100"):
        PackedCollate(separator={"x": -100})([{"x": torch.ones(2, dtype=torch.uint8)}])


# Packed, with padding for static shapes.


@given(lengths_lists, st.integers(1, 4), st.integers(1, 16), st.integers(0, 3))
def test_padded_packs_keep_every_sequence_and_add_only_padding(
    lengths: list[int], multiple: int, total_multiple: int, position_start: int
) -> None:
    samples = [{"x": sample, "labels": sample.clone()} for sample in sequences(lengths)]
    collate = PackedCollate(
        length_multiple=multiple,
        total_multiple=total_multiple,
        pad_value={"x": 0},
        separator={"labels": -100},
        position_start=position_start,
        return_lengths=True,
    )
    batch = collate(samples)
    begins, sizes = batch["cu_seqlens"][:-1], batch["cu_seqlens"].diff().tolist()
    total = sum(-(-length // multiple) * multiple for length in lengths)
    assert len(batch["x"]) == len(batch["labels"]) == sum(sizes) == -(-total // total_multiple) * total_multiple
    assert batch["lengths"].tolist() == lengths + [0] * (len(sizes) - len(lengths))
    assert batch["lengths"].dtype == torch.int32
    assert batch["max_seqlen"] == max(sizes)
    assert batch["position_ids"].tolist() == [place + position_start for size in sizes for place in range(size)]
    for sample, begin, size, length in zip(samples, begins, sizes, lengths, strict=False):
        assert size == -(-length // multiple) * multiple
        assert torch.equal(batch["x"][begin : begin + length], sample["x"])
        assert torch.equal(batch["labels"][begin + 1 : begin + length], sample["labels"][1:])
    assert int((batch["x"] == 0).sum()) == len(batch["x"]) - sum(lengths)  # the samples have no zeros
    assert int((batch["labels"] == -100).sum()) == len(batch["x"]) - sum(max(0, length - 1) for length in lengths)
    if any(lengths):  # positions stay within what the model was built for, and attention no longer than it was
        assert max(sizes) == -(-max(lengths) // multiple) * multiple


def test_packs_of_one_shape() -> None:
    collate = PackedCollate(layout="huggingface", total_length=12, pad_value={"input_ids": 1})
    batch = collate(TOKENIZED)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8] + [1] * 8]
    assert batch["labels"].tolist() == [[-100, 16, 17, -100] + [-100] * 8]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 7, 10, 12]  # the padding: sequences no longer than the longest
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 0, 1, 2, 0, 1]]
    assert collate([TOKENIZED[0]] * 4)["input_ids"].shape == (1, 12)
    paddings: list[Any] = [0, 1, {"input_ids": 1}]
    for pad_value in paddings:  # padding is never a target, with or without separators
        masked = PackedCollate(layout="huggingface", separator={}, total_multiple=6, pad_value=pad_value)
        assert masked(TOKENIZED)["labels"].tolist() == [[15, 16, 17, 18, -100, -100]]
    with pytest.raises(ValueError, match=r"total_length must be at least the 15 tokens of the batch, got 12.*budget"):
        collate([TOKENIZED[0]] * 5)
    empty = PackedCollate(total_length=3)([torch.ones(0)])
    assert empty.values.tolist() == [0, 0, 0]
    assert empty.cu_seqlens.tolist() == [0, 0, 3]


def test_arguments_of_packing() -> None:
    wrong: Any
    for wrong, error in (
        ({"layout": "hf"}, ValueError),
        ({"separator": {"labels": None}}, TypeError),
        ({"separator": -100}, TypeError),
        ({"position_start": -1}, ValueError),
        ({"position_start": 1.5}, TypeError),
        ({"length_multiple": 0}, ValueError),
        ({"total_multiple": 2.5}, TypeError),
        ({"total_multiple": None}, TypeError),
        ({"total_length": 0}, ValueError),
        ({"pad_value": "0"}, TypeError),
        ({"return_lengths": 1}, TypeError),
        ({"total_length": 10, "total_multiple": 4}, ValueError),
        ({"max_length": "9"}, TypeError),
        ({"max_total_size": -1}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            PackedCollate(**wrong)
    with pytest.raises(TypeError, match=r"samples must be dicts for return_lengths=True, got Tensor"):
        PackedCollate(return_lengths=True)([torch.ones(1)])
    with pytest.raises(ValueError, match=r"pad_value must name fields .* got \['label'\]"):
        PackedCollate(pad_value={"label": 1})(TOKENIZED)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_padding_in_a_pack_changes_no_sample() -> None:
    samples = sequences([3, 1, 6, 4], 2, 8)  # [length, heads, features]
    alone = [attention(sample) for sample in samples]
    batch = PackedCollate(total_multiple=16, return_lengths=True)([{"x": sample} for sample in samples])
    nested = torch.nested.nested_tensor_from_jagged(batch["x"], batch["cu_seqlens"], max_seqlen=batch["max_seqlen"])
    torch.testing.assert_close(attention(nested).values()[:14], torch.cat(alone))

    batch = PackedCollate(length_multiple=4, total_multiple=32, return_lengths=True)([{"x": x} for x in samples])
    x, offsets, place = batch["x"], batch["cu_seqlens"], batch["position_ids"]
    owner = torch.bucketize(torch.arange(len(x)), offsets[1:], right=True)
    real = place < batch["lengths"][owner]
    own = owner[:, None] == owner
    masked = attention(x, attn_mask=own & (real | ~real[:, None]))[real]  # what a kernel does with seqused_k
    torch.testing.assert_close(masked, torch.cat(alone))
    causal = attention(x, attn_mask=own & (place[:, None] >= place))[real]
    torch.testing.assert_close(causal, torch.cat([attention(sample, is_causal=True) for sample in samples]))


# Both.

ones = torch.ones
FAULTS: list[tuple[list[Any], type[Exception], str]] = [
    ([], ValueError, "samples must hold at least one"),
    ([{"x": ones(1)}, {"y": ones(1)}], ValueError, r"samples\[1\] has other keys.*lacks \['x'\] and has \['y'\]"),
    ([{"a": {"x": ones(1)}}, {"a": {}}], ValueError, r"samples\[1\]\['a'\] has other keys"),
    ([(ones(1),), (ones(1), ones(1))], ValueError, r"samples\[1\] has 2 elements, samples\[0\] has 1"),
    ([{"x": ones(1)}, {"x": ones(2).long()}], ValueError, r"samples\[1\]\['x'\] is of torch.int64, .*torch.float32"),
    ([(1, ones(1)), (1.5, ones(1))], ValueError, r"samples\[1\]\[0\] is of torch.float64"),
    ([{"x": ones(1)}, {"x": "one"}], TypeError, r"samples\[1\]\['x'\] is text, samples\[0\]\['x'\] is a tensor"),
    ([{"x": ones(1)}, {"x": None}], TypeError, r"samples\[1\]\['x'\] must be a tensor.*got NoneType"),
    ([np.array(["a"])], TypeError, r"samples\[0\] must be .*got an array of <U1"),
    ([ones(2, 3), ones(2, 4)], ValueError, r"samples\[1\] has shape \[2, 4\], samples\[0\] has \[2, 3\]"),
    ([ones(2), ones(2, 1)], ValueError, r"samples\[1\] has shape \[2, 1\]"),
]


@pytest.mark.parametrize("collate", [PaddedCollate(), PackedCollate()])
@pytest.mark.parametrize(("samples", "error", "message"), FAULTS)
def test_faulty_samples_are_named(collate: Any, samples: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate(samples)


@pytest.mark.parametrize(
    "collate",
    [
        PaddedCollate({0: -1}, 4, fixed=[1], return_mask=True),
        pytest.param(PackedCollate(fixed=[1]), marks=pytest.mark.nightly),
    ],
)
def test_in_a_loader_with_workers(collate: Any) -> None:
    samples = [(torch.full((n,), n), torch.zeros(2)) for n in range(1, 13)]
    sampler = DistributedSizeAwareBatchSampler(range(1, 13), 24)
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # a list is a dataset of the map style
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context="spawn",  # so that it has to be pickled
    )
    seen = [int(n) for batch in loader for n in batch.values[0].flatten() if n > 0]
    assert sorted(seen) == [n for n in range(1, 13) for _ in range(n)]


@pytest.mark.parametrize(
    "collate",
    [
        PaddedCollate({0: -1}, 4, fixed=[1], return_mask=True),
        PackedCollate(fixed=[1], layout="huggingface", separator={"labels": -100}, total_multiple=8),
    ],
)
def test_collate_functions_can_be_pickled(collate: Any) -> None:
    assert pickle.loads(pickle.dumps(collate)) == collate


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loader_pins_what_is_in_the_batches() -> None:
    samples: Any = [{"x": torch.ones(2)}, {"x": torch.ones(3)}]
    loader: DataLoader[Any] = DataLoader(samples, batch_size=2, collate_fn=PackedCollate(), pin_memory=True)
    batch = next(iter(loader))
    assert batch["x"].is_pinned()
    assert batch["cu_seqlens"].is_pinned()
    assert batch["max_seqlen"] == 3
    tensors: Any = [torch.ones(2), torch.ones(3)]
    loader = DataLoader(tensors, batch_size=2, collate_fn=PackedCollate(), pin_memory=True)
    packed = next(iter(loader))
    assert isinstance(packed, PackedBatch)
    assert packed.values.is_pinned()


# Lists of numbers.


def test_lists_of_floats_become_float32_and_empty_lists_take_the_dtype_of_the_others() -> None:
    for collate in (PaddedCollate(), PackedCollate()):
        batch = collate([{"x": []}, {"x": [0.5, 2]}])
        assert batch["x"].dtype == torch.float32
        assert batch["x"].flatten().tolist()[-2:] == [0.5, 2.0]
    assert PaddedCollate()([[1, 2], [3]]).dtype == torch.int64
    assert PaddedCollate()([[True], [False]]).dtype == torch.bool
    assert PaddedCollate()([list(np.arange(3)), [1]]).tolist() == [[0, 1, 2], [1, 0, 0]]


@pytest.mark.parametrize(
    "values",
    [
        *([1, 2], [True, False], [1, True], [True, 2], [1, 0.5], [0.5, 1], [0.5, True], [1, 2j], [0.5, 2j]),
        *([2**63 - 1, -(2**63)], [np.int32(1), 2], [1, np.float64(0.5)], [float("nan"), 1e300]),
    ],
)
def test_lists_of_numbers_take_the_values_of_numpy(values: list[Any]) -> None:
    array = np.array(values)
    with np.errstate(over="ignore"):
        expected = array.astype(np.float32) if array.dtype == np.float64 else array
        batch = PackedCollate()([values]).values
    assert batch.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(batch.numpy(), expected)
    batch[0] = batch[1]  # writeable


def test_lists_that_hold_other_things_are_fields() -> None:
    rows, count = PaddedCollate()([[[1, 2], 3], [[4], 5]])
    assert rows.tolist() == [[1, 2], [4, 0]]
    assert count.tolist() == [3, 5]
    square = PaddedCollate()([[[1, 2], [3, 4]], [[5], [6]]])
    assert [part.tolist() for part in square] == [[[1, 2], [5, 0]], [[3, 4], [6, 0]]]
