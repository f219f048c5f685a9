"""What other packages offer, and this one takes, by shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt


class Batching(Protocol):
    """Makes a rank's batches; `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)` is one.

    What it returns is an iterable of lists of positions with a length and, on its own or on its `sampler`,
    `set_epoch(epoch)`. With `state_dict()` and `load_state_dict(state)` it is resumed at any number of ranks. Such a
    state is that behind the last batch that was taken; where it has an "epoch" and a "position", the position is 0 at
    the begin of an epoch, and more behind each batch.
    """

    def __call__(
        self,
        sizes: npt.NDArray[Any],
        /,
        *,
        sampler: Iterable[int] | None,
        num_replicas: int,
        rank: int,
        seed: int,
    ) -> Iterable[Sequence[int]]:
        """Make the batches.

        Args:
            sizes: Of all samples, shape [n_samples] or [n_samples, k].
            sampler: The order of all ranks' samples; None leaves it to the batch sampler.
            num_replicas: Number of ranks.
            rank: This one.
            seed: Of what is random.
        """
        ...


class Ordering(Protocol):
    """Makes an order of samples; `functools.partial(WeightedDistributedSampler, weights={...})` is one."""

    def __call__(self, dataset: Any, /, *, num_replicas: int, rank: int, seed: int) -> Iterable[int]:
        """Make the order.

        Args:
            dataset: A concatenation of the sources, which knows their `names` and `cumulative_sizes`.
            num_replicas: 1: the order is that of all ranks together, which is dealt out batch by batch.
            rank: 0.
            seed: Of what is random.
        """
        ...
