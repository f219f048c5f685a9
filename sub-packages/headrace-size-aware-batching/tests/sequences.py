"""Sequences to collate, and attention over them."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def sequences(lengths: list[int], *features: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.rand(length, *features, generator=generator) + 1 for length in lengths]


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Self-attention over ``[length, heads, features]``."""
    heads_first = x.transpose(-3, -2)
    return scaled_dot_product_attention(heads_first, heads_first, heads_first, **options).transpose(-3, -2)
