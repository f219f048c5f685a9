"""Batches of neighbours in size over a stream, in bounded memory."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._binpacking import cut_descending
from headrace.size_aware_batching._budget import (
    UNLIMITED,
    Capacity,
    CostFunction,
    Limits,
    PaddedCapacity,
    largest_count,
    round_up,
    whole_units,
)
from headrace.size_aware_batching._options import Options, Oversize
from headrace.size_aware_batching._random import derive, random_words
from headrace.size_aware_batching._sizes import (
    Number,
    SizeOf,
    checked_budget,
    checked_size,
    real_number,
    size_lookup,
)
from headrace.size_aware_batching._validation import Logger, log_info, logger_or, shortlist, warn, whole_number
from headrace.size_aware_batching.distributed import checked_epoch, checked_seed
from headrace.size_aware_batching.sampler import Tally, exact


def bucketed_batching(
    dataset: Iterable[Any],
    sizeof: SizeOf,
    max_total_size: Number,
    *,
    cost: Literal["sum", "padded"] | CostFunction = "padded",
    buffer_size: int = 10_000,
    shuffle: bool = True,
    seed: int = 0,
    max_items: int | None = None,
    batch_size_multiple: int = 1,
    length_multiple: int = 1,
    oversize: Oversize = "raise",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    info_logger: Logger | None = None,
    warn_logger: Logger | None = None,
) -> Generator[Any, None, None]:
    """Batch a stream so that neighbours in size share a batch, inside a buffer of bounded length.

    The buffer fills up first; from then on each batch that leaves makes room for as many samples. Every sample is
    in one batch, none over the budget, and at most ``buffer_size`` samples are held, so the stream may be without
    an end: no sample waits for ever. Arguments are checked by the call itself, not by the first ``next()``.

    Args:
        dataset: Any iterable: a generator, an ``IterableDataset``, a WebDataset pipeline.
        sizeof: Gives the size of a sample: a callable of the sample, or a mapping, sequence, array or tensor for
            which the sample itself is the key or index.
        max_total_size: Budget of a batch, in the unit of the cost. ``inf`` leaves the count to ``max_items`` and
            ``buffer_size``.
        cost: ``"padded"``, count times largest; ``"sum"`` of the sizes; or ``f(n, largest)`` in any unit, which
            must not fall when n or the largest size grows.
        buffer_size: Samples held at most. More of them mean less padding and more randomness, and more samples
            that are read before the first batch.
        shuffle: Whether batches leave in random order. Without, the one with the oldest sample is next.
        seed: Key of the random order, 0 to 2**64 - 1. The same stream and seed give the same batches.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: Batches that hold more samples than this hold a multiple of it.
        length_multiple: The largest size is rounded up to a multiple of this, for static shapes; not with
            ``cost="sum"``.
        oversize: What to do with a sample that exceeds the budget by itself: ``"raise"``; ``"skip"`` it with a
            warning that names its position; or let it pass at once in its ``"own_batch"``, over the budget. The
            summary counts them.
        collate_fn: Makes a batch of a list of samples; the list itself is the batch by default.
        info_logger: Gets a summary at the end of the stream. By default the logger
            ``headrace.size_aware_batching``, at INFO.
        warn_logger: Gets a message for a sample skipped. By default a ``UserWarning``.

    Returns:
        A generator of the batches.

    Raises:
        TypeError: If an argument or a size is of the wrong kind.
        ValueError: If an argument or a size has a value that is not allowed, or a sample is too large and
            ``oversize="raise"``.

    >>> words = ["to", "a", "stream", "or", "brook", "I"]
    >>> list(bucketed_batching(words, len, 12, shuffle=False))
    [['to', 'or', 'a', 'I'], ['stream', 'brook']]
    """
    stage = BucketedBatching(
        sizeof,
        max_total_size,
        cost=cost,
        buffer_size=buffer_size,
        shuffle=shuffle,
        seed=seed,
        max_items=max_items,
        batch_size_multiple=batch_size_multiple,
        length_multiple=length_multiple,
        oversize=oversize,
        collate_fn=collate_fn,
        info_logger=info_logger,
        warn_logger=warn_logger,
    )
    return stage(dataset)


@dataclass
class BucketedBatching:
    """`bucketed_batching` as a stage: made from the options, called with the stream.

    For ``WebDataset(...).compose(stage)`` and for every other pipeline whose stages take an iterator and return
    one. It can be pickled when its arguments can, for worker processes.

    Args: as for `bucketed_batching`.

    >>> stage = BucketedBatching(len, 12, shuffle=False)
    >>> list(stage(iter(["to", "stream", "brook", "or"])))
    [['to', 'or'], ['stream', 'brook']]
    """

    sizeof: SizeOf
    max_total_size: Number
    _: KW_ONLY
    cost: Literal["sum", "padded"] | CostFunction = "padded"
    buffer_size: int = 10_000
    shuffle: bool = True
    seed: int = 0
    max_items: int | None = None
    batch_size_multiple: int = 1
    length_multiple: int = 1
    oversize: Oversize = "raise"
    collate_fn: Callable[[list[Any]], Any] | None = None
    info_logger: Logger | None = None
    warn_logger: Logger | None = None
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        Options(
            "bucketed",
            self.cost,
            self.shuffle,
            self.max_items,
            self.batch_size_multiple,
            self.length_multiple,
            self.oversize,
        )
        if self.cost == "sum" and self.length_multiple > 1:
            raise ValueError(f"length_multiple={self.length_multiple} goes with padding, got cost='sum'")
        whole_number("buffer_size", self.buffer_size)
        self.seed = checked_seed(self.seed)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"collate_fn: got {self.collate_fn!r}, expected a function of a list, or None")
        size_lookup(self.sizeof)
        checked_budget(self.max_total_size)
        logger_or(log_info, self.info_logger, "info_logger")
        logger_or(warn, self.warn_logger, "warn_logger")

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of the streams that are begun from now on."""
        self.epoch = checked_epoch(epoch)

    def __call__(self, source: Iterable[Any]) -> Generator[Any, None, None]:
        """Batch a stream.

        Raises:
            TypeError: If ``source`` cannot be iterated.
        """
        if not isinstance(source, Iterable):
            raise TypeError(
                f"dataset: got {type(source).__name__}, expected an iterable; for a dataset that is read by index "
                "use DistributedSizeAwareBatchSampler(strategy='bucketed')"
            )
        batches = self._batches(source)
        return _passed_on(batches if self.collate_fn is None else map(self.collate_fn, batches))

    def _batches(self, source: Iterable[Any]) -> Iterator[list[Any]]:
        budget = stream_budget(
            self.cost,
            checked_budget(self.max_total_size),
            min(self.max_items or self.buffer_size, self.buffer_size),
            self.batch_size_multiple,
            self.length_multiple,
        )
        gate = Gate(
            budget,
            size_lookup(self.sizeof),
            self.oversize,
            largest_size(self.buffer_size),
            logger_or(log_info, self.info_logger, "info_logger"),
            logger_or(warn, self.warn_logger, "warn_logger"),
        )
        key = int(derive(self.seed, self.epoch)[0]) if self.shuffle else None
        buffer = Buffer(Rounds(budget, key), gate.tally)
        for position, sample in enumerate(source):
            size = gate.size_of(position, sample)
            if not budget.exceeded_by(size):
                buffer.add(position, sample, size)
                if buffer.held == self.buffer_size:
                    yield buffer.leaving()
            elif gate.lets_pass(position, size):
                yield [sample]
        while buffer.held:
            yield buffer.leaving(ended=True)
        gate.close()


