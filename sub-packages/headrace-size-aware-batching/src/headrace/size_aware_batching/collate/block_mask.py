"""FlexAttention's mask of a packed batch, made from its offsets."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from headrace.size_aware_batching._shared.checks import checked_int


def packed_block_mask(
    cu_seqlens: Tensor,
    *,
    causal: bool = True,
    prefix: Tensor | None = None,
    total: int | None = None,
    block_size: int = 128,
) -> BlockMask:
    """Return the mask with which FlexAttention keeps the sequences of a packed batch apart.

    Call it once per batch, where the batch is on its device. It computes blocks from the offsets, in memory
    ``(total / block_size)**2``; ``create_block_mask`` evaluates all ``total**2`` pairs of tokens.

    Args:
        cu_seqlens: Start of each sequence and, last, the total: shape ``[n + 1]``, on the device of the attention.
        causal: Whether tokens see only themselves and earlier tokens of their sequence. False: all tokens of it.
        prefix: For each sequence, those of padding included, the length of its prefix: shape ``[n]``. All tokens of the
            sequence see the prefix, as in a prefix language model. Only with ``causal=True``. None: no prefix.
        total: Number of tokens; None: read from ``cu_seqlens``, which waits for the device.
        block_size: Tokens of a block; the kernels of FlexAttention need a multiple of 128.

    Returns:
        A ``BlockMask`` of shape ``[1, 1, total, total]``, for ``flex_attention(q, k, v, block_mask=...)``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a shape or a number is not allowed.

    >>> packed_block_mask(torch.tensor([0, 3, 4])).shape
    (1, 1, 4, 4)
    """
    _refuse_other("cu_seqlens", cu_seqlens)
    if len(cu_seqlens) < 2:
        raise ValueError("cu_seqlens must have at least 2 elements, the start and the end of a sequence, got fewer")
    if prefix is not None:
        _refuse_other("prefix", prefix)
        if not causal or len(prefix) != len(cu_seqlens) - 1:
            raise ValueError(
                f"prefix must have a length for each of {len(cu_seqlens) - 1} sequences, and needs causal=True, got "
                f"{len(prefix)} and causal={causal}"
            )
    checked_int("block_size", block_size, 2)
    total = checked_int("total", int(cu_seqlens[-1]) if total is None else total, 1)
    if cu_seqlens.device.type == "cpu" and total != cu_seqlens[-1]:  # elsewhere to compare would wait for the device
        raise ValueError(f"total must be cu_seqlens[-1], {int(cu_seqlens[-1])}, got {total}")
    device, starts, ends = cu_seqlens.device, cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    prefix_ends = starts if prefix is None else torch.minimum(starts + prefix.to(device), ends)
    tokens = torch.arange(total, device=device)
    sequence = torch.searchsorted(ends, tokens, right=True)
    seen_by_all = prefix_ends[sequence]  # of each token's sequence: tokens before this are seen from everywhere in it

    def mask(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = sequence[query] == sequence[key]
        return same & ((key <= query) | (key < seen_by_all[query])) if causal else same

    # The keys that a block of queries sees are contiguous: from the start of its first sequence to its own end, or to
    # that of the prefix or of the last sequence.
    first = torch.arange(0, total, block_size, device=device)
    last = (first + block_size - 1).clamp(max=total - 1)
    lowest = starts[sequence[first]] // block_size
    reach = torch.maximum(last, seen_by_all[last] - 1) if causal else ends[sequence[last]] - 1
    highest = reach // block_size
    blocks = torch.arange(len(first), device=device)
    is_seen = (lowest[:, None] <= blocks) & (blocks <= highest[:, None])
    # All pairs of a block are seen: it lies in one sequence, before the queries or inside the prefix, and is complete.
    one = torch.where((sequence[first] == sequence[last]) & (last - first == block_size - 1), sequence[first], -1)
    is_full = (one[:, None] == one) & (one >= 0)
    if causal:
        is_full &= (blocks < blocks[:, None]) | (last < seen_by_all[first][:, None])
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_full),
        *_listed(is_seen & is_full),
        BLOCK_SIZE=block_size,
        mask_mod=mask,
        seq_lengths=(total, total),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and their numbers, those first; both int32."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def _refuse_other(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim != 1:
        found = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of ints with one dimension, got {found}")
