"""FlexAttention's mask of packed batches, against masks that are evaluated for all pairs of tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from headrace.size_aware_batching import PackedCollate, packed_block_mask
from headrace.size_aware_batching.collate import cumulative_lengths

KINDS = ["causal", "bidirectional", "prefix"]
lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def dense(lengths: list[int], kind: str, prefix: list[int]) -> torch.Tensor:
    """Which key each query sees, pair by pair."""
    total, begin = sum(lengths), 0
    seen = torch.zeros(total, total, dtype=torch.bool)
    for length, shared in zip(lengths, prefix, strict=True):
        block = torch.ones(length, length, dtype=torch.bool)
        if kind != "bidirectional":
            block = block.tril()
        if kind == "prefix":
            block[:, :shared] = True
        seen[begin : begin + length, begin : begin + length] = block
        begin += length
    return seen


@given(lengths_lists, st.sampled_from(KINDS), st.data(), st.sampled_from([2, 4, 16, 128]))
def test_the_mask_is_that_of_all_pairs_of_tokens(
    lengths: list[int], kind: str, data: st.DataObject, block_size: int
) -> None:
    prefix = [data.draw(st.integers(0, length + 1)) for length in lengths]  # one that is too long is the whole
    total, offsets = sum(lengths), cumulative_lengths(lengths)
    mask = packed_block_mask(
        offsets,
        causal=kind != "bidirectional",
        prefix=torch.tensor(prefix) if kind == "prefix" else None,
        total=data.draw(st.sampled_from([None, total])),
        block_size=block_size,
    )
    assert mask.shape == (1, 1, total, total)
    assert torch.equal(create_mask(mask.mask_mod, None, None, total, total, "cpu")[0, 0], dense(lengths, kind, prefix))
    slow = create_block_mask(mask.mask_mod, None, None, total, total, "cpu", BLOCK_SIZE=block_size)
    assert torch.equal(mask.to_dense(), slow.to_dense())
    assert mask.full_kv_num_blocks is not None
    assert slow.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks, slow.full_kv_num_blocks)  # blocks that need no mask inside
    assert torch.equal(mask.kv_num_blocks, slow.kv_num_blocks)
    for numbers, counts, of_slow in (
        (mask.kv_indices, mask.kv_num_blocks, slow.kv_indices),
        (mask.full_kv_indices, mask.full_kv_num_blocks, slow.full_kv_indices),
    ):
        assert numbers is not None
        assert of_slow is not None
        for row, count, other in zip(numbers[0, 0], counts[0, 0], of_slow[0, 0], strict=True):
            assert row[:count].tolist() == other[:count].tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_over_a_pack_is_attention_within_each_sample(kind: str) -> None:
    lengths, prefix = [5, 1, 1, 190, 60], [2, 1, 0, 130, 60]
    batch = PackedCollate()([{"x": torch.randn(length, 2, 16)} for length in lengths])
    mask = packed_block_mask(
        batch["cu_seqlens"],
        causal=kind != "bidirectional",
        prefix=torch.tensor(prefix) if kind == "prefix" else None,
    )
    x = batch["x"].transpose(0, 1)[None]
    found = flex_attention(x, x, x, block_mask=mask)
    expected = scaled_dot_product_attention(x, x, x, attn_mask=dense(lengths, kind, prefix))
    torch.testing.assert_close(found, expected)


def test_a_mask_of_many_tokens_needs_no_pair_of_them() -> None:
    lengths = [4096, 1, *[511] * 200, 8192]
    mask = packed_block_mask(cumulative_lengths(lengths))  # all pairs would be 13 GB
    assert mask.kv_indices.numel() == (-(-sum(lengths) // 128)) ** 2
    assert mask.sparsity() > 90


def test_arguments_of_masks_are_refused() -> None:
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor of ints with one dimension, got list"):
        packed_block_mask([0, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cu_seqlens .* got torch.float32 of shape \[2\]"):
        packed_block_mask(torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match="cu_seqlens must have at least 2 elements"):
        packed_block_mask(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"prefix must have a length for each of 1 sequences.* got 2"):
        packed_block_mask(torch.tensor([0, 3]), prefix=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="needs causal=True"):
        packed_block_mask(torch.tensor([0, 3]), prefix=torch.tensor([1]), causal=False)
    with pytest.raises(ValueError, match="total must be an int >= 1, got 0"):
        packed_block_mask(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="block_size"):
        packed_block_mask(torch.tensor([0, 3]), block_size=0)


def test_another_total_is_refused() -> None:
    with pytest.raises(ValueError, match=r"total must be cu_seqlens\[-1\], 4, got 5"):
        packed_block_mask(torch.tensor([0, 3, 4]), total=5)
