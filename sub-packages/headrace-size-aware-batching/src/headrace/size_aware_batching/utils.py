"""The documented import path of the helpers around batching; they live in files of their own."""

from headrace.size_aware_batching.buckets import Buckets, create_buckets
from headrace.size_aware_batching.memory.peaks import collect_cuda_peak_alloc

__all__ = ["Buckets", "collect_cuda_peak_alloc", "create_buckets"]
