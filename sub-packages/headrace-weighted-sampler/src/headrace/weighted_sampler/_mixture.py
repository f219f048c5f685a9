"""The samples and sources at each position of a mixture: stages of a schedule, epochs, and passes over the sources.

Epochs and the stages of a schedule are parts of one endless sequence. A position is worked out alone: nothing is
replayed, and no state is carried from position to position.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from headrace.weighted_sampler._arguments import MAX_POSITION
from headrace.weighted_sampler._growth import Growth, source_epochs
from headrace.weighted_sampler._interleave import Assignment, Interleave, by_source
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.random import fold_in
from headrace.weighted_sampler.schedule import Stage, stage_at, stages_before

STREAMS, DEALS = 3, 4  # purposes of derived keys


# -- The sequence --------------------------------------------------------------------------------------------------


class Mixture:
    """Sources by position, for the stages of a schedule.

    With a ``key``, sources come at random places (see ``Interleave``). With ``every_epoch`` the stages' positions count
    from the beginning of each epoch. ``first`` has the draws of each source before the first stage, 0 by default.

    >>> mixture = Mixture([Stage(0, (2, 1))], epoch_length=6, seed=0)
    >>> {source: sorted(draws.tolist()) for source, where, draws in mixture.assign(1, np.arange(6))}
    {0: [4, 5, 6, 7], 1: [2, 3]}
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        epoch_length: int,
        seed: int,
        *,
        key: int | None = None,
        every_epoch: bool = False,
        first: Sequence[int] | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.epoch_length = epoch_length
        self.seed = seed
        self.num_sources = len(stages[0].weights)
        self._sequences = [Interleave(stage.weights, key) for stage in stages]
        self._every_epoch = every_epoch
        ends = [stage.start for stage in self.stages[1:]] + [epoch_length] * every_epoch
        self._bases = [np.array(first or [0] * self.num_sources, np.int64)]  # each source's draws before each stage
        for number, end in enumerate(ends):
            self._bases.append(self._counts(number, end))

    def assign(self, epoch: int, offsets: Indices) -> Iterator[Assignment]:
        """Assign ascending positions of an epoch, shape ``[m]``, to sources; yields each source once per stage."""
        begin, origin = epoch * self.epoch_length, self.origin(epoch)
        cuts = [begin, *(origin + start for start in self.changes(epoch)), begin + self.epoch_length]
        for start, stop in pairwise(cuts):
            low, high = (int(at) for at in np.searchsorted(offsets, (start - begin, stop - begin)))
            if low == high:
                continue
            number = self.stage_at(start - origin)
            sources, draws = self._sequences[number].assign(
                offsets[low:high] + (begin - origin - self.stages[number].start)
            )
            draws += (self._bases[number] + self._earlier(epoch))[sources]
            for source, where, own in by_source(sources, draws, self.num_sources):
                yield source, where + low, own

    def assign_places(self, epoch: int, begins: Indices, length: int, places: Indices) -> Iterator[Assignment]:
        """Assign one draw of each stretch of positions to sources; a stretch's draws are sorted by source.

        Args:
            epoch: The epoch.
            begins: Ascending first positions of the stretches, shape ``[m]``.
            length: Positions of a stretch.
            places: Which of the sorted draws, 0 to ``length - 1``, shape ``[m]``. A stretch that contains the end of
                a stage or epoch is not sorted.
        """
        origin, stage = self.origin(epoch), np.empty((2, len(begins)), np.int64)
        starts = [stage.start for stage in self.stages]
        for row, positions in zip(stage, (begins, begins + length - 1), strict=True):
            row[:] = np.searchsorted(starts, positions + (epoch * self.epoch_length - origin), side="right") - 1
        whole = (stage[0] == stage[1]) & (begins + length <= self.epoch_length)
        for number in np.unique(stage[0][whole]).tolist():
            where = np.flatnonzero(whole & (stage[0] == number))
            shift = epoch * self.epoch_length - origin - self.stages[number].start
            sources, draws = self._sequences[number].assign_places(begins[where] + shift, length, places[where])
            draws += (self._bases[number] + self._earlier(epoch))[sources]
            for source, at, own in by_source(sources, draws, self.num_sources):
                yield source, where[at], own
        rest = np.flatnonzero(~whole)
        positions = (begins[rest] + places[rest]) % self.epoch_length  # beyond its end is the epoch's beginning
        order = np.argsort(positions, kind="stable")
        for source, at, own in self.assign(epoch, positions[order]):
            yield source, rest[order[at]], own

    def draws_before(self, epoch: int) -> list[int]:
        """Count each source's draws before an epoch."""
        position = epoch * self.epoch_length - self.origin(epoch)
        counts: list[int] = (self._counts(self.stage_at(position), position) + self._earlier(epoch)).tolist()
        return counts

    def origin(self, epoch: int) -> int:
        """The position from which the stages of an epoch count."""
        return epoch * self.epoch_length * self._every_epoch

    def changes(self, epoch: int) -> list[int]:
        """The starts of stages inside an epoch, relative to ``origin``."""
        begin = epoch * self.epoch_length - self.origin(epoch)
        return [stage.start for stage in self.stages if begin < stage.start < begin + self.epoch_length]

    def stage_at(self, position: int) -> int:
        """Return the number of the stage that contains a position, relative to ``origin``."""
        return stage_at(self.stages, position)

    def stages_before(self, epoch: int, position: int) -> int:
        """Count the stages that an epoch's order before a position depends on."""
        if self._every_epoch:
            return len(self.stages)
        return stages_before(self.stages, epoch * self.epoch_length + position)

    def leaves_at(self, number: int, limits: Mapping[int, int]) -> int | None:
        """The first position at which a source of a stage reaches its limit of draws; None if none has one."""
        found = []
        for source, limit in limits.items():
            low, high = self.stages[number].start, MAX_POSITION
            while high - low > 1:
                middle = (low + high) // 2
                reached = int(self._counts(number, middle)[source]) >= limit
                low, high = (low, middle) if reached else (middle, high)
            found.append(high)
        return min(found, default=None)

    def counts_at(self, number: int, position: int) -> list[int]:
        """Each source's draws before a position of a stage, or before its end."""
        counts: list[int] = self._counts(number, position).tolist()
        return counts

    def _earlier(self, epoch: int) -> Indices:
        """Each source's draws before the origin of an epoch."""
        return self._bases[-1] * (epoch * self._every_epoch)

    def _counts(self, stage: int, position: int) -> Indices:
        offset = np.array([position - self.stages[stage].start])
        counts: Indices = self._bases[stage] + self._sequences[stage].counts(offset)[0]
        return counts


