"""The batch sampler that has some options: that of optimizer steps where their tokens are among these."""

from typing import Any

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler


def sampler_with(sizes: Any, max_total_size: Any, **options: Any) -> Any:
    """Return a sampler; the strategy of optimizer steps follows from their cost."""
    if options.get("tokens_per_step") is None:
        return DistributedSizeAwareBatchSampler(
            sizes, max_total_size, **{name: value for name, value in options.items() if name != "tokens_per_step"}
        )
    others = {name: value for name, value in options.items() if name != "strategy"}
    return OptimizerStepBatchSampler(sizes, max_total_size, **others)
