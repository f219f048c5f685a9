"""Batches within a size budget, in the order of the elements: the generator and the sampler that PyTorch sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from operator import itemgetter
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch.utils.data import Sampler

from headrace.size_aware_batching._shared.as_sampler import refuse_as_sampler
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import Ranks, refuse_sharding_again, warning_of_whole_stream
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import Logger, Number, log_info, logger_or, one_of, shortlist
from headrace.size_aware_batching.buckets import BucketBatchSampler
from headrace.size_aware_batching.planning.limits import checked_budget
from headrace.size_aware_batching.planning.options import OVERSIZE, STREAM_OVERSIZE, Oversize, StreamOversize
from headrace.size_aware_batching.planning.pieces import Piece, pieces_of
from headrace.size_aware_batching.sizes.read import SizeOf, checked_size, plain_index, size_lookup

__all__ = ["BucketBatchSampler", "SizeAwareBatchSampler", "size_aware_batching"]

_WARNED = 100  # elements over the budget that get a warning each; more of them would hide everything else
_NAMED = 10  # elements over the budget that the summary names

Data = TypeVar("Data")
DataOut = TypeVar("DataOut", covariant=True)


@runtime_checkable
class MapStyle(Protocol[DataOut]):
    """A dataset that is read by index."""

    def __getitem__(self, index: int, /) -> DataOut: ...

    def __len__(self) -> int: ...


def size_aware_batching(
    dataset: Iterable[Data] | MapStyle[Data],
    sizeof: SizeOf,
    max_total_size: Number,
    collate_fn: Callable[[list[Data]], Any] | None = None,
    info_logger: Logger | None = None,
    warn_logger: Logger | None = None,
    *,
    oversize: StreamOversize = "skip",
) -> Generator[Any, None, None]:
    """Batch elements in their order so that the sizes in each batch sum to at most ``max_total_size``.

    It makes one pass and keeps one batch in memory, so the dataset may be an endless stream. A batch is complete when
    the next element does not fit. Integers and floats are summed without rounding.

    A size of ``inf`` never fits. At the end a summary is logged: batches, elements, fill and skipped elements.
    Arguments are checked at the call, not at the first ``next()``.

    Args:
        dataset: Any iterable, or a map-style dataset, which is read from index 0 to its end.
        sizeof: Size of an element: a callable of the element, or a mapping, sequence, array or tensor for which the
            element itself is the key or index.
        max_total_size: Budget of a batch, in the unit of the sizes. ``inf`` puts everything in one batch.
        collate_fn: Converts a list of elements to a batch; by default the batch is the list.
        info_logger: Receives the summary. By default the logger ``headrace.size_aware_batching``, at INFO.
        warn_logger: Receives a message for each skipped element. By default a ``UserWarning``.
        oversize: Policy for an element that exceeds the budget by itself: ``"skip"`` it (the default here), ``"raise"``
            an error, or give it its ``"own_batch"``, over the budget. A warning names the position of each skipped
            element; from the hundredth on, warnings come only at powers of ten and at the end, and give the count.

    Returns:
        A generator of the batches.

    Raises:
        TypeError: If ``dataset`` cannot be iterated, ``sizeof`` has none of the forms above, or ``max_total_size`` or a
            size is not a real number.
        ValueError: If ``max_total_size`` is NaN, zero or negative, a size is NaN or negative, or an element is too
            large and ``oversize="raise"``.

    >>> list(size_aware_batching(["ab", "c", "def", "g"], sizeof=len, max_total_size=4))
    [['ab', 'c'], ['def', 'g']]
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a function of a list, or None, got {type(collate_fn).__name__}")
    one_of("oversize", oversize, STREAM_OVERSIZE)
    nouns, warn_of = ("the element at position", "positions"), logger_or(warn, warn_logger, "warn_logger")
    tally = Tally(checked_budget(max_total_size), nouns, oversize, warn_of)
    info = logger_or(log_info, info_logger, "info_logger")
    if message := warning_of_whole_stream(dataset, Ranks()):
        warn_of(message)
    batches = _batches(enumerate(_elements(dataset)), size_lookup(sizeof), tally, info)
    return collated(batches, collate_fn)