# -- Samples -------------------------------------------------------------------------------------------------------

_BLOCK = 2**15  # positions computed at a time: few enough to stay in the processor's cache
_BLOCK_PER_SOURCE = 64  # with thousands of sources, larger blocks
_STREAM_BLOCK = 1024  # positions of a stream


class SourceOrder(Protocol):
    """The source of each position, by draws (``Mixture``) or by tokens (``TokenMixture``)."""

    seed: int
    num_sources: int

    def assign(self, epoch: int, offsets: Indices) -> Iterator[Assignment]:
        """Assign ascending positions of an epoch, shape ``[m]``, to sources."""

    def assign_places(self, epoch: int, begins: Indices, length: int, places: Indices) -> Iterator[Assignment]:
        """Assign one draw of each stretch of positions to sources; a stretch's draws are sorted by source."""

    def draws_before(self, epoch: int) -> list[int]:
        """Count each source's draws before an epoch."""

    def origin(self, epoch: int) -> int:
        """The position from which the stages of an epoch count."""

    def changes(self, epoch: int) -> list[int]:
        """The starts of stages inside an epoch, relative to ``origin``."""

    def stage_at(self, position: int) -> int:
        """Return the number of the stage that contains a position, relative to ``origin``."""

    def stages_before(self, epoch: int, position: int) -> int:
        """Count the stages that an epoch's order before a position depends on."""

    def leaves_at(self, number: int, limits: Mapping[int, int]) -> int | None:
        """The first position at which a source of a stage reaches its limit of draws; None if none has one."""

    def counts_at(self, number: int, position: int) -> list[int]:
        """Each source's draws before a position of a stage, or before its end."""


