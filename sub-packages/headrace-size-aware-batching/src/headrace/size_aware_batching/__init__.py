"""Batches that fill a memory or token budget and never exceed it."""

from importlib.metadata import version

from headrace.size_aware_batching.blockwise import BlockwiseSizeAwareBatchSampler
from headrace.size_aware_batching.buckets import Buckets, create_buckets
from headrace.size_aware_batching.collate.block_mask import packed_block_mask
from headrace.size_aware_batching.collate.loss import global_num_tokens, token_weighted_loss
from headrace.size_aware_batching.collate.packed import PackedBatch, PackedCollate
from headrace.size_aware_batching.collate.padded import PaddedBatch, PaddedCollate
from headrace.size_aware_batching.distributed import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.memory.design import design_batches
from headrace.size_aware_batching.memory.fit import fit_budget
from headrace.size_aware_batching.memory.fit_shapes import MeasuredShapes, fit_shapes
from headrace.size_aware_batching.memory.model import BatchMemoryModel
from headrace.size_aware_batching.memory.oom_guard import OOMEvent, OOMGuard, OOMReport
from headrace.size_aware_batching.memory.peaks import Peaks, collect_cuda_peak_alloc, measure_peaks
from headrace.size_aware_batching.memory.polynomial import PolynomialRegression
from headrace.size_aware_batching.memory.simulated import SimulatedMemory, estimate_peaks
from headrace.size_aware_batching.memory.worst_batches import run_worst_batches
from headrace.size_aware_batching.optimizer_steps import OptimizerStepBatchSampler
from headrace.size_aware_batching.plan import BatchPlan
from headrace.size_aware_batching.planning.pieces import Piece
from headrace.size_aware_batching.report import PlanReport
from headrace.size_aware_batching.sampler import (
    BucketBatchSampler,
    SizeAwareBatchSampler,
    size_aware_batching,
)
from headrace.size_aware_batching.split_dataset import SplitDataset
from headrace.size_aware_batching.steps import StepPlan, StepReport, plan_step
from headrace.size_aware_batching.streaming import BucketedBatching, bucketed_batching

__all__ = [
    "BatchMemoryModel",
    "BatchPlan",
    "BlockwiseSizeAwareBatchSampler",
    "BucketBatchSampler",
    "BucketedBatching",
    "Buckets",
    "DistributedSizeAwareBatchSampler",
    "MeasuredShapes",
    "OOMEvent",
    "OOMGuard",
    "OOMReport",
    "OptimizerStepBatchSampler",
    "PackedBatch",
    "PackedCollate",
    "PaddedBatch",
    "PaddedCollate",
    "Peaks",
    "Piece",
    "PlanReport",
    "PolynomialRegression",
    "SimulatedMemory",
    "SizeAwareBatchSampler",
    "SplitDataset",
    "StepPlan",
    "StepReport",
    "bucketed_batching",
    "collect_cuda_peak_alloc",
    "create_buckets",
    "design_batches",
    "estimate_peaks",
    "fit_budget",
    "fit_shapes",
    "global_num_tokens",
    "measure_peaks",
    "packed_block_mask",
    "plan_step",
    "run_worst_batches",
    "size_aware_batching",
    "token_weighted_loss",
]

__version__: str  # of the distribution; the sources also run from a folder on the path


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version("headrace-size-aware-batching")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
