"""Batches within a size budget, in the order of the elements: the generator and the sampler that PyTorch sees."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.utils.data import Sampler

from headrace.size_aware_batching._budget import checked_budget
from headrace.size_aware_batching._options import OVERSIZE, Oversize
from headrace.size_aware_batching._sizes import SizeOf, checked_size, plain_index, size_lookup
from headrace.size_aware_batching._validation import Logger, Number, log_info, logger_or, one_of, shortlist, warn
from headrace.size_aware_batching.buckets import BucketBatchSampler

__all__ = ["BucketBatchSampler", "SizeAwareBatchSampler", "size_aware_batching"]

_WARNED = 100  # elements over the budget that get a warning each; more of them would hide everything else
_NAMED = 10  # elements over the budget that the summary names

Data = TypeVar("Data")
DataOut = TypeVar("DataOut", covariant=True)
Element = TypeVar("Element")
Key = TypeVar("Key")


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
    oversize: Oversize = "skip",
) -> Generator[Any, None, None]:
    """Batch elements in their order so that the sizes in each batch sum to at most ``max_total_size``.

    One pass, in the memory of one batch: the dataset may be an endless stream. A batch is complete as soon as the next
    element does not fit. Sizes that are integers or floats are summed without rounding.

    A size of ``inf`` never fits. At the end a summary is logged: batches, elements, fill, and what was skipped.
    Arguments are checked by the call itself, not by the first ``next()``.

    Args:
        dataset: Any iterable, or a map-style dataset, which is read from index 0 to its end.
        sizeof: Size of an element: a callable of the element, or a mapping, sequence, array or tensor for which the
            element itself is the key or index.
        max_total_size: Budget of a batch, in the unit of the sizes. ``inf`` puts everything in one batch.
        collate_fn: Makes a batch of a list of elements; the list itself is the batch by default.
        info_logger: Receives the summary. By default the logger ``headrace.size_aware_batching``, at INFO.
        warn_logger: Receives a message for each element skipped. By default a ``UserWarning``.
        oversize: Policy for an element that exceeds the budget by itself: ``"skip"`` it (the default here) with a
            warning that names its position (from the hundredth on, one warning at each power of ten and one at the
            end count them), ``"raise"`` an error, or give it its ``"own_batch"``, over the budget.

    Returns:
        A generator of the batches.

    Raises:
        TypeError: If ``dataset`` cannot be iterated, ``sizeof`` is none of the forms above, or
            ``max_total_size`` or a size is not a real number.
        ValueError: If ``max_total_size`` is NaN, zero or negative, a size is NaN or negative, or an element is too
            large and ``oversize="raise"``.

    >>> list(size_aware_batching(["ab", "c", "def", "g"], sizeof=len, max_total_size=4))
    [['ab', 'c'], ['def', 'g']]
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a function of a list, or None, got {type(collate_fn).__name__}")
    one_of("oversize", oversize, OVERSIZE)
    batches = _batches(
        enumerate(_elements(dataset)),
        size_lookup(sizeof),
        ("the element at position", "positions"),
        checked_budget(max_total_size),
        oversize,
        logger_or(log_info, info_logger, "info_logger"),
        logger_or(warn, warn_logger, "warn_logger"),
    )
    return _collated(batches, collate_fn)


