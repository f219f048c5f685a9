"""The sampler that PyTorch sees: options and state around the pure functions beside it."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, DistributedSampler, Sampler

from headrace.weighted_sampler.checks import WORD, integer
from headrace.weighted_sampler.keyed import Indices
from headrace.weighted_sampler.mixture import MOST
from headrace.weighted_sampler.order import Order
from headrace.weighted_sampler.ranks import deal_end, rank_positions
from headrace.weighted_sampler.recipe import Options, Schedule, read_recipe
from headrace.weighted_sampler.report import MixtureReport, mixture_report
from headrace.weighted_sampler.sources import Weights
from headrace.weighted_sampler.state import VERSION, State, check_state
from headrace.weighted_sampler.weights import Ratio
from headrace.weighted_sampler.world import resolve


class WeightedDistributedSampler(DistributedSampler[int]):
    """Mix the sources of one dataset by weight, each rank its share of one global sequence.

    The sequence is endless and a pure function of the seed and the weights; an epoch is a stretch of it, and
    rank ``r`` of ``W`` takes its positions ``r, r + W, ...``. Every source's count follows its share to within
    about one and a half draws at every 1,024th position. A source's own samples come in passes, each shuffled
    anew, that run on from epoch to epoch: every sample comes before one of them comes again, so ratio 0.25
    covers a source in four epochs and 2.0 draws each sample exactly twice. Any position is worked out by
    itself, so that memory and the time to the first sample do not grow with the epoch.

    Every rank gets the same number of samples. What does not divide evenly is padded from the beginning of
    the epoch's sequence, or dropped from its end: ``padded()`` and ``dropped()`` name those samples.

    ``len()`` is this rank's number of samples in a whole epoch, in a resumed one as well: learning-rate
    schedules and Lightning's progress need the whole. ``remaining`` is what the next iteration yields.

    It is one of torch's ``DistributedSampler`` s so that frameworks know that the ranks are taken care of:
    Lightning would otherwise deal each rank's share to all ranks again and lose the rest.

    Args:
        dataset: Anything with a length, such as a ``NamedConcatDataset``; its samples are never read.
        weights: ``{name: weight}`` for a dataset with names, such as a ``NamedConcatDataset``;
            ``{position: weight}`` or ``[weight, ...]`` for the parts of a ``ConcatDataset``;
            ``{(begin, end): weight}`` for ranges of indices that do not overlap, where samples in no range
            are never drawn; or an array of one weight a sample. A weight may be an int, float, ``Fraction``
            or ``Decimal``, and counts as the decimal number that was written; 0 leaves a source out. The
            order of a mapping does not matter. None, with a temperature, gives every part the weight 1.
        num_replicas: Number of ranks. By default the world size of ``torch.distributed``, or 1 when that is
            not initialised; it is looked up when it is needed, not here, so the sampler may be made before
            the process group.
        rank: This rank, from 0. Looked up in the same way.
        seed: From 0 to 2**64 - 1; the same on every rank.
        drop_last: Drop the end of the epoch that does not fill all ranks, rather than pad it.
        weight_dict: Another name for ``weights``.
        semantics: What a weight is. ``"ratio"``: how often an epoch draws each sample of the source,
            ``ceil(size * weight)`` draws. ``"proportion"``: the source's share of the epoch; the weights need
            not add up to 1. ``"count"``: how many samples an epoch draws. ``"temperature"``: the share is
            ``(weight * size) ** (1 / temperature)``.
        epoch_length: Samples in an epoch, all ranks together. By default what the weights ask for (ratio and
            count), or as many as there are in the sources that are drawn from.
        temperature: For ``semantics="temperature"``: 1 keeps the sizes' shares, more evens them out.
        schedule: ``[(position, weights), ...]``, positions rising: from that position of the endless sequence
            on, samples of all ranks and epochs counted together, other weights hold. Epochs keep their length.
        per: ``"sample"``, or ``"token"``: proportions, counts and temperatures are then meant by tokens, so
            that a source of long samples is drawn from less often. ``epoch_length`` stays in samples.
        sizes: For ``per="token"``, the number of tokens of each sample, shape ``[len(dataset)]``.

    Raises:
        TypeError: If ``dataset`` has no length or an argument is of the wrong type.
        ValueError: If a source, a weight, ``num_replicas``, ``rank``, ``seed`` or an option is not allowed.

    >>> sampler = WeightedDistributedSampler(range(110), {(0, 100): 0.25, (100, 110): 2}, seed=3)
    >>> len(sampler), sum(index >= 100 for index in sampler)
    (45, 20)
    >>> even = WeightedDistributedSampler(range(110), {(0, 100): 1, (100, 110): 1}, semantics="proportion")
    >>> len(even), sum(index >= 100 for index in even)
    (110, 55)
    """

    def __init__(
        self,
        dataset: Sized,
        weights: Weights | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        weight_dict: Weights | None = None,
        semantics: str = "ratio",
        epoch_length: int | None = None,
        temperature: Ratio | None = None,
        schedule: Schedule = (),
        per: str = "sample",
        sizes: ArrayLike | None = None,
    ) -> None:
        Sampler.__init__(self)  # DistributedSampler's own would look the ranks up here, once and for all
        if (
            isinstance(dataset, (list, tuple))
            and dataset
            and all(isinstance(part, (Dataset, range)) for part in dataset)
        ):
            raise TypeError(
                f"dataset must be one dataset, got a {type(dataset).__name__} of {len(dataset)}: join them with "
                "NamedConcatDataset({name: dataset, ...}) or torch's ConcatDataset"
            )
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"dataset must have a length, got {type(dataset).__name__}: weights of indices need a map-style dataset"
            )
        if weights is not None and weight_dict is not None:
            raise TypeError("weights and weight_dict are two names for the same argument; give one of them")
        self._num_replicas = None if num_replicas is None else integer("num_replicas", num_replicas, 1)
        self._rank = None if rank is None else integer("rank", rank, 0)
        if self._num_replicas is not None and self._rank is not None:
            resolve(self._num_replicas, self._rank)  # refused here already when it is known here
        self.seed = integer("seed", seed, 0, WORD - 1)
        if not isinstance(drop_last, (bool, np.bool_)):
            raise TypeError(f"drop_last must be True or False, got {drop_last!r}")
        self.drop_last = bool(drop_last)
        self.dataset = cast("Dataset[Any]", dataset)
        self.shuffle = True
        self.epoch = 0
        argument = "weights" if weight_dict is None else "weight_dict"
        options = Options(semantics, epoch_length, temperature, per, sizes)
        self._recipe = read_recipe(
            argument, dataset, weights if weight_dict is None else weight_dict, options, schedule
        )
        self._order = Order(self._recipe, self.seed)
        self._fingerprint = self._recipe.fingerprint()
        self._loaded: tuple[int, int] | None = None  # (epoch, position) of a loaded state
        self._skip: tuple[int, int] | None = None  # (batches, batch size) of set_skip_batches

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
        return self._recipe.epoch_length

    @property
    def fingerprint(self) -> str:
        """Names the dataset's length, the sources and their draws."""
        return self._fingerprint

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
        (world, rank), epoch, start = self._world(), self.epoch, self.position
        end = self._end(start, world)
        self._loaded = self._skip = None
        for positions in rank_positions(start, end, world, rank, self._order.block(world)):
            yield from self._at(epoch, positions).tolist()

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
        return self._order.stretch(self.epoch, integer("start", start, 0, stop), stop)

    def padded(self, start: int | None = None) -> Indices:
        """Name the samples that are delivered once more so that every rank gets the same number.

        Args:
            start: The position where the iteration begins; by default where the next one does.

        Returns:
            Dataset indices; they belong to the last ranks' last step. Empty with ``drop_last=True``.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=4, rank=0).padded().size
        2
        """
        positions, back = np.unique(self._repeated(self._start(start)), return_inverse=True)
        return self._order.at(self.epoch, positions)[back]

    def dropped(self, start: int | None = None) -> Indices:
        """Name the samples at the end of the epoch that no rank gets with ``drop_last=True``.

        Args:
            start: The position where the iteration begins; by default where the next one does.

        Returns:
            Dataset indices, fewer than there are ranks. Empty with ``drop_last=False``.
        """
        end = self._end(self._start(start), self.num_replicas)
        return self._order.stretch(self.epoch, min(end, self.epoch_length), self.epoch_length)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterations. Call it before each epoch, on every rank.

        Without it every iteration gives the same order, as with torch's ``DistributedSampler``. Batches to
        skip stay to be skipped; a position that was loaded holds for the epoch it was saved in only.

        Args:
            epoch: From 0; the whole sequence up to its end must have at most 2**62 positions.
        """
        self.epoch = integer("epoch", epoch, 0, MOST // self.epoch_length - 1)
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
        self._loaded = check_state(
            state_dict, self.seed, self.fingerprint, self.epoch_length, MOST // self.epoch_length
        )
        self.epoch, self._skip = self._loaded[0], None

    def report(self) -> MixtureReport:
        """Count what the whole current epoch was asked for and what it delivers, source by source."""
        return mixture_report(
            self._recipe,
            self._order,
            np.sort(self._repeated(0)),
            np.arange(min(self._end(0, self.num_replicas), self.epoch_length), self.epoch_length),
            epoch=self.epoch,
            num_replicas=self.num_replicas,
        )

    def _repeated(self, start: int) -> Indices:
        """Positions that an iteration from ``start`` on delivers once more."""
        return np.arange(self.epoch_length, self._end(start, self.num_replicas)) % self.epoch_length

    def _at(self, epoch: int, positions: Indices) -> Indices:
        """The samples at one rank's positions; those beyond the epoch stand for its first ones."""
        inside = int(np.searchsorted(positions, self.epoch_length))
        own = self._order.at(epoch, positions[:inside])
        if inside == len(positions):
            return own
        beyond = np.sort(positions[inside:] % self.epoch_length)  # a rank has one of these at most
        return np.concatenate([own, self._order.at(epoch, beyond)])

    def _skipped(self, count: int, size: int) -> int:
        if count > (batches := -(-len(self) // size)):
            raise ValueError(
                f"num_skip_batches={count} is more than an epoch has: {len(self)} samples on this rank are "
                f"{batches} batches of micro_batch_size={size}. Call set_epoch for the epochs already done "
                "and skip only within the current one"
            )
        return min(count * size * self.num_replicas, self.epoch_length)

    def _start(self, start: int | None) -> int:
        return self.position if start is None else integer("start", start, 0, self.epoch_length)

    def _world(self) -> tuple[int, int]:
        return resolve(self._num_replicas, self._rank)

    def _end(self, start: int, world: int) -> int:
        if self.drop_last and self.epoch_length < world:
            raise ValueError(
                f"drop_last=True leaves nothing: an epoch has {self.epoch_length} draws for {world} ranks. "
                "Use drop_last=False, greater ratios or fewer ranks"
            )
        return deal_end(self.epoch_length, start, world, self.drop_last)
