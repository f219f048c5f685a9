"""Functions of a user that make batches and orders: how they are called, and what they return."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

RANKS = ("num_replicas", "rank", "mesh")


@runtime_checkable
class Batches(Protocol):
    """What a `BatchSamplerFactory` returns; as it is a class, LightningCLI makes a factory of a class and arguments."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yield the indices of each batch."""
        ...


@runtime_checkable
class Indices(Protocol):
    """What a `SamplerFactory` returns; see `Batches`."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the index of each sample."""
        ...


class BatchSamplerFactory(Protocol):
    """Makes a rank's batches; `functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)` is one.

    It returns an iterable of lists of indices with a length and, on its own or on its `sampler`, `set_epoch(epoch)`.
    With `state_dict()`, `load_state_dict(state)` and `remaining`, the number of batches left in the epoch, it resumes
    on any number of ranks. Its state is that after the last batch that was taken. If the state has an "epoch" and a
    "position", the position is 0 at the beginning of an epoch, and grows with each batch.

    A `functools.partial` that names `num_replicas`, `rank`, `mesh`, `seed` or `sampler` keeps them.
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
    ) -> Batches:
        """Make the batches.

        Args:
            sizes: Of all samples, shape [n_samples] or [n_samples, k].
            sampler: The order of all ranks' samples; None, in training, leaves it to the batch sampler. Validation,
                test and predict give the order of the data, unless a `sampler` was named for their split.
            num_replicas: Number of data-parallel ranks.
            rank: This one.
            seed: Of all randomness.
        """
        ...


class SamplerFactory(Protocol):
    """Makes an order of samples; `functools.partial(WeightedDistributedSampler, weights={...})` is one."""

    def __call__(self, dataset: Any, /, *, num_replicas: int, rank: int, seed: int) -> Indices:
        """Make the order.

        Args:
            dataset: A concatenation of the sources, which knows their `names` and `cumulative_sizes`.
            num_replicas: Always 1: the order is that of all ranks together; batches are dealt to them afterwards.
            rank: Always 0.
            seed: Of all randomness.
        """
        ...


def keywords_of(factory: Any) -> dict[str, Any]:
    """The keyword arguments of a `functools.partial`, without ranks that are None; none of anything else."""
    keywords = factory.keywords if isinstance(factory, partial) else {}
    return {name: value for name, value in keywords.items() if name not in RANKS or value is not None}


def call_factory(factory: Any, subject: Any, **options: Any) -> Any:
    """Call a factory with the options that its partial does not name."""
    own = keywords_of(factory)
    if not own.keys().isdisjoint(RANKS):
        options = {name: value for name, value in options.items() if name not in RANKS}
    return factory(subject, **{name: value for name, value in options.items() if name not in own})