class SizeAwareBatchSampler(Sampler[list[int]]):
    """Batch the indices of another sampler so that the sizes in each batch sum to at most ``max_total_size``.

    For ``DataLoader(dataset, batch_sampler=...)``. The order is that of the inner sampler; see `size_aware_batching`
    for how batches are formed. Every iteration reads the inner sampler from its beginning, also after a ``break``.

    It does not distribute batches to ranks: ranks get those of their own inner sampler, possibly unequal numbers of
    them. `DistributedSizeAwareBatchSampler` gives all ranks the same number.

    There is no ``len()``: the number of batches depends on the order of the inner sampler, which may change in every
    epoch. ``len(loader)`` raises a ``TypeError`` therefore.

    Instances can be pickled when their arguments can; the default loggers can.

    Args:
        sampler: Yields indices. An iterator is good for one epoch; a second one raises a ``RuntimeError``.
        sizeof: Size at an index: a callable, mapping, sequence, array or tensor.
        max_total_size: Budget of a batch, in the unit of the sizes.
        info_logger: Receives the summary of each epoch. By default the logger ``headrace.size_aware_batching``,
            at INFO.
        warn_logger: Receives a message for each index skipped. By default a ``UserWarning``.
        oversize: Policy for an index that exceeds the budget by itself: ``"skip"`` (the default here), ``"raise"`` or
            ``"own_batch"``, as for `size_aware_batching`.

    Raises:
        TypeError: If ``sampler`` is no sampler or iterable, ``sizeof`` is none of the forms above, or
            ``max_total_size`` is not a real number.
        ValueError: If ``max_total_size`` is NaN, zero or negative, or an array of sizes holds such values.

    >>> list(SizeAwareBatchSampler(range(5), sizeof=[2, 2, 3, 1, 2], max_total_size=4))
    [[0, 1], [2, 3], [4]]
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
        self.oversize: Oversize = oversize
        self._size = size_lookup(sizeof)
        self._info = logger_or(log_info, info_logger, "info_logger")
        self._warn = logger_or(warn, warn_logger, "warn_logger")
        self._used_up = False

    def __iter__(self) -> Iterator[list[int]]:
        if self._used_up:
            raise RuntimeError(
                "sampler is an iterator and its indices are used up: it is good for one epoch, even if that was "
                "abandoned; give a sampler or a sequence of indices, which can be iterated again"
            )
        self._used_up = isinstance(self.sampler, Iterator)
        yield from _batches(
            ((index, index) for index in map(plain_index, self.sampler)),
            self._size,
            ("index", "indices"),
            self.max_total_size,
            self.oversize,
            self._info,
            self._warn,
        )

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the inner sampler, if that has a ``set_epoch``."""
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)


def _batches(
    keyed: Iterable[tuple[object, Data]],
    size: Callable[[Any], Any],
    nouns: tuple[str, str],
    budget: Number,
    oversize: Oversize,
    info: Logger,
    warn_of: Logger,
) -> Iterator[list[Data]]:
    tally = Tally(budget, nouns[1])
    policy = OversizePolicy(oversize, tally, nouns[0], warn_of)
    sized = ((key, element, checked_size(size(element), nouns[0], key)) for key, element in keyed)
    yield from next_fit(sized, tally, policy.has_own_batch)
    policy.close(info)


def _collated(
    batches: Iterator[list[Data]], collate_fn: Callable[[list[Data]], Any] | None
) -> Generator[Any, None, None]:
    yield from batches if collate_fn is None else map(collate_fn, batches)


def _elements(dataset: Iterable[Data] | MapStyle[Data]) -> Iterable[Data]:
    if isinstance(dataset, Iterable):
        return dataset
    if isinstance(dataset, MapStyle):
        return map(dataset.__getitem__, range(len(dataset)))
    raise TypeError(f"dataset must be an iterable or have __getitem__ and __len__, got {type(dataset).__name__}")


