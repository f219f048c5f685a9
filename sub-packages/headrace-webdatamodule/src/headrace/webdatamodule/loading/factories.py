"""Factories of batches and orders: what a user may give, whether it can be called, and what it makes."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
from torch.utils.data import SequentialSampler

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.split_names import Split

BATCH_SAMPLER = (
    "a function that makes batches, such as functools.partial(DistributedSizeAwareBatchSampler, max_total_size=16384)"
)
_SAMPLER = "a function that makes the order, such as functools.partial(WeightedDistributedSampler, weights={'web': 3})"
_OF_TORCH = "lambda dataset, *, seed, **ranks: RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))"
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


class InOrder(SequentialSampler):
    """The samples in the order of the data."""

    @property
    def fingerprint(self) -> str:
        """Stands for the order, so that ranks need not compare it."""
        return f"in order {len(self)}"


def check_callable(name: str, function: Any, split: Split, hint: str = "") -> None:
    """Refuse an argument that is neither None nor a function."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function, got {function!r} for {split.name!r}{hint}")


def check_factories(
    split: Split, size: Any, factory: Any, sizes: Any, sampler: Any, *, sizes_are: str, ranks_given: bool
) -> None:
    """Refuse options that leave open how a split is batched, or that say it twice; `sizes_are` what sizes may be."""
    if size is None and factory is None:
        raise ValueError(f"no batch_size for {split.name!r}: give batch_size (samples of a batch) or batch_sampler")
    if size is not None and factory is not None:
        raise ValueError(f"{split.name!r} has both batch_size={size!r} and batch_sampler: give one of them")
    if size is not None:
        checked_int(
            "batch_size", size, 1, cure="samples of a batch on each rank; for batches by size give batch_sampler"
        )
    if factory is not None and not callable(factory):
        raise TypeError(f"batch_sampler must be {BATCH_SAMPLER}; got {factory!r} for {split.name!r}")
    if factory is not None and sizes is None:
        raise ValueError(
            f"batch_sampler makes batches by size, and {split.name!r} has no sizes: give sizes= {sizes_are}"
        )
    check_callable("sampler", sampler, split, f"; give {_SAMPLER}")
    for name in keywords_of(sampler).keys() & set(RANKS):
        raise ValueError(
            f"sampler for {split.name!r} names {name}: the order is that of all ranks, and batches are dealt to them "
            f"afterwards; leave {name} out"
        )
    _check_call(sampler, split)
    given = keywords_of(factory).keys() & set(RANKS)
    if given and ranks_given:
        raise ValueError(f"ranks were given twice, {sorted(given)} in batch_sampler and to the module: drop one")
    if sampler is not None and "sampler" in keywords_of(factory):
        raise ValueError(
            f"sampler was given twice for {split.name!r}: in batch_sampler, and to the data module; drop one"
        )


def _check_call(sampler: Any, split: Split) -> None:
    """Refuse a sampler that does not take what it will be given, such as a class of torch's."""
    if sampler is None:
        return
    try:
        signature = inspect.signature(sampler)
    except (TypeError, ValueError):  # of a function that does not tell
        return
    try:
        signature.bind(None, num_replicas=1, rank=0, seed=0)
    except TypeError as error:
        raise TypeError(
            "sampler is called as sampler(dataset, num_replicas=1, rank=0, seed=seed), and that of "
            f"{split.name!r} does not take this ({error}): give {_SAMPLER}; of torch's samplers {_OF_TORCH}"
        ) from None


def make_batches(factory: Any, subject: Any, **options: Any) -> Any:
    """Call a factory of batches; where that fails, say how it was called."""
    try:
        return call_factory(factory, subject, **options)
    except TypeError as error:
        error.add_note(
            f"batch_sampler(sizes, sampler=..., num_replicas=..., rank=..., seed=...) was called: {BATCH_SAMPLER}"
        )
        raise


def refuse_curriculum(factory: Any, split: Split) -> None:
    """Refuse a curriculum in evaluation, which has the order of the data: the sampler's own error is a riddle."""
    if (curriculum := keywords_of(factory).get("curriculum")) is not None:
        raise ValueError(
            f"batch_sampler for {split.name!r} has curriculum={curriculum!r}, which orders training only: give "
            "validation, test and predict one without it, as batch_sampler={'train': ..., 'val': ...}"
        )


def refuse_uneven_evaluation(batches: Any) -> None:
    """Refuse a batch sampler that leaves samples out, or gives some twice."""
    for name, values in {"tail": ("drop", "pad"), "drop_last": (True,)}.items():
        if (value := getattr(batches, name, None)) in values:
            raise ValueError(
                f"batch_sampler must deliver every sample once for evaluation, got {name}={value!r}: give validation, "
                "test and predict one without it, as batch_sampler={'train': ..., 'val': ...}"
            )


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
