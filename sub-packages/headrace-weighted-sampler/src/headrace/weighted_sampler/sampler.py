"""The sampler that PyTorch sees: options and state around the pure functions beside it."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, Sampler

from headrace.weighted_sampler.checks import WORD, integer
from headrace.weighted_sampler.mixture import epoch_length, epoch_order, fingerprint
from headrace.weighted_sampler.permutation import Indices
from headrace.weighted_sampler.ranks import deal_end, rank_positions
from headrace.weighted_sampler.report import MixtureReport, mixture_report
from headrace.weighted_sampler.state import VERSION, State, check_state
from headrace.weighted_sampler.weights import Ratio, weighted_ranges
from headrace.weighted_sampler.world import resolve


class WeightedDistributedSampler(DistributedSampler[int]):
    """Draw from index ranges of one dataset by weight, each rank its share of one global sequence.

    An epoch takes ``ceil((end - begin) * ratio)`` draws from each range, in exact decimal arithmetic. Draws
    are made without replacement and run on from epoch to epoch: every sample of a range is drawn before one
    of them comes again, so ratio 0.25 covers a range in four epochs and 2.0 draws each sample exactly twice.
    The draws of all ranges are shuffled into one global sequence, a pure function of the seed, the epoch and
    the ranges; rank ``r`` of ``W`` takes its positions ``r, r + W, ...``.

    Every rank gets the same number of samples. What does not divide evenly is padded from the beginning of
    the epoch's sequence, or dropped from its end: ``padded()`` and ``dropped()`` name those samples.

    ``len()`` is this rank's number of samples in a whole epoch, in a resumed one as well: learning-rate
    schedules and Lightning's progress need the whole. ``remaining`` is what the next iteration yields.

    It is one of torch's ``DistributedSampler`` s so that frameworks know that the ranks are taken care of:
    Lightning would otherwise deal each rank's share to all ranks again and lose the rest.

    Args:
        dataset: Anything with a length, such as a ``ConcatDataset``; its samples are never read.
        weight_dict: ``{(begin, end): ratio}``, ranges of dataset indices that must not overlap, in any order.
            A ratio may be an int, float, ``Fraction`` or ``Decimal``; 0 leaves the range out. Samples in no
            range are never drawn.
        num_replicas: Number of ranks. By default the world size of ``torch.distributed``, or 1 when that is
            not initialised; it is looked up when it is needed, not here, so the sampler may be made before
            the process group.
        rank: This rank, from 0. Looked up in the same way.
        seed: From 0 to 2**64 - 1; the same on every rank.
        drop_last: Drop the end of the epoch that does not fill all ranks, rather than pad it.

    Raises:
        TypeError: If ``dataset`` has no length or an argument is of the wrong type.
        ValueError: If a range, a ratio, ``num_replicas``, ``rank`` or ``seed`` is not allowed.

    >>> sampler = WeightedDistributedSampler(range(110), {(0, 100): 0.25, (100, 110): 2}, seed=3)
    >>> len(sampler), sum(index >= 100 for index in sampler)
    (45, 20)
    """

    def __init__(
        self,
        dataset: Sized,
        weight_dict: Mapping[tuple[int, int], Ratio],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        Sampler.__init__(self)  # DistributedSampler's own would look the ranks up here, once and for all
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"dataset must have a length, got {type(dataset).__name__}: ranges of indices need a map-style dataset"
            )
        self.dataset = cast("Dataset[Any]", dataset)
        self.shuffle = True
        self._length = len(dataset)
        self._ranges = weighted_ranges(weight_dict, self._length)
        self._num_replicas = None if num_replicas is None else integer("num_replicas", num_replicas, 1)
        self._rank = None if rank is None else integer("rank", rank, 0)
        if self._num_replicas is not None and self._rank is not None:
            resolve(self._num_replicas, self._rank)  # refused here already when it is known here
        self.seed = integer("seed", seed, 0, WORD - 1)
        if not isinstance(drop_last, (bool, np.bool_)):
            raise TypeError(f"drop_last must be True or False, got {drop_last!r}")
        self.drop_last = bool(drop_last)
        self.epoch = 0
        self._loaded: tuple[int, int] | None = None  # (epoch, position) of a loaded state
        self._skip: tuple[int, int] | None = None  # (batches, batch size) of set_skip_batches
        self._cached: tuple[int, Indices] | None = None

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch stores it, here it is looked up
        """Number of ranks, as of now."""
        return self._world()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]  # torch stores it, here it is looked up
        """This rank, as of now."""
        return self._world()[1]

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # torch stores it, here it is computed
        """The same as ``len()``."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch stores it, here it is computed
        """Samples that all ranks together get in a whole epoch, padding included."""
        return len(self) * self.num_replicas

    @property
    def epoch_length(self) -> int:
        """Draws in an epoch, all ranks together, before padding or dropping."""
        return epoch_length(self._ranges)

    @property
    def fingerprint(self) -> str:
        """Names the dataset's length, the ranges and their numbers of draws."""
        return fingerprint(self._length, self._ranges)

    @property
    def position(self) -> int:
        """Where in the epoch's global sequence the next iteration begins; 0 but for a resumed epoch."""
        if self._skip is not None:
            return self._skipped(*self._skip)  # worked out now: the number of ranks may not be known before
        return 0 if self._loaded is None else self._loaded[1]

    @property
    def remaining(self) -> int:
        """Samples that the next iteration yields on this rank."""
        world, _ = self._world()
        return (self._end(self.position, world) - self.position) // world

    def __len__(self) -> int:
        world, _ = self._world()
        return self._end(0, world) // world

    def __iter__(self) -> Iterator[int]:
        # A generator: nothing is used up before the first sample is asked for. A DataLoader with workers
        # makes two iterators and throws the first away.
        (world, rank), order, start = self._world(), self._order(), self.position
        end = self._end(start, world)
        self._loaded = self._skip = None
        for positions in rank_positions(start, end, world, rank):
            yield from order[positions % len(order)].tolist()

    def take(self, start: int, stop: int) -> Indices:
        """List the dataset indices at positions ``start .. stop - 1`` of the current epoch's global sequence.

        All ranks together, without padding or dropping, wherever an iteration stands.

        Args:
            start: First position.
            stop: One past the last position, at most ``epoch_length``.

        Returns:
            Shape ``[stop - start]``, int64; a new array.

        Raises:
            ValueError: If the positions are reversed or outside the epoch.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}).take(0, 3).shape
        (3,)
        """
        stop = integer("stop", stop, 0, self.epoch_length)
        return self._order()[integer("start", start, 0, stop) : stop].copy()

    def padded(self, start: int = 0) -> Indices:
        """Name the samples that are delivered once more so that every rank gets the same number.

        Args:
            start: The position where the iteration begins; 0 for a whole epoch.

        Returns:
            Dataset indices; they belong to the last ranks' last step. Empty with ``drop_last=True``.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=4, rank=0).padded().size
        2
        """
        order, end = self._order(), self._end(self._start(start), self.num_replicas)
        named: Indices = order[np.arange(len(order), end) % len(order)]
        return named

    def dropped(self, start: int = 0) -> Indices:
        """Name the samples at the end of the epoch that no rank gets with ``drop_last=True``.

        Args:
            start: The position where the iteration begins; 0 for a whole epoch.

        Returns:
            Dataset indices, fewer than there are ranks. Empty with ``drop_last=False``.
        """
        return self._order()[self._end(self._start(start), self.num_replicas) :].copy()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterations. Call it before each epoch, on every rank.

        Without it every iteration gives the same order, as with torch's ``DistributedSampler``. Batches to
        skip stay to be skipped; a position that was loaded holds for the epoch it was saved in only.

        Args:
            epoch: From 0.
        """
        self.epoch = integer("epoch", epoch, 0, WORD - 1)
        if self._loaded is not None and self._loaded[0] != self.epoch:
            self._loaded = None

    def set_skip_batches(self, num_skip_batches: int, micro_batch_size: int) -> None:
        """Leave out the batches that this rank has already had, in the next iteration only.

        The iteration after that one is whole again. A loaded position no longer counts.

        Args:
            num_skip_batches: Batches to skip, counted from the beginning of the epoch.
            micro_batch_size: Samples in one batch of one rank.

        Raises:
            ValueError: If the epoch has fewer batches than that. Raised by the next iteration when only
                that knows the number of ranks.

        >>> sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
        >>> sampler.set_skip_batches(2, micro_batch_size=4)
        >>> sampler.remaining, len(sampler), len(list(sampler)), len(list(sampler))
        (2, 10, 2, 10)
        """
        count = integer("num_skip_batches", num_skip_batches, 0)
        size = integer("micro_batch_size", micro_batch_size, 1)
        self._skipped(count, size)  # refused here already when it is known here
        self._skip, self._loaded = (count, size), None

    def state_dict(self, position: int | None = None) -> State:
        """Return the few numbers to resume from.

        The sampler cannot know what reached the training loop: a loader fetches ahead of it. So the position
        is told by whoever counts deliveries.

        Args:
            position: Samples of this epoch delivered so far, all ranks together: batches done times the
                samples of one batch on all ranks. By default where the next iteration begins.

        Raises:
            ValueError: If the position is beyond the epoch.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}).state_dict(position=4)["position"]
        4
        """
        if position is None:
            position = self.position
        position = integer("position", position, 0, self.epoch_length + self.num_replicas - 1)
        return State(
            version=VERSION,
            seed=self.seed,
            epoch=self.epoch,
            position=min(position, self.epoch_length),  # padding is no part of the sequence
            fingerprint=self.fingerprint,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position: the next iteration deals out the rest of that epoch.

        The number of ranks may be another one than when it was saved; every rank then takes its share of
        what is left. Nothing is replayed.

        Args:
            state_dict: What ``state_dict`` returned.

        Raises:
            ValueError: If it comes from another seed, dataset length or other weights.
        """
        self._loaded = check_state(state_dict, self.seed, self.fingerprint, self.epoch_length)
        self.epoch, self._skip = self._loaded[0], None

    def report(self) -> MixtureReport:
        """Count what the whole current epoch was asked for and what it delivers, range by range."""
        return mixture_report(
            self._ranges,
            self._order(),
            self.padded(),
            self.dropped(),
            epoch=self.epoch,
            num_replicas=self.num_replicas,
            length=self._length,
        )

    def _skipped(self, count: int, size: int) -> int:
        if count > (batches := -(-len(self) // size)):
            raise ValueError(
                f"num_skip_batches={count} is more than an epoch has: {len(self)} samples on this rank are "
                f"{batches} batches of micro_batch_size={size}. Call set_epoch for the epochs already done "
                "and skip only within the current one"
            )
        return min(count * size * self.num_replicas, self.epoch_length)

    def _start(self, start: int) -> int:
        return integer("start", start, 0, self.epoch_length)

    def _world(self) -> tuple[int, int]:
        return resolve(self._num_replicas, self._rank)

    def _end(self, start: int, world: int) -> int:
        if self.drop_last and self.epoch_length < world:
            raise ValueError(
                f"drop_last=True leaves nothing: an epoch has {self.epoch_length} draws for {world} ranks. "
                "Use drop_last=False, greater ratios or fewer ranks"
            )
        return deal_end(self.epoch_length, start, world, self.drop_last)

    def _order(self) -> Indices:
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = None  # frees the last epoch before the next one is made
            self._cached = (self.epoch, epoch_order(self._ranges, self.seed, self.epoch))
        return self._cached[1]