def _passed_on(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches


REMEMBERED = 2**16  # distinct sizes whose count is kept for a cost function: a stream may bring any number of them

Measure = Callable[[int, Number, Number], Number]
Cuts = Callable[[NDArray[Any]], NDArray[np.int64]]


@dataclass(frozen=True)
class StreamBudget:
    """A cost and its budget.

    Args:
        limit: Largest cost of a batch, in the unit of the cost.
        measure: ``measure(count, largest, total)`` gives the cost of a batch.
        cuts: Cuts sizes that fall, shape ``[n]``, into batches; see `strategies.bucketed.cut`.
        multiple: Batches that hold more samples than this hold a multiple of it.
    """

    limit: Number
    measure: Measure
    cuts: Cuts
    multiple: int = 1

    def exceeded_by(self, size: Number) -> bool:
        """Return whether a sample of this size exceeds the budget by itself; an infinite one always does."""
        if math.isinf(size):
            return True
        cost = self.measure(1, size, size)
        return math.isinf(cost) or cost > self.limit

    def cut(self, falling: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
        """Cut sizes that fall into batches.

        Args:
            falling: Sizes, largest first, shape ``[n]``; none of them exceeds the budget, and there is one at least.

        Returns:
            Where each batch begins and, last, where the last one ends; and how many of them are complete: what is
            over at the end, among the smallest, might have taken more.

        >>> budget = stream_budget("padded", 12, most_items=4)
        >>> budget.cut(np.array([6, 5, 4, 3, 3, 1]))
        (array([0, 2, 5, 6]), 2)
        """
        cuts = self.cuts(falling)
        complete = len(cuts) - 2
        count = int(cuts[-1] - cuts[-2])
        if count > self.multiple and (over := count % self.multiple):
            cuts = np.insert(cuts, len(cuts) - 1, cuts[-1] - over)
        return cuts, complete


def stream_budget(
    cost: Literal["sum", "padded"] | CostFunction,
    limit: Number,
    most_items: int,
    multiple: int = 1,
    length_multiple: int = 1,
) -> StreamBudget:
    """Make a budget of the options of `bucketed_batching`, which see.

    Args:
        cost: ``"sum"``, ``"padded"`` or ``f(n, largest)``.
        limit: Largest cost of a batch.
        most_items: Largest number of samples in a batch.
        multiple: What the number of samples is a multiple of.
        length_multiple: The largest size is rounded up to a multiple of this, unless sizes are summed.

    >>> stream_budget("padded", 10, most_items=100, length_multiple=4).measure(2, 3, 6)
    8
    """
    limit = math.inf if limit >= UNLIMITED else limit  # nothing gets there, see `largest_size`
    if cost == "sum":
        return StreamBudget(
            limit, lambda _count, _largest, total: total, sum_cuts(limit, most_items, multiple), multiple
        )
    if callable(cost):
        function, capacity = cost, remembered_capacity(cost, limit, most_items, length_multiple)
    else:
        function, capacity = padded, PaddedCapacity(limit, length_multiple)
    limits = Limits(capacity=capacity, most_items=most_items, multiple=multiple)

    def cuts_by_count(falling: NDArray[Any]) -> NDArray[np.int64]:
        with np.errstate(over="ignore"):  # the count of a size of 1e-310 is infinite, which no limit minds
            return cut_descending(falling, limits)

    return StreamBudget(
        limit,
        lambda count, largest, _total: real_number(function(count, rounded(largest, length_multiple)), "cost"),
        cuts_by_count,
        multiple,
    )


def padded(count: int, largest: Number) -> Number:
    """Return the cost of samples that are padded to the largest."""
    return count * largest


def rounded(size: Number, multiple: int) -> Number:
    """Round a finite size up to a multiple.

    >>> rounded(5, 4), rounded(8, 4), rounded(2.5, 1)
    (8, 8, 2.5)
    """
    return size if multiple == 1 else math.ceil(size / multiple) * multiple


def largest_size(samples: int) -> int:
    """Return the largest size with which the sum over so many samples stays within 62 bits."""
    return UNLIMITED // samples


def sum_cuts(limit: Number, most_items: int, multiple: int) -> Cuts:
    """Return a function that cuts falling sizes by their sum."""

    def cuts(falling: NDArray[Any]) -> NDArray[np.int64]:
        units, budgets = whole_units(falling, (limit,))  # whole numbers, so that sums do not round
        return cut_descending(units, Limits(budgets=budgets, most_items=most_items, multiple=multiple))

    return cuts


def remembered_capacity(cost: CostFunction, limit: float, most: int, length_multiple: int) -> Capacity:
    """Return how many samples fit by a cost function; the same sizes come again and are looked up once."""

    @lru_cache(REMEMBERED)
    def count(largest: float) -> int:
        return max(1, largest_count(cost, limit, largest, most))

    return lambda sizes: np.array([count(largest) for largest in round_up(sizes, length_multiple).tolist()], np.int64)


# One of so many parts of the buffer leaves before all that is there is sorted anew. On 200,000 lognormal sizes (median
# 360, sigma 0.8), budget 16384, buffer 1,000: 1, 4, 16 parts give 1.056, 1.053, 1.052 times the fewest padded batches
# possible, in 1.1, 2.1, 4.5 microseconds a sample on one core. With a buffer of 10,000: 1.0064, 1.0064, 1.0057.
PARTS = 4


@dataclass(frozen=True)
class Rounds:
    """Sorts a buffer by size, cuts it into batches, and lets some of them go.

    Args:
        budget: What a batch may hold.
        key: Key of the random choice; None to let the batch go first that holds the oldest sample.
    """

    budget: StreamBudget
    key: int | None = None

    def leaving(
        self, sizes: NDArray[Any], arrivals: NDArray[np.int64], number: int, ended: bool
    ) -> list[NDArray[np.int64]]:
        """Return the places in the buffer that leave in this round, batch by batch.

        A quarter of the complete batches leaves, and in any case the batch of the sample that has waited longest,
        so that on a stream without an end no sample stays for ever. Of a stream that has ended, all leave.

        Args:
            sizes: Sizes of the samples in the buffer, shape ``[n]``, ``n >= 1``.
            arrivals: The position of each in the stream, shape ``[n]``.
            number: Counts the rounds: each has random numbers of its own.
            ended: Whether nothing will follow.

        >>> from headrace.size_aware_batching.streaming import stream_budget
        >>> rounds = Rounds(stream_budget("padded", 10, most_items=9))
        >>> [batch.tolist() for batch in rounds.leaving(np.array([9, 1, 5, 1, 5]), np.arange(5), 0, ended=True)]
        [[0], [1, 3], [2, 4]]
        """
        key = None if self.key is None else int(derive(self.key, number)[0])
        # Equal sizes lie in random order, or those that came together would always leave together.
        ties = arrivals if key is None else random_words(int(derive(key, 0)[0]), len(sizes))
        order = np.lexsort((ties, -sizes))
        cuts, complete = self.budget.cut(sizes[order])
        oldest = np.minimum.reduceat(arrivals[order], cuts[:-1])
        turns = np.argsort(oldest if key is None else random_words(int(derive(key, 1)[0]), len(oldest)), kind="stable")
        if not ended:
            turns = turns[chosen(turns, complete, int(oldest.argmin()))]
        return [order[cuts[batch] : cuts[batch + 1]] for batch in turns]


def chosen(turns: NDArray[np.int64], complete: int, oldest: int) -> NDArray[np.bool_]:
    """Return which batches leave while the stream goes on.

    Args:
        turns: The batches in the order of their turns, shape ``[m]``.
        complete: So many batches, from 0 on, can take no more.
        oldest: The batch that leaves in any case.

    >>> chosen(np.array([2, 0, 1]), complete=2, oldest=1).tolist()
    [False, True, True]
    """
    full = turns < complete
    leave: NDArray[np.bool_] = full & (np.cumsum(full) <= -(-complete // PARTS)) | (turns == oldest)
    return leave


class Buffer:
    """Samples that wait, and batches that are ready to leave.

    Args:
        rounds: Decides what leaves.
        tally: Counts the batches.
    """

    def __init__(self, rounds: Rounds, tally: Tally) -> None:
        #: Samples that are here.
        self.held = 0
        self._rounds = rounds
        self._tally = tally
        self._number = 0
        self._waiting: list[tuple[int, Any, Number]] = []
        self._ready: list[list[tuple[int, Any, Number]]] = []  # the next one last

    def add(self, position: int, sample: Any, size: Number) -> None:
        """Take a sample in."""
        self._waiting.append((position, sample, size))
        self.held += 1

    def leaving(self, ended: bool = False) -> list[Any]:
        """Return the next batch; there must be a sample.

        Args:
            ended: Whether no sample will follow.
        """
        if not self._ready:
            self._sort(ended)
        batch = self._ready.pop()
        self.held -= len(batch)
        sizes = [size for _, _, size in batch]
        self._tally.close(len(batch), exact(self._rounds.budget.measure(len(batch), max(sizes), sum(sizes))))
        return [sample for _, sample, _ in batch]

    def _sort(self, ended: bool) -> None:
        waiting = self._waiting
        sizes = np.array([size for _, _, size in waiting])
        arrivals = np.array([position for position, _, _ in waiting], np.int64)
        leaving = self._rounds.leaving(sizes, arrivals, self._number, ended)
        self._number += 1
        self._ready = [[waiting[place] for place in batch.tolist()] for batch in reversed(leaving)]
        stays = np.ones(len(waiting), bool)
        stays[np.concatenate(leaving)] = False
        self._waiting = [waiting[place] for place in np.flatnonzero(stays).tolist()]


_NAMED = 100  # oversize samples that get a warning each; more of them would bury everything else


class Gate:
    """Reads sizes, deals with samples that exceed the budget by themselves, and reports.

    Args:
        budget: What a batch may hold.
        size: Gives the size of a sample.
        oversize: What to do with a sample that is too large.
        largest: Sizes from this on are refused where the budget would allow them.
        info: Gets the summary.
        warn: Gets what is skipped.
    """

    def __init__(
        self,
        budget: StreamBudget,
        size: Callable[[Any], Any],
        oversize: Oversize,
        largest: int,
        info: Logger,
        warn: Logger,
    ) -> None:
        self.tally = Tally(budget.limit, "positions")
        self._budget = budget
        self._size = size
        self._oversize = oversize
        self._largest = largest
        self._info = info
        self._warn = warn
        self._alone: list[int] = []  # the first that went into batches of their own
        self._n_alone = 0

    def size_of(self, position: int, sample: Any) -> Number:
        """Return the size of a sample, checked."""
        size = checked_size(self._size(sample), "the sample at position", position)
        if size >= self._largest and not self._budget.exceeded_by(size):
            raise ValueError(
                f"sizeof: the sample at position {position} has size {size}, with which the sum over buffer_size "
                f"samples may pass 2**62; allowed are sizes below {self._largest}: use a larger unit"
            )
        return size

    def lets_pass(self, position: int, size: Number) -> bool:
        """Return whether a sample that is too large goes into its own batch; raise or warn if not."""
        what = f"the sample at position {position} has size {size}, which exceeds max_total_size={self.tally.budget}"
        if self._oversize == "raise":
            raise ValueError(
                f"{what} by itself: raise the budget, cut the sample, or choose oversize='skip' or 'own_batch'"
            )
        if self._oversize == "own_batch":
            self._n_alone += 1
            if len(self._alone) < _NAMED:
                self._alone.append(position)
            return True
        self.tally.skip(position)
        if self.tally.skipped <= _NAMED:
            self._warn(f"{what}: it is skipped")
        elif str(self.tally.skipped).strip("0") == "1":  # 1,000, 10,000 ...: a stream may have no end
            self._warn(f"{self.tally.skipped} are skipped so far as larger than max_total_size={self.tally.budget}")
        return False

    def close(self) -> None:
        """Say what there was."""
        summary = self.tally.summary()
        if self.tally.skipped > _NAMED:
            self._warn(summary)
        if self._n_alone:
            summary += f"; {self._n_alone} over it in batches of their own: {shortlist(self._alone, self._n_alone)}"
        self._info(summary)