class SizeAwareBatchSampler(Sampler[list[Any]]):
    """Batch the indices of another sampler so that the sizes in each batch sum to at most ``max_total_size``.

    For ``DataLoader(dataset, batch_sampler=...)``. Samples keep the order of the inner sampler; `size_aware_batching`
    describes how batches are formed. Every iteration reads the inner sampler from its beginning, also after a
    ``break``.

    It does not distribute batches to ranks: each rank batches its own inner sampler, so ranks may get different numbers
    of batches. `DistributedSizeAwareBatchSampler` gives all ranks the same number.

    There is no ``len()``, because the number of batches depends on the order of the inner sampler, which may change in
    every epoch. So ``len(loader)`` raises a ``TypeError``.

    Instances are picklable if their arguments are; the default loggers are.

    Args:
        sampler: Yields indices. An iterator lasts for one epoch; a second epoch raises a ``RuntimeError``.
        sizeof: Size at an index: a callable, mapping, sequence, array or tensor.
        max_total_size: Budget of a batch, in the unit of the sizes.
        info_logger: Receives the summary of each epoch. By default the logger ``headrace.size_aware_batching``,
            at INFO.
        warn_logger: Receives a message for each skipped index. By default a ``UserWarning``.
        oversize: Policy for an index that exceeds the budget by itself: ``"skip"`` (the default here), ``"raise"`` or
            ``"own_batch"``, as for `size_aware_batching`; or ``"split"`` the sample into pieces that fill the budget
            and a remainder. Batches then hold a `Piece` for each; read them with a `SplitDataset`. The size must be a
            whole number.

    Raises:
        TypeError: If ``sampler`` is not iterable, ``sizeof`` has none of the forms above, or ``max_total_size`` is not
            a real number.
        ValueError: If ``max_total_size`` is NaN, zero or negative, or an array of sizes holds such values.

    >>> list(SizeAwareBatchSampler(range(5), sizeof=[2, 2, 3, 1, 2], max_total_size=4))
    [[0, 1], [2, 3], [4]]
    >>> list(SizeAwareBatchSampler(range(2), sizeof=[6, 2], max_total_size=4, oversize="split"))
    [[Piece(index=0, start=0, stop=4, size=6)], [Piece(index=0, start=4, stop=6, size=6), 1]]
    """

    def __init__(
        self,
        sampler: Sampler[Any] | Iterable[int],
        sizeof: SizeOf,
        max_total_size: Number,
        info_logger: Logger | None = None,
        warn_logger: Logger | None = None,
        *,
        oversize: Oversize = "skip",
    ) -> None:
        super().__init__()
        if not isinstance(sampler, Iterable):
            raise TypeError(f"sampler must be a Sampler or an iterable of indices, got {type(sampler).__name__}")
        one_of("oversize", oversize, OVERSIZE)
        self.sampler = sampler
        self.max_total_size = checked_budget(max_total_size)
        if oversize == "split" and self.max_total_size < 1:
            raise ValueError(f"oversize='split' needs room for a piece of size 1, got max_total_size={max_total_size}")
        self.oversize: Oversize = oversize
        self._size = size_lookup(sizeof)
        self._info = logger_or(log_info, info_logger, "info_logger")
        self._warn = logger_or(warn, warn_logger, "warn_logger")
        self._used_up = False

    @never_raises
    def __repr__(self) -> str:
        inner = type(self.sampler).__name__
        return f"{type(self).__name__}({inner}, budget {self.max_total_size:,}, oversize {self.oversize})"

    def __iter__(self) -> Iterator[list[Any]]:
        refuse_as_sampler(self)
        refuse_sharding_again(None, uneven=True)
        if self._used_up:
            raise RuntimeError(
                "sampler is an iterator and its indices are used up: it lasts for one epoch, even an "
                "interrupted one; give a sampler or a sequence of indices, which can be iterated again"
            )
        self._used_up = isinstance(self.sampler, Iterator)
        policy: StreamOversize = "raise" if self.oversize == "split" else self.oversize
        tally = Tally(self.max_total_size, ("index", "indices"), policy, self._warn)
        indices = map(plain_index, self.sampler)
        if self.oversize != "split":
            yield from _batches(((index, index) for index in indices), self._size, tally, self._info)
            return
        pieces = ((key, (key, size)) for index in indices for key, size in self._pieces(index))
        for batch in _batches(pieces, itemgetter(1), tally, self._info):
            yield [key for key, _ in batch]

    def _pieces(self, index: Any) -> Iterator[tuple[Any, Number]]:
        """Yield a sample with its size, or the pieces of one over the budget."""
        size = checked_size(self._size(index), "index", index)
        if size <= self.max_total_size:
            yield index, size
            return
        if math.isinf(size) or size != int(size):
            raise ValueError(f"oversize='split' needs whole sizes, got {size} at index {index}")
        pieces = pieces_of(np.array([int(size)]), math.floor(self.max_total_size))
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
            yield Piece(index, start, start + length, int(size)), length

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the inner sampler, if that has a ``set_epoch``."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)


