"""For training loops of others: Hugging Face's ``Trainer``, torchdata's ``StatefulDataLoader``.

Nothing here imports them.
"""

from headrace.size_aware_batching.integrations.torchdata import sampler_state
from headrace.size_aware_batching.integrations.trainer import TrainerGuard

__all__ = ["TrainerGuard", "sampler_state"]
