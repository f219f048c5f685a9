"""Batches of neighbours in size over a stream, in bounded memory."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from headrace.size_aware_batching._budget import CostFunction
from headrace.size_aware_batching._options import Options, Oversize, whole_number
from headrace.size_aware_batching._random import derive
from headrace.size_aware_batching.distributed import checked_epoch, checked_seed
from headrace.size_aware_batching.messages import Logger, log_info, logger_or, warn
from headrace.size_aware_batching.sizes import SizeOf, checked_budget, size_lookup
from headrace.size_aware_batching.streaming.budget import largest_size, stream_budget
from headrace.size_aware_batching.streaming.buffer import Buffer
from headrace.size_aware_batching.streaming.gate import Gate
from headrace.size_aware_batching.streaming.rounds import Rounds
from headrace.size_aware_batching.vectors import Number


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
