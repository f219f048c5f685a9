"""``WeightedDistributedSampler``: options and state around pure functions of seed, weights and position."""

from __future__ import annotations  # help() shows the names of types, not the unions behind them

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from copy import copy
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, DistributedSampler, Sampler

from headrace.weighted_sampler._arguments import MAX_POSITION, SEED_BOUND, as_bool, short, shown
from headrace.weighted_sampler._caps import cap_passes
from headrace.weighted_sampler._growth import Growth, changed, grown, source_epochs
from headrace.weighted_sampler._mixture import DEALS
from headrace.weighted_sampler._mixture_arguments import MixtureSpec, parse_mixture
from headrace.weighted_sampler._permutation import Indices, below
from headrace.weighted_sampler._recorded_mixture import arguments_of, is_plain_weight, plain_weights, recorded_mixture
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.cursor import EpochCursor
from headrace.weighted_sampler._shared.display import counted, never_raises
from headrace.weighted_sampler._shared.random import fold_in
from headrace.weighted_sampler._shared.ranks import Mesh, Ranks, refuse_sharding_again
from headrace.weighted_sampler._shared.state_mismatch import StateMismatchError
from headrace.weighted_sampler._shared.warnings import warn
from headrace.weighted_sampler._states import (
    DIGEST_DIGITS,
    STATE_VERSION,
    check_fingerprint,
    check_keys,
    check_state,
    data_identity,
    digest,
    prefix_identity,
)
from headrace.weighted_sampler.plotting import plot_run
from headrace.weighted_sampler.report import MixtureReport, asked_of_epoch, mixture_report
from headrace.weighted_sampler.schedule import Schedule
from headrace.weighted_sampler.weights import Weight, WeightedSources, Weights, is_by_range, plain_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = "data"  # samples that were appended
_LENGTH_DIGITS = 12
_FINGERPRINT = {"length": _LENGTH_DIGITS, "data": DIGEST_DIGITS, "options": DIGEST_DIGITS}  # its parts
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # its fraction, times 2**64
_FIRST_BLOCK = 256  # positions in the first block, so that the first sample does not wait for many others


class State(TypedDict):
    """The state that ``WeightedDistributedSampler.state_dict`` returns.

    Attributes:
        version: Version of this layout.
        seed: Seed of the sampler.
        epoch: The epoch of ``position``.
        position: Number of samples of the epoch's global sequence that all ranks together have consumed.
        fingerprint: Fingerprint of the data, the options and the seed.
        mixture: The sources and their weights, as ``WeightedDistributedSampler.mixture`` has them.
    """

    version: int
    seed: int
    epoch: int
    position: int
    fingerprint: str
    mixture: dict[str, Any] | None


class _Iteration:
    """The progress of one iteration over the sampler."""

    def __init__(self, start: int, num_replicas: int) -> None:
        self.start = self.block_end = start
        self.num_replicas = num_replicas
        self.left_at = math.inf  # its position when another place was chosen
        self.block: Iterator[int] = iter(())  # a list iterator: its length_hint counts the rest without a cost per item

    def position(self) -> int:
        """Positions of the epoch consumed so far, on all ranks, padding included."""
        return self.block_end - self.num_replicas * operator.length_hint(self.block)