class SampleOrder:
    """Dataset indices at any position of a mixture; ``ranges`` refer to indices, or to places in ``members``.

    A pure function of its arguments; the tables cached between calls only make it faster. ``growth`` says where the
    sources grew; the order before that is another mixture's.
    """

    def __init__(
        self,
        mixture: SourceOrder,
        ranges: Sequence[tuple[int, int]],
        members: Indices | None,
        growth: Growth | None = None,
    ) -> None:
        self.mixture = mixture
        self._ranges = tuple(ranges)
        self._members = members
        self._growth = growth
        self._source_epochs = source_epochs(mixture.seed, self._ranges, growth)
        self.block = max(_BLOCK, _BLOCK_PER_SOURCE * mixture.num_sources)  # the best number to compute at a time

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Return the dataset indices at ascending positions of an epoch, shape ``[m]``."""
        self._refuse_before(epoch)
        found = np.empty(len(positions), np.int64)
        for source, where, draws in self.mixture.assign(epoch, positions):
            found[where] = self._source_epochs[source](draws) + self._ranges[source][0]
        return found if self._members is None else self._members[found]

    def dealt(self, epoch: int, begins: Indices, length: int, places: Indices) -> Indices:
        """Return one dataset index of each stretch of positions; see ``Mixture.assign_places``."""
        self._refuse_before(epoch)
        found = np.empty(len(begins), np.int64)
        for source, where, draws in self.mixture.assign_places(epoch, begins, length, places):
            found[where] = self._source_epochs[source](draws) + self._ranges[source][0]
        return found if self._members is None else self._members[found]

    def between(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the dataset indices at positions ``start .. stop - 1`` of an epoch."""
        found = np.empty(stop - start, np.int64)
        for low in range(start, stop, self.block):
            high = min(low + self.block, stop)
            found[low - start : high - start] = self.at(epoch, np.arange(low, high))
        return found

    def _refuse_before(self, epoch: int) -> None:
        if self._growth is not None and epoch < self._growth.epoch:
            raise ValueError(
                f"epoch must be at least {self._growth.epoch}, where the data of this mixture grew, got {epoch}: "
                "construct a mixture anew to begin before that"
            )

    def __getstate__(self) -> dict[str, Any]:
        passes = source_epochs(self.mixture.seed, self._ranges, self._growth)  # without the tables
        return {**self.__dict__, "_source_epochs": passes}


class StreamOrder:
    """The source at every position of one stream: a pure function of stages, seed, epoch, rank and worker.

    After some sources were ``dropped`` and have weight 0, positions count from the latest drop.

    >>> order = StreamOrder([Stage(0, (3, 1))], seed=0, epoch=0, rank=0, worker=0)
    >>> sum(order.source_at(position) for position in range(1000))
    250
    """

    def __init__(
        self, stages: Sequence[Stage], seed: int, epoch: int, rank: int, worker: int, dropped: int = 0
    ) -> None:
        key = int(fold_in(seed, STREAMS, epoch, rank, worker, *([dropped] if dropped else []))[0])
        self._mixture = Mixture(stages, MAX_POSITION, seed, key=key)
        self._block = -1
        self._sources: list[int] = []  # of that block, so that a position costs one look-up

    def source_at(self, position: int) -> int:
        """Return the number of the source at a position from 0 to 2**62 - 1."""
        block, place = divmod(position, _STREAM_BLOCK)
        if block != self._block:
            owners = np.empty(_STREAM_BLOCK, np.int64)
            for source, where, _ in self._mixture.assign(0, np.arange(_STREAM_BLOCK) + block * _STREAM_BLOCK):
                owners[where] = source
            self._sources, self._block = owners.tolist(), block
        return self._sources[place]
