"""Batches that fill a memory or token budget and never exceed it."""

from headrace.size_aware_batching.buckets import Buckets, create_buckets
from headrace.size_aware_batching.collate import PackedBatch, PackedCollate, PaddedBatch, PaddedCollate
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.loss import global_num_tokens, token_weighted_loss
from headrace.size_aware_batching.memory import collect_cuda_peak_alloc
from headrace.size_aware_batching.memory_model import PolynomialRegression
from headrace.size_aware_batching.plan import BatchPlan, PlanReport
from headrace.size_aware_batching.sampler import (
    BucketBatchSampler,
    SizeAwareBatchSampler,
    size_aware_batching,
)
from headrace.size_aware_batching.streaming import BucketedBatching, bucketed_batching

__all__ = [
    "BatchPlan",
    "BucketBatchSampler",
    "BucketedBatching",
    "Buckets",
    "DistributedSizeAwareBatchSampler",
    "PackedBatch",
    "PackedCollate",
    "PaddedBatch",
    "PaddedCollate",
    "PlanReport",
    "PolynomialRegression",
    "SizeAwareBatchSampler",
    "bucketed_batching",
    "collect_cuda_peak_alloc",
    "create_buckets",
    "global_num_tokens",
    "size_aware_batching",
    "token_weighted_loss",
]
