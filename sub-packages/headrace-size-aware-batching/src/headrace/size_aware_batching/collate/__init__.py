"""Collate functions, and the loss of batches that hold different numbers of tokens."""

from headrace.size_aware_batching.collate.packed import PackedBatch, PackedCollate, cumulative_lengths
from headrace.size_aware_batching.collate.padded import PaddedBatch, PaddedCollate

__all__ = ["PackedBatch", "PackedCollate", "PaddedBatch", "PaddedCollate", "cumulative_lengths"]