def _batches(
    keyed: Iterable[tuple[object, Data]], size: Callable[[Any], Any], tally: Tally, info: Logger
) -> Iterator[list[Data]]:
    """Group elements in their order so that the sizes of each group sum to at most the budget.

    Next-fit as in D. S. Johnson, "Near-optimal bin packing algorithms" (1973): one batch is open at a time, so memory
    is that of one batch.
    """
    budget = tally.budget
    limit: Number = math.inf if math.isinf(budget) else exact(budget)
    batch: list[Data] = []
    total = 0
    for key, element in keyed:
        found = checked_size(size(element), tally.noun, key)
        too_large = found > budget or math.isinf(found)
        if too_large and not tally.has_own_batch(key, found):
            continue
        cost = 0 if too_large else exact(found)
        if batch and (too_large or total + cost > limit):
            tally.close(len(batch), total)
            yield batch
            batch, total = [], 0
        if too_large:
            yield [element]
        else:
            batch.append(element)
            total += cost
    if batch:
        tally.close(len(batch), total)
        yield batch
    tally.finish(info)


def collated(
    batches: Iterator[list[Data]], collate_fn: Callable[[list[Data]], Any] | None
) -> Generator[Any, None, None]:
    """Yield the batches, or what ``collate_fn`` makes of them."""
    yield from batches if collate_fn is None else map(collate_fn, batches)


def _elements(dataset: Iterable[Data] | MapStyle[Data]) -> Iterable[Data]:
    if isinstance(dataset, Iterable):
        return dataset
    if isinstance(dataset, MapStyle):
        return map(dataset.__getitem__, range(len(dataset)))
    raise TypeError(f"dataset must be an iterable or have __getitem__ and __len__, got {type(dataset).__name__}")


class Tally:
    """Counts one pass over elements; refuses, skips or lets pass those that exceed the budget by themselves."""

    def __init__(self, budget: Number, nouns: tuple[str, str], oversize: StreamOversize, warn_of: Logger) -> None:
        self.budget = budget
        self.noun, self.plural = nouns  # what the keys of elements are
        self.batches = self.elements = 0  # within the budget
        self.filled = 0  # sum of their sizes, in the unit of `exact`
        self.over = 0  # elements over the budget
        self._named: list[object] = []  # the first of them
        self._oversize, self._warn = oversize, warn_of

    def close(self, count: int, total: int) -> None:
        """Count a batch."""
        self.batches += 1
        self.elements += count
        self.filled += total

    def has_own_batch(self, key: object, size: Number) -> bool:
        """Return whether an element over the budget gets its own batch, or else is skipped; raise if it may not be."""
        found = f"{self.noun} {key} has size {size}, more than max_total_size={self.budget}"
        if self._oversize == "raise":
            raise ValueError(f"{found}: raise the budget, cut the sample, or choose oversize='skip' or 'own_batch'")
        self.over += 1
        if len(self._named) < _NAMED:
            self._named.append(key)
        if self._oversize == "own_batch":
            return True
        if self.over <= _WARNED:
            self._warn(f"{found}: it is skipped")
        elif str(self.over).strip("0") == "1":  # 1,000, 10,000 ...: a stream may be endless
            self._warn(f"{self.over} are skipped so far as larger than max_total_size={self.budget}")
        return False

    def finish(self, info: Logger) -> None:
        """Log a summary; warn as well where not every skipped element had a warning."""
        known = self.batches and not math.isinf(self.budget)
        fill = self.filled / (self.batches * exact(self.budget)) if known else math.nan
        filled = f"fill {fill:.4f} of max_total_size={self.budget}"
        summary = f"{counted(self.batches, 'batch')} of {counted(self.elements, 'element')}, {filled}; "
        if not self.over:
            summary += "0 skipped"
        else:
            what = "over it, one a batch" if self._oversize == "own_batch" else "skipped as larger than that"
            summary += f"{self.over} {what}: {self.plural} {shortlist(self._named, self.over)}"
        if self.over > _WARNED and self._oversize == "skip":
            self._warn(summary)
        info(summary)


def exact(number: Number) -> int:
    """Express a finite number as a whole multiple of 2**-1074, which every finite double is: sums do not round.

    >>> exact(0.1) + exact(0.2) > exact(0.3), exact(0.5) + exact(0.25) == exact(0.75)
    (True, True)
    """
    numerator, denominator = number.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())
