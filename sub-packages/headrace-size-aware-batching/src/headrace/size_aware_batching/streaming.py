"""Batches of similar sizes from a stream, through a shuffle buffer of bounded length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted, never_raises, options_of
from headrace.size_aware_batching._shared.random import fold_in
from headrace.size_aware_batching._shared.ranks import Mesh, Ranks, warning_of_whole_stream
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import (
    UNLIMITED,
    Logger,
    Number,
    checked_seed,
    log_info,
    logger_or,
    one_of,
)
from headrace.size_aware_batching.planning.costs import Cost, CostFunction, as_cost
from headrace.size_aware_batching.planning.last_step import split_longest
from headrace.size_aware_batching.planning.limits import checked_budget
from headrace.size_aware_batching.planning.options import STREAM_OVERSIZE, Options, StreamOversize
from headrace.size_aware_batching.planning.shuffles import random_words
from headrace.size_aware_batching.sampler import Tally, collated, exact
from headrace.size_aware_batching.sizes.read import SizeOf, checked_size, size_lookup

# Each round, one of this many parts of the buffer leaves before the rest is sorted again. On 200,000 lognormal sizes
# (median 360, sigma 0.8), budget 16384, buffer 1,000: 1, 4, 16 parts give 1.056, 1.053, 1.052 times the fewest padded
# batches possible, in 1.1, 2.1, 4.5 microseconds a sample on one core. Buffer 10,000: 1.0064, 1.0064, 1.0057.
PARTS = 4

StageOptions = ParamSpec("StageOptions")
Batches: TypeAlias = Generator[Any, None, None]
Sample = tuple[int, Any, Number]  # position in the stream, the sample, its size


@dataclass(repr=False)
class BucketedBatching:
    """`bucketed_batching` as a pipeline stage: construct it with the options, call it with the stream.

    For ``WebDataset(...).compose(stage)`` and every other pipeline whose stages take an iterator and return one. It is
    picklable if its arguments are; worker processes get the ranks of the process that started them.

    The arguments are those of `bucketed_batching`.

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
    oversize: StreamOversize = "raise"
    num_replicas: int | None = None
    rank: int | None = None
    mesh: Mesh | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    info_logger: Logger | None = None
    warn_logger: Logger | None = None

    def __post_init__(self) -> None:
        one_of("oversize", self.oversize, STREAM_OVERSIZE)
        Options(
            "bucketed",
            self.cost,
            self.shuffle,
            self.max_items,
            self.batch_size_multiple,
            self.length_multiple,
            self.oversize,
        )
        checked_int("buffer_size", self.buffer_size, 1)
        self.seed = checked_seed(self.seed)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"collate_fn must be a function of a list, or None, got {shown(self.collate_fn)}")
        self._size_of = size_lookup(self.sizeof)
        self._limit = checked_budget(self.max_total_size)
        self._info = logger_or(log_info, self.info_logger, "info_logger")
        self._warn = logger_or(warn, self.warn_logger, "warn_logger")
        self._ranks = Ranks(self.num_replicas, self.rank, self.mesh)
        self._epoch = _shared(torch.zeros(1, dtype=torch.int64))  # workers that live for several epochs read it
        if self.rank is not None and self.num_replicas is None:
            raise ValueError(f"num_replicas must be given with rank={self.rank}, got None: give both")

    @never_raises
    def __repr__(self) -> str:
        return options_of(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next stream."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of all later streams, in this process and in the loader workers that it started."""
        self._epoch.fill_(checked_int("epoch", epoch, high=2**63 - 1))

    def __call__(self, source: Iterable[Any]) -> Generator[Any, None, None]:
        """Batch a stream.

        Raises:
            TypeError: If ``source`` cannot be iterated.
        """
        if not isinstance(source, Iterable):
            raise TypeError(
                f"dataset must be an iterable, got {type(source).__name__}: for a dataset that is read by index use "
                "DistributedSizeAwareBatchSampler(cost='padded')"
            )
        if self.num_replicas is None and self.mesh is None and (message := warning_of_whole_stream(source, Ranks())):
            self._warn(message)
        return collated(self._of_rank(self._batches(source)), self.collate_fn)

    def __getstate__(self) -> dict[str, Any]:
        if self.num_replicas is None and self.mesh is None:
            return self.__dict__
        ranks = self._ranks.current()  # a worker process has no process group
        named = dict(zip(("num_replicas", "rank"), ranks, strict=True))
        return self.__dict__ | named | {"mesh": None, "_ranks": Ranks(*ranks)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _shared(self._epoch)  # in another process it is already

    def __copy__(self) -> BucketedBatching:
        made = object.__new__(type(self))
        made.__setstate__(self.__getstate__() | {"_epoch": self._epoch.clone()})  # an epoch of its own
        return made

    def _of_rank(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Yield the batches of this rank: every ``num_replicas``-th one, from steps that are complete."""
        if self.num_replicas is None and self.mesh is None:
            yield from batches
            return
        replicas, rank = self._ranks.current()
        step: list[list[Any]] = []
        for batch in batches:
            if len(step) == replicas:
                yield step[rank]
                step = []
            step.append(batch)
        if not step:
            return
        samples = [sample for batch in step for sample in batch]
        offsets = split_longest(np.cumsum([0, *map(len, step)]).tolist(), replicas)
        step = [samples[begin:end] for begin, end in pairwise(offsets)]
        if len(step) < replicas:
            self._warn(
                f"the last step of the stream has {counted(len(samples), 'sample')} for {counted(replicas, 'rank')}: "
                f"samples are repeated on {counted(replicas - len(step), 'rank')}"
            )
        yield step[rank % len(step)]

    def _batches(self, source: Iterable[Any]) -> Iterator[list[Any]]:
        most_items = min(self.max_items or self.buffer_size, self.buffer_size)
        cost = as_cost(self.cost, self.length_multiple)
        budget = StreamBudget(cost, self._limit, most_items, self.batch_size_multiple)
        nouns = ("the sample at position", "positions")
        tally = Tally(budget.limit, nouns, self.oversize, self._warn)
        buffer = _Buffer(budget, int(fold_in(self.seed, self.epoch)[0]) if self.shuffle else None, tally)
        largest = UNLIMITED // self.buffer_size  # sums over the buffer stay within 62 bits
        for position, sample in enumerate(source):
            size = checked_size(self._size_of(sample), "the sample at position", position)
            if budget.exceeded_by(size):
                if tally.has_own_batch(position, size):
                    yield [sample]
                continue
            if size >= largest:
                raise ValueError(
                    f"sizes must be less than {largest} with buffer_size={self.buffer_size}, got {size} for the sample "
                    f"at position {position}: the sum over the buffer may pass 2**62, so use a larger unit"
                )
            buffer.add(position, sample, size)
            if buffer.length == self.buffer_size:
                yield buffer.next_batch()
        while buffer.length:
            yield buffer.next_batch(ended=True)
        tally.finish(self._info)


def _shared(values: torch.Tensor) -> torch.Tensor:
    """Move values to memory that processes share."""
    shared: torch.Tensor = values.share_memory_()  # type: ignore[no-untyped-call]  # torch's
    return shared


# Behind the class, because its decorator makes the `__init__`, which mypy takes for a method that is not replaced.


def _takes_options_of(
    stage: Callable[StageOptions, BucketedBatching],
) -> Callable[[Callable[..., Batches]], Callable[Concatenate[Iterable[Any], StageOptions], Batches]]:
    """Append the stage's arguments to a function's signature, for type checkers, editors and documentation."""

    def with_signature(function: Callable[..., Batches]) -> Callable[Concatenate[Iterable[Any], StageOptions], Batches]:
        first, *_ = inspect.signature(function).parameters.values()
        options = inspect.signature(stage).parameters.values()
        signature = inspect.Signature([first, *options], return_annotation=Generator[Any, None, None])
        function.__signature__ = signature  # type: ignore[attr-defined]  # which inspect reads
        return function

    return with_signature


@_takes_options_of(BucketedBatching)
def bucketed_batching(dataset: Iterable[Any], *arguments: Any, **options: Any) -> Batches:  # noqa: D417  # by name
    """Batch a stream so that samples of similar size share a batch, with a buffer of bounded length.

    First the buffer is filled. Then each batch that leaves it is replaced by the same number of samples. Every sample
    is in exactly one batch, no batch exceeds the budget, and the buffer holds at most ``buffer_size`` samples. The
    stream may be endless: every sample leaves the buffer eventually. Arguments are checked at the call, not at the
    first ``next()``.

    Args:
        dataset: Any iterable: a generator, an ``IterableDataset``, a WebDataset pipeline.
        sizeof: Size of a sample: a callable of the sample, or a mapping, sequence, array or tensor for which the
            sample itself is the key or index.
        max_total_size: Budget of a batch, in the unit of the cost. With ``inf`` only ``max_items`` and ``buffer_size``
            limit a batch.
        cost: ``"padded"``, count times largest; ``"sum"`` of the sizes; or ``f(n, largest)`` in any unit, which must
            not decrease when n or the largest size grows.
        buffer_size: Maximum number of samples in the buffer. A larger buffer gives less padding and more randomness,
            but reads more samples before the first batch.
        shuffle: Whether batches leave in random order. Otherwise, the batch with the oldest sample is next.
        seed: Key of the random order, 0 to 2**64 - 1. The same stream and seed give the same batches.
        max_items: Largest number of samples in a batch.
        batch_size_multiple: Batches of more samples than this have a multiple of this.
        length_multiple: The largest size is rounded up to a multiple of this, for static shapes; not with
            ``cost="sum"``.
        oversize: Policy for a sample that exceeds the budget by itself: ``"raise"`` an error (the default here),
            ``"skip"`` it with a warning that names its position, or yield it at once in its ``"own_batch"``, over the
            budget. The summary counts such samples.
        num_replicas: Number of data-parallel ranks that read this same stream and share its batches: rank r gets
            every ``num_replicas``-th batch, and all ranks the same number. The last batches are split to make the
            numbers equal; if there are too few samples for that, some batches repeat, with a warning. By default
            the stream belongs to this rank only, as after webdataset's ``split_by_node``.
        rank: Rank of this process; by default the rank in the process group, read at the start of the stream.
        mesh: In place of both: a 1-D ``DeviceMesh`` of the data-parallel ranks, or an object with ``size()`` and
            ``get_local_rank()``.
        collate_fn: Converts a list of samples to a batch; by default the batch is the list.
        info_logger: Receives a summary at the end of the stream. By default the logger
            ``headrace.size_aware_batching``, at INFO.
        warn_logger: Receives a message for each skipped sample. By default a ``UserWarning``.

    Returns:
        A generator of the batches.

    Raises:
        TypeError: If an argument or a size has the wrong type.
        ValueError: If an argument or a size has a value that is not allowed, or a sample is too large and
            ``oversize="raise"``.

    >>> words = ["to", "a", "stream", "or", "brook", "I"]
    >>> list(bucketed_batching(words, len, 12, shuffle=False))
    [['to', 'or', 'a', 'I'], ['stream', 'brook']]
    """
    return BucketedBatching(*arguments, **options)(dataset)


class StreamBudget:
    """A cost and its budget, for sizes of a stream."""

    def __init__(self, cost: Cost, limit: Number, most_items: int, multiple: int = 1) -> None:
        self.cost, self.limit, self.multiple = cost, limit, multiple
        self._streamed = cost.streamed(limit, most_items, multiple)

    def exceeded_by(self, size: Number) -> bool:
        """Return whether a sample of this size exceeds the budget by itself; an infinite size always does."""
        if math.isinf(size):
            return True
        cost = self.cost.measure(1, size, size)
        return math.isinf(cost) or cost > self.limit

    def cut(self, descending: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
        """Return the offsets of batches of descending sizes, and the number of complete batches.

        The smallest samples, at the end, might share a batch with later samples.

        >>> budget = StreamBudget(as_cost("padded"), 12, most_items=4)
        >>> budget.cut(np.array([6, 5, 4, 3, 3, 1]))
        (array([0, 2, 5, 6]), 2)
        """
        with np.errstate(over="ignore"):  # the count of a size of 1e-310 overflows to inf and is clamped
            sizes, limits = self._streamed(descending)
            offsets = limits.cut(sizes)
        complete = len(offsets) - 2
        count = int(offsets[-1] - offsets[-2])
        if count > self.multiple and (over := count % self.multiple):
            offsets = np.insert(offsets, len(offsets) - 1, offsets[-1] - over)
        return offsets, complete


class _Buffer:
    """Waiting samples, and batches that are ready to leave."""

    def __init__(self, budget: StreamBudget, key: int | None, tally: Tally) -> None:
        self.length = 0  # samples in the buffer
        self._budget = budget
        self._key = key
        self._tally = tally
        self._round = 0
        self._waiting: list[Sample] = []
        self._ready: list[list[Sample]] = []  # the next one last

    def add(self, position: int, sample: Any, size: Number) -> None:
        self._waiting.append((position, sample, size))
        self.length += 1

    def next_batch(self, ended: bool = False) -> list[Any]:
        """Return the next batch; the buffer must not be empty. ``ended``: the stream has no further samples."""
        if not self._ready:
            self._sort(ended)
        batch = self._ready.pop()
        self.length -= len(batch)
        sizes = [size for _, _, size in batch]
        self._tally.close(len(batch), exact(self._budget.cost.measure(len(batch), max(sizes), sum(sizes))))
        return [sample for _, sample, _ in batch]

    def _sort(self, ended: bool) -> None:
        waiting = self._waiting
        sizes = np.array([size for _, _, size in waiting])
        positions = np.array([position for position, _, _ in waiting], np.int64)
        key = None if self._key is None else int(fold_in(self._key, self._round)[0])
        leaving = leaving_batches(self._budget, key, sizes, positions, ended)
        self._round += 1
        self._ready = [[waiting[place] for place in batch.tolist()] for batch in reversed(leaving)]
        stays = np.ones(len(waiting), bool)
        stays[np.concatenate(leaving)] = False
        self._waiting = [waiting[place] for place in np.flatnonzero(stays).tolist()]


def leaving_batches(
    budget: StreamBudget, key: int | None, sizes: NDArray[Any], positions: NDArray[np.int64], ended: bool
) -> list[NDArray[np.int64]]:
    """Return the buffer places of the batches that leave in this round.

    A quarter of the complete batches leaves, drawn by ``key`` or the oldest first. The batch of the oldest sample
    always leaves, so that no sample of an endless stream stays forever. At the end of the stream, all batches leave.

    >>> budget = StreamBudget(as_cost("padded"), 10, most_items=9)
    >>> [batch.tolist() for batch in leaving_batches(budget, None, np.array([9, 1, 5, 1, 5]), np.arange(5), True)]
    [[0], [1, 3], [2, 4]]
    """
    # Equal sizes get a random order: otherwise samples that came together would always leave together.
    ties = positions if key is None else random_words(int(fold_in(key, 0)[0]), len(sizes))
    order = np.lexsort((ties, -sizes))
    offsets, n_complete = budget.cut(sizes[order])
    oldest = np.minimum.reduceat(positions[order], offsets[:-1])
    ranking = np.argsort(oldest if key is None else random_words(int(fold_in(key, 1)[0]), len(oldest)), kind="stable")
    if not ended:
        complete = ranking < n_complete
        leaves = complete & (np.cumsum(complete) <= -(-n_complete // PARTS)) | (ranking == int(oldest.argmin()))
        ranking = ranking[leaves]
    return [order[offsets[batch] : offsets[batch + 1]] for batch in ranking]
