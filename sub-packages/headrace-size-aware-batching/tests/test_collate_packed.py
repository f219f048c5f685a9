"""Batches of samples end to end, with their offsets."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sequences import attention, lengths_lists, sequences
from torch.utils.data import DataLoader

from headrace.size_aware_batching import (
    PackedBatch,
    PackedCollate,
    Piece,
    SplitDataset,
)
from headrace.size_aware_batching.collate import cumulative_lengths


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


@given(lengths_lists, st.sampled_from(["flat", "huggingface"]), st.sampled_from([1, 4]))
def test_each_token_has_the_number_of_its_sequence(lengths: list[int], layout: Any, multiple: int) -> None:
    collate = PackedCollate(layout=layout, return_seq_idx=True, length_multiple=multiple, total_multiple=16)
    batch = collate([{"x": x} for x in sequences(lengths)])
    offsets, dim = batch["cu_seqlens" if layout == "flat" else "cu_seq_lens_q"], 0 if layout == "flat" else 1
    assert batch["seq_idx"].dtype == torch.int32
    assert batch["seq_idx"].shape == batch["position_ids"].shape
    numbers, counts = batch["seq_idx"].flatten().unique(return_counts=True)
    assert batch["seq_idx"].diff(dim=dim).ge(0).all()
    assert dict(zip(numbers.tolist(), counts.tolist(), strict=True)) == {
        number: length for number, length in enumerate(offsets.diff().tolist()) if length
    }


def test_the_number_of_a_sequence_needs_a_key() -> None:
    with pytest.raises(TypeError, match="samples must be dicts for return_seq_idx=True, got Tensor"):
        PackedCollate(return_seq_idx=True)([torch.arange(3)])


@pytest.mark.parametrize("layout", ["flat", "huggingface"])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [3, 1, 2], [1, 4], [4, 1], [2, 1, 1, 1, 2]])
def test_samples_of_one_token_stay_apart(layout: Any, lengths: list[int]) -> None:
    batch = PackedCollate(layout=layout, return_seq_idx=True)([{"x": x} for x in sequences(lengths)])
    offsets = batch["cu_seqlens" if layout == "flat" else "cu_seq_lens_q"]
    assert offsets.diff().tolist() == lengths
    positions = batch["position_ids"].flatten()  # transformers takes a new sequence to begin at each 0
    assert (positions == 0).nonzero()[:, 0].tolist() == offsets[:-1].tolist()
    assert batch["seq_idx"].flatten().bincount().tolist() == lengths


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


# For models of Hugging Face.


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


# With padding for static shapes.


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


def test_a_long_sample_is_cut_as_the_dataset_would_cut_it() -> None:
    samples = [{"ids": torch.arange(n), "labels": list(range(n)), "label": n, "name": str(n)} for n in (10, 3, 4, 0, 9)]
    keys: list[Any] = [Piece(0, 0, 4, 10), Piece(0, 4, 8, 10), Piece(0, 8, 10, 10), 1, 2, 3]
    keys += [Piece(4, 0, 4, 9), Piece(4, 4, 8, 9), Piece(4, 8, 9, 9)]
    options: dict[str, Any] = {"total_multiple": 32, "length_multiple": 4, "separator": {"labels": -100}}
    here = PackedCollate(max_length=4, oversize="split", return_lengths=True, **options)(samples)
    there = PackedCollate(return_lengths=True, **options)(SplitDataset(samples).__getitems__(keys))
    assert here.keys() == there.keys()
    for name in here:
        assert here[name] == there[name] if name in ("name", "max_seqlen") else torch.equal(here[name], there[name])
    assert here["piece_start"].tolist() == [0, 4, 8, 0, 0, 0, 0, 4, 8]
    assert here["position_ids"].tolist()[:16] == [*range(12), 0, 1, 2, 3]
    assert here["label"].tolist() == [10, 10, 10, 3, 4, 0, 9, 9, 9]
    again = PackedCollate(max_length=2, oversize="split")(SplitDataset(samples).__getitems__(keys[1:3]))
    assert again["piece_start"].tolist() == [4, 6, 8]


def test_pieces_of_tensors_and_fixed_fields() -> None:
    batch = PackedCollate(max_length=2, oversize="split")([torch.arange(5), torch.arange(1)])
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 6]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0]
    fixed = PackedCollate(max_length=2, oversize="split", fixed=[1])([(torch.arange(3), torch.arange(7))])
    assert [field.shape for field in fixed.values] == [(3,), (2, 7)]


def test_positions_count_from_the_sample_or_the_sequence() -> None:
    samples = SplitDataset([{"ids": [5, 6, 7, 8]}, {"ids": [9]}]).__getitems__([Piece(0, 2, 4, 4), 1])
    found = {p: PackedCollate(positions=p)(samples)["position_ids"].tolist() for p in (None, "sample", "sequence")}
    assert found == {None: [2, 3, 0], "sample": [2, 3, 0], "sequence": [0, 1, 0]}
    assert PackedCollate(position_start=2)(samples)["position_ids"].tolist() == [4, 5, 2]
    batch = PackedCollate(layout="huggingface")(samples)
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert set(batch) == set(PackedCollate(layout="huggingface")([{"ids": [5]}])), "nothing that a model does not take"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"oversize": "split"}, "oversize='split' needs max_length, the length of a piece, got None"),
        ({"oversize": "skip", "max_length": 3}, "oversize must be one of truncate, split, got 'skip'"),
        ({"positions": "batch"}, "positions must be one of sample, sequence, got 'batch'"),
        ({"positions": "sample", "layout": "huggingface"}, "positions must be 'sequence' with layout='huggingface'"),
    ],
)
def test_options_of_pieces_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCollate(**options)


def test_a_pack_over_the_budget_is_refused_however_it_is_cut() -> None:
    with pytest.raises(ValueError, match="at most max_total_size=8 elements, got 9"):
        PackedCollate(max_length=4, oversize="split", max_total_size=8)([torch.arange(9)])