@dataclass(slots=True)
class Tally:
    """Counts of one pass: batches, their elements and filled sizes in the unit of `exact`, elements over the budget."""

    budget: Number
    noun: str
    batches: int = 0
    elements: int = 0
    filled: int = 0
    skipped: int = 0
    alone: int = 0
    named: list[object] = field(default_factory=list)

    def close(self, count: int, total: int) -> None:
        """Count a batch."""
        self.batches += 1
        self.elements += count
        self.filled += total

    def skip(self, key: object) -> None:
        """Count an element that is left out."""
        self.skipped += 1
        self._name(key)

    def leave_alone(self, key: object) -> None:
        """Count an element in a batch of its own."""
        self.alone += 1
        self._name(key)

    def _name(self, key: object) -> None:
        if len(self.named) < _NAMED:
            self.named.append(key)

    def fill(self) -> float:
        """Return the mean share of the budget that is used, 0 to 1; NaN without a batch or a finite budget."""
        if not self.batches or math.isinf(self.budget):
            return math.nan
        return self.filled / (self.batches * exact(self.budget))

    def summary(self) -> str:
        """Return the counts in one line.

        >>> tally = Tally(budget=10, noun="indices")
        >>> tally.close(2, exact(9)); tally.skip(7)
        >>> tally.summary()
        '1 batches of 2 elements, fill 0.9000 of max_total_size=10; 1 skipped as larger than that: indices 7'
        """
        line = f"{self.batches} batches of {self.elements} elements, fill {self.fill():.4f} of "
        line += f"max_total_size={self.budget}; "
        if self.alone:
            return f"{line}{self.alone} over it, one a batch: {self.noun} {shortlist(self.named, self.alone)}"
        if not self.skipped:
            return f"{line}0 skipped"
        return f"{line}{self.skipped} skipped as larger than that: {self.noun} {shortlist(self.named, self.skipped)}"


class OversizePolicy:
    """Raises, warns or counts for elements that exceed the budget by themselves."""

    def __init__(self, oversize: Oversize, tally: Tally, noun: str, warn_of: Logger) -> None:
        self._oversize = oversize
        self._tally = tally
        self._noun = noun
        self._warn = warn_of

    def has_own_batch(self, key: object, size: Number) -> bool:
        """Return whether an element over the budget gets its own batch, or else is skipped; raise if it may not be."""
        tally = self._tally
        found = f"{self._noun} {key} has size {size}, more than max_total_size={tally.budget}"
        if self._oversize == "raise":
            raise ValueError(f"{found}: raise the budget, cut the sample, or choose oversize='skip' or 'own_batch'")
        if self._oversize == "own_batch":
            tally.leave_alone(key)
            return True
        tally.skip(key)
        if tally.skipped <= _WARNED:
            self._warn(f"{found}: it is skipped")
        elif str(tally.skipped).strip("0") == "1":  # 1,000, 10,000 ...: a stream may be endless
            self._warn(f"{tally.skipped} are skipped so far as larger than max_total_size={tally.budget}")
        return False

    def close(self, info: Logger) -> None:
        """Log the summary; warn as well where not every skipped element had a warning."""
        summary = self._tally.summary()
        if self._tally.skipped > _WARNED:
            self._warn(summary)
        info(summary)


def exact(number: Number) -> int:
    """Express a finite number as a whole multiple of 2**-1074, which every finite double is: sums do not round.

    >>> exact(0.1) + exact(0.2) > exact(0.3), exact(0.5) + exact(0.25) == exact(0.75)
    (True, True)
    """
    numerator, denominator = number.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())


def next_fit(
    sized: Iterable[tuple[Key, Element, Number]], tally: Tally, has_own_batch: Callable[[Key, Number], object]
) -> Iterator[list[Element]]:
    """Group (key, element, size) in their order so that the sizes of each group sum to at most the budget.

    Next-fit as in D. S. Johnson, "Near-optimal bin packing algorithms" (1973): one batch is open at a time, so memory
    is that of one batch. ``has_own_batch`` is called for an element larger than the budget, which else is left out.

    >>> sized = [("a", "A", 3), ("b", "B", 4), ("c", "C", 9), ("d", "D", 1)]
    >>> list(next_fit(sized, Tally(7, "names"), lambda key, size: False))
    [['A', 'B'], ['D']]
    """
    limit: Number = math.inf if math.isinf(tally.budget) else exact(tally.budget)
    batch: list[Element] = []
    total = 0
    for key, element, size in sized:
        too_large = size > tally.budget or math.isinf(size)
        if too_large and not has_own_batch(key, size):
            continue
        cost = 0 if too_large else exact(size)
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