class WeightedDistributedSampler(DistributedSampler[int]):
    """Mix the sources of one dataset by weight and distribute the samples over data-parallel ranks.

    All ranks read one global sequence: each of the ``W`` ranks takes one of every ``W`` samples in a row. Samples are
    distributed by source, starting from a different rank in each step, so that each rank sees the mixture too. The
    sequence is endless and a pure function of the seed and the weights; an epoch is a slice of it. Every source's count
    follows its share to within about one and a half draws at every position, so it is within three draws over any
    stretch. Each source is drawn without replacement, with a new shuffle for each pass. Passes continue across epochs:
    ratio 0.25 covers a source in four epochs, and 2.0 draws each sample exactly twice per epoch. Any position is
    computed independently, so memory and the time to the first sample do not grow with the epoch.

    Every rank gets the same number of samples. The last step is padded from the beginning of the epoch's sequence, or
    dropped: ``padded()`` and ``dropped()`` return those samples.

    A new iteration without ``set_epoch`` repeats the epoch from its beginning, as with torch's ``DistributedSampler``,
    also after a ``break``. ``state_dict()`` is exact at any time in an iteration, and a copy (``copy.copy``,
    ``copy.deepcopy``, ``pickle``) continues from it. ``len()`` is the length of the full epoch on this rank, also after
    a resume; ``remaining`` counts the rest.

    The class subclasses torch's ``DistributedSampler``, so trainers do not replace it. accelerate's ``prepare`` shards
    every loader again: construct the sampler with ``num_replicas=1, rank=0`` for it; otherwise the sampler raises an
    error.

    Args:
        dataset: Any object with a length, such as a ``NamedConcatDataset``; its samples are never read. If it has a
            ``fingerprint``, this becomes part of the sampler's ``fingerprint``.
        weights: ``{name: weight}`` for a dataset with names, such as a ``NamedConcatDataset``, or nested as ``{group:
            (weight, {name: weight})}``; ``{position: weight}`` or ``[weight, ...]`` for the parts of a
            ``ConcatDataset``; ``{(begin, end): weight}`` for index ranges that do not overlap, where samples in no
            range are never drawn; or one weight per sample, as an array or a column of pandas, polars, Arrow, Hugging
            Face datasets or ``(Parquet file, column)``, like ``sizes``. A weight may be an int, float, ``Fraction`` or
            ``Decimal``; a float counts as its shortest decimal form. Weight 0 leaves a source out. The order of a
            mapping does not matter. None, with a temperature, gives all parts equal weight.
        num_replicas: Number of data-parallel ranks. By default the world size of ``torch.distributed``, or 1 if that
            is not initialised. It is read at the start of an epoch or by ``len()``, so the sampler may be constructed
            before the process group.
        rank: This rank, from 0. Read in the same way.
        seed: From 0 to 2**64 - 1; the same on every rank.
        drop_last: Whether to drop the last incomplete step of the epoch instead of padding it.
        mesh: The data-parallel ranks as a 1-D ``DeviceMesh``, or an object with ``size()`` and ``get_local_rank()``,
            in place of ``num_replicas`` and ``rank``.
        weight_dict: Index ranges ``{(begin, end): ratio}``, in place of ``weights``.
        semantics: The meaning of a weight. ``"ratio"`` multiplies the source's size: ``ceil(size * weight)`` draws per
            epoch. ``"proportion"``: the source's share of the epoch; weights need not add up to 1. ``"count"``: the
            number of samples that an epoch draws. ``"temperature"``: the share is proportional to ``(weight * size) **
            (1 / temperature)``. By default ``"ratio"`` for index ranges and ``"proportion"`` for all other weights.
        epoch_length: Number of samples in an epoch, all ranks together. By default the sum of the draws (ratio and
            count), or the total size of the sources with a positive weight.
        temperature: For ``semantics="temperature"``: 1 keeps the shares by size, larger values flatten them.
        schedule: ``[(position, weights), ...]`` with increasing positions: these weights apply from that position of
            the endless sequence (samples counted over all ranks and epochs). Epochs keep the length that follows from
            ``weights`` or ``epoch_length``, so counts and ratios of a later stage only set its proportions. A resumed
            run may change the schedule after its position.
        per: ``"sample"``, or ``"token"``: then proportions, counts and temperatures refer to tokens, so a source of
            long samples is drawn less often. At every position of the endless sequence each source's tokens are within
            about the longest sample of their share. ``epoch_length`` stays in samples. With
            ``stopping="drop_exhausted"`` every draw counts as the mean size of its source.
        sizes: For ``per="token"``, the number of tokens of each sample, shape ``[len(dataset)]``: at most 2**32 and
            131,072 times those of a mean draw, and not all 0 in a source that is drawn. Fractions are kept to a
            billionth of the longest sample.
        stopping: ``"endless"``: sources repeat. ``"drop_exhausted"``: each sample comes once per epoch; an exhausted
            source is dropped for the rest of the epoch, and the others keep their proportions.
        max_passes: ``{source: passes}``, with the keys of the weights: a source leaves the mixture when each of its
            samples was drawn this many times, counted from epoch 0; the others share its weight in proportion. These
            positions are known in advance: ``report()`` lists them and ``plot()`` draws the shares. With
            ``per="token"`` the constructor sums the sizes up to the last of these positions. Where data grow in the
            last pass of a source, its new samples are not drawn, and the load warns.

    Raises:
        TypeError: If ``dataset`` has no length or an argument has the wrong type.
        ValueError: If a source, a weight, ``num_replicas``, ``rank``, ``seed`` or an option is not allowed, or
            ``mesh`` is combined with ``num_replicas`` or ``rank``.

    >>> sampler = WeightedDistributedSampler(range(110), {(0, 100): 0.25, (100, 110): 2}, seed=3)
    >>> len(sampler), sum(index >= 100 for index in sampler)
    (45, 20)
    >>> from headrace.weighted_sampler import NamedConcatDataset
    >>> both = NamedConcatDataset({"large": range(100), "small": range(10)})
    >>> even = WeightedDistributedSampler(both, {"large": 1, "small": 1})
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
        mesh: Mesh | None = None,
        weight_dict: Mapping[tuple[int, int], Weight] | None = None,
        semantics: Literal["ratio", "proportion", "count", "temperature"] | None = None,
        epoch_length: int | None = None,
        temperature: Weight | None = None,
        schedule: Schedule = (),
        per: Literal["sample", "token"] = "sample",
        sizes: ArrayLike | None = None,
        stopping: Literal["endless", "drop_exhausted"] = "endless",
        max_passes: Mapping[Any, int] | None = None,
    ) -> None:
        Sampler.__init__(self)  # DistributedSampler.__init__ would read the ranks here, once and for all
        if weights is not None and weight_dict is not None:
            raise TypeError("weights and weight_dict were both given; weight_dict={(begin, end): ratio} is for ranges")
        if weight_dict is not None and not is_by_range(weight_dict):
            raise TypeError(
                f"weight_dict must be a mapping {{(begin, end): ratio}}, got {shown(weight_dict)}; "
                "give weights by name, by position or by sample as weights="
            )
        self._ranks = Ranks(num_replicas, rank, mesh)
        self.seed = checked_int("seed", seed, 0, SEED_BOUND - 1)
        self.drop_last = as_bool("drop_last", drop_last)
        self.dataset = cast("Dataset[Any]", dataset)
        self.shuffle = True
        self._schedule = schedule
        self._max_passes = max_passes
        self._sizes = None if sizes is None else cast("ArrayLike", plain_array("sizes", sizes))
        self._growth: Growth | None = None
        self._parse = partial(
            parse_mixture,
            "weights" if weight_dict is None else "weight_dict",
            dataset,
            weights if weight_dict is None else weight_dict,
            semantics=semantics,
            epoch_length=epoch_length,
            temperature=temperature,
            per=per,
            sizes=self._sizes,
            stopping=stopping,
        )
        spec = self._parse(schedule=schedule)
        self._plan([], spec)
        self._data = digest(data_identity(dataset), spec.sources.identity())
        self._recorded = recorded_mixture(
            spec,
            data=self._data,
            seed=self.seed,
            semantics=semantics,
            temperature=temperature,
            per=per,
            stopping=stopping,
            max_passes=max_passes,
            drop_last=self.drop_last,
        )
        self._cursor = EpochCursor()  # its iterations track their positions themselves
        self._skip: tuple[int, int] | None = None  # (batches, batch size) of set_skip_batches

    @never_raises
    def __repr__(self) -> str:
        sources = len(self._spec.sources.parts)
        try:
            num_replicas, rank = self._ranks.current()
            place = f"rank {rank} of {num_replicas}, epoch {self.epoch} at {self.position:,}"
        except ValueError:
            place = f"ranks not known yet, epoch {self.epoch}"
        return (
            f"{type(self).__name__}({counted(self._spec.length, 'sample')} of {counted(sources, 'source')}, "
            f"{self.epoch_length:,} an epoch, {place}, seed {self.seed})"
        )

    @property
    def epoch(self) -> int:  # type: ignore[override]  # torch stores it; here the cursor has it
        """The epoch of the latest iteration, or of the next one."""
        return self._cursor.epoch

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch stores it; here it is looked up
        """Current number of data-parallel ranks."""
        return self._ranks.world_size()

    @property
    def rank(self) -> int:  # type: ignore[override]  # torch stores it; here it is looked up
        """Current rank of this process."""
        return self._ranks.current()[1]

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # torch stores it; here it is computed
        """The same as ``len()``."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # torch stores it; here it is computed
        """Number of samples in a full epoch on all ranks together, with padding."""
        return len(self) * self.num_replicas

    @property
    def epoch_length(self) -> int:
        """Number of draws in an epoch, all ranks together, before padding or dropping."""
        return self._spec.epoch_length

    @property
    def fingerprint(self) -> str:
        """Hex digest of the data, the sources and their draws, ``drop_last`` and the seed.

        Equal options give the same fingerprint, whatever their types; another length or fingerprint of the dataset
        gives another one.
        """
        return self._fingerprint_of(len(self._spec.stages))

    def epoch_fingerprint(self, epoch: int) -> str:
        """Return the ``fingerprint`` without schedule changes after an epoch; batch samplers store it."""
        return self._fingerprint_of(self._order.mixture.stages_before(epoch, self.epoch_length))

    @property
    def first_epoch(self) -> int:
        """The first epoch of the present data: where they grew last, or 0."""
        return 0 if self._growth is None else self._growth.epoch

    @property
    def position(self) -> int:
        """Number of samples of the epoch's global sequence that the latest iteration has consumed, on all ranks.

        Before an iteration it is the start of the next one: 0 unless a state was loaded or batches will be skipped.
        """
        if self._cursor.iteration is None:
            return self._next_start()
        position: int = self._cursor.iteration.position()
        return min(position, self.epoch_length)  # padding is not part of the sequence

    @property
    def remaining(self) -> int:
        """Number of samples left in the epoch on this rank."""
        num_replicas, position = self.num_replicas, self.position
        return (self._end(position, num_replicas) - position) // num_replicas

    def __len__(self) -> int:
        num_replicas = self.num_replicas
        return self._end(0, num_replicas) // num_replicas

    def __iter__(self) -> Iterator[int]:
        # A generator, so that the first sample consumes a loaded position, not iter(): a DataLoader with workers
        # creates two iterators and discards the first.
        (num_replicas, rank), epoch, start = self._ranks.current(), self.epoch, self._next_start()
        if num_replicas > 1:
            refuse_sharding_again("num_replicas=1 and rank=0")
        # Dealing keeps more arrays than one rank's order needs.
        end, most = self._end(start, num_replicas), self._order.block // (1 if num_replicas == 1 else 2)
        iteration, self._skip = _Iteration(start, num_replicas), None
        self._cursor.begin(iteration)
        size = min(most, _FIRST_BLOCK)
        while (low := iteration.block_end) < end:
            high = min(low + size * num_replicas, end)
            iteration.block = iter(())  # not beside the next block
            indices = self._dealt(epoch, low, high, num_replicas, rank)
            iteration.block, iteration.block_end = iter(indices.tolist()), high
            size = min(most, 4 * size)
            yield from iteration.block
            if iteration.left_at < high:
                self._cursor.move(iteration, high, self)
        self._cursor.finish(iteration, start, self, nothing=start >= end)

    def take(self, start: int, stop: int) -> Indices:
        """Return the dataset indices at positions ``start .. stop - 1`` of the current epoch's global sequence.

        The positions are those of all ranks together, without padding or dropping. A running iteration is not affected.

        Args:
            start: First position.
            stop: One past the last position, at most ``epoch_length``.

        Returns:
            Shape ``[stop - start]``, int64; a new array.

        Raises:
            ValueError: If ``start`` is greater than ``stop``, or a position is outside the epoch.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}).take(0, 3).shape
        (3,)
        """
        stop = checked_int("stop", stop, 0, self.epoch_length)
        return self._order.between(self.epoch, checked_int("start", start, 0, stop), stop)

    @property
    def mixture(self) -> dict[str, Any] | None:
        """What makes the order again, in JSON: the sources' ranges, weights and schedule, without ``reweights``.

        None with one weight per sample. States hold it, so that steps of a run whose data grew can be looked up. Set
        to what `continuing` or `grown` returned, the mixture continues from where its data grew.

        >>> WeightedDistributedSampler(range(100), {(0, 50): 1, (50, 100): 0.3}).mixture["weights"]
        [1, '3/10']
        """
        if self._recorded is None:
            return None
        return {**self._recorded, "growth": None if self._growth is None else self._growth.plain()}

    @mixture.setter
    def mixture(self, mixture: Mapping[str, Any] | None) -> None:
        if mixture is None or not self._has_sources_of(mixture):
            if mixture is None and self._recorded is None:
                return
            raise ValueError(
                "mixture must be of the sources of this sampler: set what continuing() or grown() returned"
            )
        growth = Growth.of(mixture["growth"], self._spec.sources.ranges)
        if growth != self._growth:
            self._growth = growth
            self._plan([])

    @classmethod
    def from_mixture(cls, mixture: Mapping[str, Any], sizes: ArrayLike | None = None) -> WeightedDistributedSampler:
        """Return a sampler, for one rank, of the `mixture` that a state holds; the dataset is not needed.

        Args:
            mixture: As `mixture` returns it.
            sizes: With ``per="token"``, the tokens of each sample; more are allowed, as data grow.

        Raises:
            ValueError: If the mixture was changed, or sizes are missing.

        >>> sampler = WeightedDistributedSampler(range(30), {(0, 10): 2, (10, 30): 1}, seed=4)
        >>> WeightedDistributedSampler.from_mixture(sampler.mixture).fingerprint == sampler.fingerprint
        True
        """
        arguments = arguments_of(mixture)
        by_token = mixture["per"] == "token"
        if by_token and (sizes is None or len(np.asarray(sizes)) < mixture["length"]):
            raise ValueError(f"sizes must be the tokens of {mixture['length']} samples, as the mixture is by tokens")
        arguments["sizes"] = np.asarray(sizes)[: mixture["length"]] if by_token else None
        try:
            made = WeightedDistributedSampler(**arguments, num_replicas=1, rank=0)
            made._data = str(mixture["data"])
            made.mixture = mixture
        except (ArithmeticError, LookupError, TypeError) as error:
            raise changed(error) from error
        made._recorded = {**made._recorded, "data": made._data} if made._recorded else None
        return made

    def at_mixture(self, mixture: Mapping[str, Any] | None) -> WeightedDistributedSampler:
        """Return a copy whose order is that of a `mixture` which a state holds: of the same data, or before they grew.

        Its changes by `reweights` are none. Nothing is compared but the sources.
        """
        if mixture is None or {**mixture, "growth": None} == {**(self._recorded or {}), "growth": None}:
            made = copy(self)
            made.reweights, made.mixture = [], mixture
            return made
        made = self.from_mixture(mixture, self._sizes)
        made._ranks = self._ranks
        return made

    def continuing(self, mixture: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return this `mixture` as it continues that of a state: from where its data grew last.

        None if its sources are others.
        """
        if self._recorded is None or mixture is None or not self._has_sources_of(mixture):
            return None
        return {**self._recorded, "growth": mixture["growth"]}

    def grown(self, mixture: Mapping[str, Any], epoch: int, reweights: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        """Return this `mixture` as it continues that of a state, whose data have grown at the beginning of an epoch.

        Args:
            mixture: That the state holds.
            epoch: The first one with the present data.
            reweights: Changes of the weights that the state holds; they end there.

        Raises:
            StateMismatchError: If the mixture of the state has another seed.
            ValueError: If the sources are not those of the state, with more samples after them, or more sources.
        """
        before = self.at_mixture(mixture)
        if mixture["seed"] != self.seed:
            raise StateMismatchError(
                f"state is of a mixture of seed={short.repr(mixture['seed'])}, this {type(self).__name__} has "
                f"seed={self.seed}",
                f"its passes could not continue; construct the mixture with seed={short.repr(mixture['seed'])}",
                ["seed"],
            )
        before.reweights = reweights
        old, new = before._spec.sources, self._spec.sources
        if self._recorded is None or not _are_prefixes(old, new):
            raise ValueError(
                "accept={'data'} needs the sources of the state, of which only the last one may have more samples, and "
                f"others after them, got ranges {_some(new.ranges)} for {_some(old.ranges)}: give new samples of an "
                "earlier source as a source of their own after the others"
            )
        ends = None if old.by_range else [end for _, end in old.ranges]
        data = cast("Sized", self.dataset)
        same = digest(prefix_identity(data, before._spec.length, ends), old.identity())
        if same != before._data:
            raise ValueError(
                f"accept={{'data'}} needs data whose first {before._spec.length:,} samples are those of the state, got "
                "others, or a dataset with a fingerprint and without prefix_fingerprint(n_samples), which cannot say it"
            )
        drawn = before._drawn_before(epoch)
        growth = grown(before._growth, old.ranges, new.ranges, drawn, epoch, self.seed)
        self._warn_of_caps(growth)
        return {**self._recorded, "growth": growth.plain()}

    def _drawn_before(self, epoch: int) -> list[int]:
        """Number of each source's next draw at the beginning of an epoch."""
        draws_before, growth = self._order.mixture.draws_before, self._growth
        if growth is None:
            return draws_before(epoch)
        counts = zip(growth.first, draws_before(growth.epoch), draws_before(epoch), strict=True)
        return [first + now - there for first, there, now in counts]

    def _warn_of_caps(self, growth: Growth) -> None:
        """Warn of sources that grew and leave the mixture before any of their new samples is drawn."""
        sources = self._spec.sources
        passes_of = source_epochs(self.seed, sources.ranges, growth)
        for place, passes in (self._recorded or {}).get("max_passes", ()):
            part = sources.parts[place]
            if growth.earlier[place] and passes_of[place].size_of(passes - 1) < part.size:
                warn(
                    f"max_passes lets {part.name!r} leave before its new samples are drawn: its last pass began with "
                    "the old ones. Raise its max_passes, or give the new samples as a source of their own",
                    self,
                )

    def _has_sources_of(self, mixture: Mapping[str, Any]) -> bool:
        """Whether a recorded mixture has the same sources."""
        try:
            ranges = [(begin, end) for begin, end in mixture["ranges"]]
            same: bool = ranges == self._spec.sources.ranges and mixture["length"] == self._spec.length
            mixture["growth"]
        except (LookupError, TypeError, ValueError) as error:
            raise changed(error) from error
        return same and self._recorded is not None

    @property
    def reweights(self) -> list[list[Any]]:
        """Changes of the weights that a batch sampler made in mid-run; its states store them.

        ``[[position, [weight, ...]], ...]``, with a weight for each source in the order of their samples, in JSON: an
        int, or a fraction such as ``"3/10"``. They add to those of ``schedule``, which states do not store. Batch
        samplers set them when a state is loaded.
        """
        return [[position, list(weights)] for position, weights in self._reweights]

    @reweights.setter
    def reweights(self, changes: Sequence[Sequence[Any]]) -> None:
        checked, last = list[list[Any]](), 0
        for change in changes:
            fault = f"reweights must be [[position, weights], ...] as the mixture gave them, got {shown(change)}"
            if not isinstance(change, (list, tuple)) or len(change) != 2 or not isinstance(change[1], (list, tuple)):
                raise ValueError(fault)
            last = checked_int("reweights position", change[0], last + 1, MAX_POSITION)
            weights = list(change[1])
            if not self._are_plain(weights):
                raise ValueError(f"{fault}: one weight for each of {len(self._spec.sources.parts)} sources")
            checked.append([last, weights])
        if checked != self._reweights:
            self._plan(checked)

    def reweighted(self, weights: Weights, position: int) -> list[list[Any]]:
        """Return `reweights` with one more change, which replaces all from its position on; the sampler is unchanged.

        For batch samplers, which know how many of the samples that they took were delivered.

        Args:
            weights: As at construction, for the same sources, or as `reweights` has them.
            position: Of the endless sequence, after all changes of the schedule.

        Raises:
            TypeError: If a weight has the wrong type.
            ValueError: If the weights are not allowed, or the position lies before a later change of the schedule.

        >>> both = WeightedDistributedSampler(range(100), {(0, 50): 1, (50, 100): 1})
        >>> both.reweights = both.reweighted({(0, 50): 1, (50, 100): 0.3}, 1024)
        >>> both.reweights
        [[1024, [1, '3/10']]]
        """
        position = checked_int("position", position, 0, MAX_POSITION)
        if position == 0:
            raise ValueError("reweight must come after the first samples: construct the sampler with these weights")
        if position < (last := max((start for start, _ in self._schedule), default=0)):
            raise ValueError(
                f"position must not lie before the last change of the schedule, at {last}, got {position}: wait until "
                "the run is there, or resume it with another schedule, of which the part for later epochs may change"
            )
        given = self._by_source(weights) if isinstance(weights, list) and self._are_plain(weights) else weights
        *_, stage = self._parse(schedule=[(position, given)], named="reweight").weights
        kept = [one for one in self._reweights if one[0] < position]
        return [*kept, [position, plain_weights(stage)]]

    def _are_plain(self, weights: list[Any]) -> bool:
        """Whether weights are as `reweights` has them: one for each source."""
        return len(weights) == len(self._spec.sources.parts) and all(map(is_plain_weight, weights))

    def _by_source(self, weights: list[Any]) -> Any:
        """Plain weights as they were given for the first stage, by range or by position."""
        sources = self._spec.sources
        keys: list[Any] = [
            (part.begin, part.end) if sources.by_range else place for place, part in enumerate(sources.parts)
        ]
        return dict(zip(keys, map(Fraction, weights), strict=True))

    def _plan(self, reweights: list[list[Any]], spec: MixtureSpec | None = None) -> None:
        """Work out the stages of the schedule and of the changes in mid-run; where one is refused, nothing changes."""
        schedule: Schedule = self._schedule
        if reweights:
            positions = {position for position, _ in reweights}
            kept = [one for one in schedule if one[0] not in positions]
            changes = [(position, self._by_source(own)) for position, own in reweights]
            schedule = sorted([*kept, *changes], key=lambda one: one[0])
        spec = (spec or self._parse(schedule=schedule)).grown(self._growth)
        self._spec = cap_passes(spec, self._max_passes, self.seed)
        self._reweights, self._order = reweights, self._spec.order(self.seed)
        self._fingerprints: dict[int, str] = {}  # by the number of stages that they cover

    def padded(self, start: int | None = None) -> Indices:
        """Return the samples that are repeated so that every rank gets the same number.

        Args:
            start: The position where the iteration begins; by default the start of the latest iteration, or of the
                next one if there was none.

        Returns:
            Dataset indices, shape ``[p]``; the last ranks receive them in the last step. Empty with ``drop_last=True``.

        >>> WeightedDistributedSampler(range(10), {(0, 10): 1}, num_replicas=4, rank=0).padded().size
        2
        """
        positions, inverse = np.unique(self._padding(self._start(start)), return_inverse=True)
        return self._order.at(self.epoch, positions)[inverse]

    def dropped(self, start: int | None = None) -> Indices:
        """Return the samples at the end of the epoch that no rank gets with ``drop_last=True``.

        Args:
            start: As for ``padded``.

        Returns:
            Dataset indices, fewer than there are ranks. Empty with ``drop_last=False``.
        """
        end = min(self._end(self._start(start), self.num_replicas), self.epoch_length)
        return self._order.between(self.epoch, end, self.epoch_length)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iterations. Call it before each epoch, on every rank.

        Without this call every iteration has the same order, as with torch's ``DistributedSampler``. A loaded position
        applies only to its own epoch; ``set_skip_batches`` stays in effect.

        Args:
            epoch: Epoch, >= 0; the sequence must have at most 2**62 positions up to the end of the epoch.
        """
        number, latest = checked_int("epoch", epoch, 0, MAX_POSITION // self.epoch_length - 1), self._cursor.iteration
        if self._cursor.choose(number) and latest is not None:
            latest.left_at = latest.position()

    def set_skip_batches(self, num_skip_batches: int, micro_batch_size: int) -> None:
        """Skip the batches that this rank has already received, in the next iteration only.

        Later iterations are complete again. The call replaces a loaded position.

        Args:
            num_skip_batches: Number of batches to skip, counted from the beginning of the epoch.
            micro_batch_size: Number of samples in one batch of one rank.

        Raises:
            ValueError: If the epoch has fewer batches. If the number of ranks is not known yet, the next iteration
                raises this error.

        >>> sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
        >>> sampler.set_skip_batches(2, micro_batch_size=4)
        >>> sampler.remaining, len(sampler), len(list(sampler)), len(list(sampler))
        (2, 10, 2, 10)
        """
        count = checked_int("num_skip_batches", num_skip_batches, 0)
        size = checked_int("micro_batch_size", micro_batch_size, 1)
        if self._ranks.num_replicas is None or self._ranks.rank is not None:
            self._skipped(count, size)  # otherwise the rank may still come from the process group
        self._skip = count, size
        self._cursor.go_to(self.epoch, 0)

    def state_dict(self, position: int | None = None) -> State:
        """Return the state for a resume.

        Args:
            position: Number of samples of this epoch consumed so far, all ranks together: finished steps times the
                samples of one step on all ranks. By default the position of the latest iteration. Pass it if a loader
                with workers prefetches samples and does not track the sampler's states itself.

        Raises:
            ValueError: If the position is beyond the epoch.

        >>> sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
        >>> indices = iter(sampler)
        >>> [next(indices) for _ in range(4)] == sampler.take(0, 4).tolist()
        True
        >>> sampler.state_dict()["position"], sampler.state_dict(position=8)["position"]
        (4, 8)
        """
        if position is None:
            position = self.position
        else:
            position = checked_int("position", position, 0, self.epoch_length + self.num_replicas - 1)
            position = min(position, self.epoch_length)
        return State(
            version=STATE_VERSION,
            seed=self.seed,
            epoch=self.epoch,
            position=position,
            fingerprint=self._fingerprint_of(self._order.mixture.stages_before(self.epoch, position)),
            mixture=self.mixture,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], accept: Collection[str] = ()) -> None:
        """Resume from a state: the next iteration yields the rest of its epoch. Nothing is replayed.

        The number of ranks may differ from that of the saved run; every rank then takes its part of the rest. After a
        state saved at the end of an epoch, the next iteration is empty. If ``set_epoch`` has chosen an epoch that was
        not iterated yet, a state of an older epoch is ignored, because loaders may load a state as late as in
        ``iter()``.

        Args:
            state_dict: The result of ``state_dict``.
            accept: ``{"data"}`` accepts data that grew, by samples of the last source or by sources after it.
                The state must be of the beginning or the end of an epoch. From there on the weights and options of this
                sampler hold. A pass that is under way ends with the old samples; later passes have all of them.

        Raises:
            TypeError: If ``state_dict`` is not a mapping, or a value has the wrong type.
            ValueError: If ``state_dict`` was saved with another seed, another dataset or other options, or grown data
                are accepted inside an epoch.
        """
        if isinstance(accept, str) or not set(accept) <= {DATA}:
            raise ValueError(f"accept must hold the names of what may differ, here {{'data'}}, got {shown(accept)}")
        name, keys = type(self).__name__, State.__required_keys__
        check_state(name, state_dict, keys - {"mixture"}, self.seed, _FINGERPRINT)
        check_keys("state", state_dict, keys, name)
        epoch = checked_int("state['epoch']", state_dict["epoch"], 0, MAX_POSITION // self.epoch_length - 1)
        position = checked_int("state['position']", state_dict["position"], 0)
        saved, recorded = state_dict["fingerprint"], state_dict["mixture"]
        now = self.at_mixture(self.continuing(recorded) or self.mixture)
        if DATA in accept and recorded is not None and not self._has_sources_of(recorded):
            before = self.at_mixture(recorded)
            _check_fingerprint(saved, before, epoch, position)
            if not before._is_over(position) and position:
                raise ValueError(
                    "accept={'data'} needs a state of the beginning or the end of an epoch, got "
                    f"position={position} of {before.epoch_length}: resume with the data of the state, and let them "
                    "grow at the end of its epoch"
                )
            now.mixture = self.grown(recorded, epoch + (position > 0))
            position = now.epoch_length if position else 0  # what drop_last leaves out does not come
        else:
            self._refuse_growth_by_sample(saved, recorded, accept)
            _check_fingerprint(saved, now, epoch, position)
        checked_int("state['position']", position, 0, self.epoch_length)
        latest = self._cursor.iteration
        if self._cursor.resume(epoch, position):
            self._skip = None
            self.mixture = now.mixture
            if latest is not None:
                latest.left_at = latest.position()

    def asked_shares(self) -> tuple[str, dict[str, float]]:
        """Return what shares refer to, ``"sample"`` or ``"token"``, and each source's requested share of this epoch.

        A loader shows them beside the shares that it delivered.

        >>> WeightedDistributedSampler(range(6), {(0, 2): 3, (2, 6): 1}, num_replicas=1, rank=0).asked_shares()
        ('sample', {'0-2': 0.6, '2-6': 0.4})
        """
        epoch = max(self.epoch, self.first_epoch)
        per = "sample" if self._spec.means is None else "token"
        return per, asked_of_epoch(self._spec, self._order.mixture.origin(epoch), epoch)

    def report(self) -> MixtureReport:
        """Count the requested and delivered samples of the current epoch, by source; iterations are not affected.

        Where the data grew after this epoch, it is over, and the report is of the next one, `first_epoch`.

        With ``per="token"`` this computes the order of the epoch, to find the largest deviation.
        """
        end = min(self._end(0, self.num_replicas), self.epoch_length)
        return mixture_report(
            self._spec,
            self._order,
            np.sort(self._padding(0)),
            np.arange(end, self.epoch_length),
            epoch=max(self.epoch, self.first_epoch),
            num_replicas=self.num_replicas,
        )

    def plot(self, epochs: int | None = None) -> Figure:
        """Plot the share of each source over the run: by position, with schedules and caps.

        Args:
            epochs: The epochs to show; by default one more than the last change of the weights.

        Returns:
            A matplotlib figure, for ``figure.savefig(path)``; it needs the ``plot`` extra.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        if epochs is not None:
            epochs = checked_int("epochs", epochs, 1)
        return plot_run(self._spec, epochs)

    def _padding(self, start: int) -> Indices:
        """The positions that an iteration from ``start`` on repeats."""
        return np.arange(self.epoch_length, self._end(start, self.num_replicas)) % self.epoch_length

    def _dealt(self, epoch: int, start: int, stop: int, num_replicas: int, rank: int) -> Indices:
        """One rank's samples, one for each step.

        The samples of a step are dealt by source, from another rank on in each step. The turns follow the golden ratio,
        so that no weights resonate with them: each rank sees the mixture, almost as smooth as all ranks together.
        """
        begins = np.arange(start, stop, num_replicas)
        if num_replicas == 1:
            return self._order.at(epoch, begins)
        turns = (begins // num_replicas).view(np.uint64) * _GOLDEN_RATIO + fold_in(self.seed, DEALS, epoch)
        full = begins + num_replicas <= self.epoch_length  # the padding of the last step belongs to the last ranks
        places = np.where(full, (rank + below(turns, num_replicas)) % num_replicas, rank)
        return self._order.dealt(epoch, begins, num_replicas, places)

    def _next_start(self) -> int:
        """Where the next iteration begins."""
        if self._skip is not None:
            return self._skipped(*self._skip)  # computed late, because the number of ranks may not be known before
        return self._cursor.start

    def _start(self, start: int | None) -> int:
        if start is not None:
            return checked_int("start", start, 0, self.epoch_length)
        return self._next_start() if self._cursor.iteration is None else int(self._cursor.iteration.start)

    def _skipped(self, count: int, size: int) -> int:
        if count > (batches := -(-len(self) // size)):
            raise ValueError(
                f"num_skip_batches={count} is more than an epoch has: {len(self)} samples on this rank are "
                f"{batches} batches of micro_batch_size={size}. Call set_epoch for the epochs already done "
                "and skip only within the current one"
            )
        return min(count * size * self.num_replicas, self.epoch_length)

    def _end(self, start: int, num_replicas: int) -> int:
        """Where an iteration from ``start`` on stops, after the same number of samples on every rank."""
        if self.drop_last and self.epoch_length < num_replicas:
            raise ValueError(
                f"drop_last=True leaves nothing: an epoch has {self.epoch_length} draws for {num_replicas} ranks. "
                "Use drop_last=False, a larger epoch_length or fewer ranks"
            )
        rest = max(0, self.epoch_length - start)
        steps = rest // num_replicas if self.drop_last else -(-rest // num_replicas)
        return start + steps * num_replicas  # positions beyond the epoch's end mean its first positions

    def _refuse_growth_by_sample(self, saved: str, recorded: object, accept: Collection[str]) -> None:
        length = int(saved[:_LENGTH_DIGITS], 16)
        if DATA in accept and length != self._spec.length and (recorded is None or self._recorded is None):
            raise StateMismatchError(
                f"state was saved with a dataset of {length} samples, this one has {self._spec.length}, and a mixture "
                "with one weight for each sample cannot grow",
                "resume with the data of the saved run, or give weights of datasets or ranges from the beginning",
                [DATA],
            )

    def _is_over(self, position: int) -> bool:
        """Whether no samples are left of an epoch at a position, beside those that ``drop_last`` leaves out."""
        length = self.epoch_length
        if position >= length or not self.drop_last:
            return position == length
        return self._end(position, self.num_replicas) == position

    def _fingerprint_of(self, stages: int) -> str:
        if stages not in self._fingerprints:
            weights = [(stage.start, stage.weights) for stage in self._spec.stages[:stages]]
            growth = [] if self._growth is None else [self._growth]
            self._fingerprints[stages] = (
                f"{self._spec.length:0{_LENGTH_DIGITS}x}"
                + self._data
                + digest(weights, self.epoch_length, self.seed, self.drop_last, self._spec.identity(), *growth)
            )
        return self._fingerprints[stages]

    def __getstate__(self) -> dict[str, Any]:
        """A copy continues from this object's ``state_dict()``."""
        cursor = copy(self._cursor)
        if self._cursor.iteration is not None:
            cursor.go_to(self.epoch, self.position)
        return {name: value for name, value in self.__dict__.items() if name != "_order"} | {"_cursor": cursor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = self._spec.order(self.seed)  # its tables need not travel


def _check_fingerprint(saved: str, own: WeightedDistributedSampler, epoch: int, position: int) -> None:
    """Refuse the fingerprint of a state that a sampler would not have saved there."""
    stages = own._order.mixture.stages_before(epoch, min(position, own.epoch_length))
    faults = {
        "length": f"a dataset of {int(saved[:_LENGTH_DIGITS], 16)} samples, this one has {own._spec.length}",
        "data": "other data: the dataset's fingerprint or the sources' ranges differ",
        "options": "other options: weights, semantics, sizes, epoch_length, drop_last or an earlier part of the "
        "schedule differ",
    }
    check_fingerprint(saved, own._fingerprint_of(stages), _FINGERPRINT, faults)


def _are_prefixes(old: WeightedSources, new: WeightedSources) -> bool:
    """Whether sources are others with more samples after them, and more sources."""
    if old.by_range != new.by_range or new.members is not None or len(old.parts) > len(new.parts):
        return False
    ends = dict(new.ranges) if new.by_range else {}
    pairs = [(begin, ends.get(begin, -1)) for begin, _ in old.ranges] if new.by_range else new.ranges
    return all(
        begin == other and end <= other_end for (begin, end), (other, other_end) in zip(old.ranges, pairs, strict=False)
    )


def _some(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(str, ranges[:5])) + ", ..." * (len(ranges) > 5)
