"""A `ResumableLoader` as a dataset and an iterator of Google's grain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule._shared.display import counted, inner, never_raises
from headrace.webdatamodule.loader import ResumableLoader

try:
    from grain import DatasetIterator, IterDataset
except ImportError as error:
    cure = 'pip install "headrace-webdatamodule[grain]"'
    raise ImportError(f"headrace.webdatamodule.integrations.grain needs the package grain: {cure}") from error

__all__ = ["GrainDataset", "GrainIterator"]


class GrainIterator(DatasetIterator):  # type: ignore[misc]  # no types where grain is not installed
    """The batches of a `ResumableLoader` as an iterator of grain, one epoch after another.

    `get_state` returns the position after the last returned batch, independent of the loader's workers. The state is
    the same on every rank and JSON-serializable. `set_state` resumes exactly with any number of workers and, if the
    batch sampler supports it (headrace's do), any number of ranks.

    After an error, such as a damaged sample, the next batch is the one that failed. Outside the main thread, for
    example in grain's `ThreadPrefetchIterDataset`, the ranks do not compare their plans, because the training loop may
    communicate at the same time.

    Args:
        loader: Delivers the batches; it shares its position with this iterator. If another loop left an epoch in the
            middle, the epoch restarts.
        num_epochs: The iterator ends after this many epochs, counted from epoch 0; None: never.

    Attributes:
        loader: The loader, with its `epoch`, `steps`, `report` and the methods that change a run.

    Raises:
        TypeError: `loader` is not a `ResumableLoader`, or `num_epochs` is not an int.
        ValueError: `num_epochs` is less than 1, or more than 1 for a loader with `fixed_epoch=True`.

    >>> loader = ResumableLoader(list("abcdef"), [[0, 1], [2, 3], [4, 5]], collate_fn=list)
    >>> batches = GrainIterator(loader, num_epochs=1)
    >>> next(batches)
    ['a', 'b']
    >>> state = batches.get_state()
    >>> list(batches)
    [['c', 'd'], ['e', 'f']]
    >>> batches.set_state(state)
    >>> next(batches)
    ['c', 'd']
    """

    def __init__(self, loader: ResumableLoader, num_epochs: int | None = None) -> None:
        super().__init__()
        self._num_epochs = _checked(loader, num_epochs)
        self.loader = loader
        self._batches: Iterator[Any] | None = None  # of the present epoch
        self._ended = False
        if loader.steps and loader.remaining and not loader.resumed:
            loader._rewind()  # to where the next iteration begins

    def __next__(self) -> Any:
        self._assert_not_closed()
        checks = self.loader._check_ranks
        self.loader._check_ranks = checks and threading.current_thread() is threading.main_thread()
        try:
            return self._next()
        finally:
            self.loader._check_ranks = checks

    def _next(self) -> Any:
        while not self._ended:
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
                is_last = self._num_epochs is not None and self.loader.epoch + 1 >= self._num_epochs
                self._ended = is_last or not len(self.loader)
            except BaseException:  # the iteration has ended, and the epoch has not
                self.set_state(self.get_state())
                raise
        raise StopIteration

    @never_raises
    def __repr__(self) -> str:
        return f"<{type(self).__name__}: epoch {self.loader.epoch}, {counted(self.loader.steps, 'batch')} delivered>"

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, as `ResumableLoader.state_dict` does."""
        return self.loader.state_dict()

    def set_state(self, state: Mapping[str, Any], accept: Collection[str] = ()) -> None:
        """Resume from a state.

        Args:
            state: The result of `get_state`, on any rank, or of the `state_dict` of a `ResumableLoader`.
            accept: Differences from the run that saved the state to accept, as in `ResumableLoader.load_state_dict`.

        Raises:
            TypeError: As in `load_state_dict`.
            ValueError: As in `load_state_dict`: the state was saved with other data or options, or another seed.
        """
        self.loader.load_state_dict(state, accept)
        self._ended, self._batches = False, None

    def close(self) -> None:
        """End the loader's workers; the iterator cannot be used afterwards."""
        if not self._closed:
            super().close()
            self._batches = None
            self.loader.close()

    def __del__(self) -> None:
        """Leave the loader alone: it may have other iterators."""


class GrainDataset(IterDataset):  # type: ignore[misc]  # no types where grain is not installed
    """The batches of a `ResumableLoader` as a dataset of grain, for its transformations and prefetching.

    Each iterator is a `GrainIterator` over a copy of the loader, and begins at the loader's position. Save and load
    states with the iterator. `mp_prefetch` raises an error, because grain cannot divide the batches among processes:
    give the loader `num_workers` instead.

    Args:
        loader: Delivers the batches.
        num_epochs: Iterators end after this many epochs, counted from epoch 0; None: never.

    Raises:
        TypeError: As in `GrainIterator`.
        ValueError: As in `GrainIterator`.

    >>> dataset = GrainDataset(ResumableLoader(list("abcd"), [[0, 1], [2, 3]], collate_fn=list), num_epochs=1)
    >>> list(dataset.map("".join))
    ['ab', 'cd']
    """

    def __init__(self, loader: ResumableLoader, num_epochs: int | None = None) -> None:
        super().__init__()
        self._num_epochs = _checked(loader, num_epochs)
        self._loader = loader

    @never_raises
    def __repr__(self) -> str:
        epochs = "endless" if self._num_epochs is None else f"{self._num_epochs} epochs"
        return f"<{type(self).__name__}: {epochs} of {inner(self._loader)}>"

    def __iter__(self) -> GrainIterator:
        return GrainIterator(copy.copy(self._loader), self._num_epochs)


def _checked(loader: Any, num_epochs: int | None) -> int | None:
    if not isinstance(loader, ResumableLoader):
        raise TypeError(f"loader must be a ResumableLoader, got {type(loader).__name__}")
    if num_epochs is None:
        return None
    number = checked_int("num_epochs", num_epochs, 1, cure="give None for no end")
    if loader._fixed and number > 1:
        raise ValueError(f"num_epochs must be 1 or None for a loader with fixed_epoch=True, got {number}")
    return number
