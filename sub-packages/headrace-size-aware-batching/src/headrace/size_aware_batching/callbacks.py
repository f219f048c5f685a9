"""The documented import path of the Lightning callbacks. Needs Lightning."""

from headrace.size_aware_batching.memory.lightning import OOMRescue, WorstBatchesFirst

__all__ = ["OOMRescue", "WorstBatchesFirst"]
