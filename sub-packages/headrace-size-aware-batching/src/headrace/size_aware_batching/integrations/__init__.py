"""For third-party training loops: Hugging Face's ``Trainer``, accelerate, torchdata, verl, slime, AReaL.

Nothing here imports them.
"""

from headrace.size_aware_batching.integrations.accelerate import PreparedBatchSampler
from headrace.size_aware_batching.integrations.seqlen_balancing import (
    get_seqlen_balanced_partitions,
    micro_batch_indices,
)
from headrace.size_aware_batching.integrations.torchdata import NoSamplerStateError, sampler_state
from headrace.size_aware_batching.integrations.trainer import SizeAwareTrainerMixin
from headrace.size_aware_batching.integrations.trainer_loader import TrainerLoader

__all__ = [
    "NoSamplerStateError",
    "PreparedBatchSampler",
    "SizeAwareTrainerMixin",
    "TrainerLoader",
    "get_seqlen_balanced_partitions",
    "micro_batch_indices",
    "sampler_state",
]
