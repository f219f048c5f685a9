"""The source of each position of the endless global sequence, in closed form.

The sources are the leaves of a binary tree (Huffman, "A method for the construction of minimum-redundancy codes",
1952, so that frequent sources lie near the root). Of the first ``t`` draws of a node, its heavier child gets
``t * heavy / weight``, rounded to the nearest integer. So every source's count at any position is known without
counting, and is at most about one and a half draws off its share. Epochs and the stages of a schedule are segments of
the one sequence; no state is carried from position to position.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler._arguments import MAX_POSITION
from headrace.weighted_sampler._permutation import (
    WINDOW,
    Indices,
    SourceEpochs,
    WindowPositions,
    derive,
    shuffle_in_windows,
)
from headrace.weighted_sampler.schedule import Stage, stage_at, stages_before

DRAWS, WINDOWS, STREAMS = 1, 2, 3  # purposes of derived keys
MAX_SOURCES = 2**16  # sources are numbered in 16 bits
MAX_PERIOD = 2**31  # the largest sum of integer weights that is kept exactly; above it products exceed 64 bits
_DENSE = 64  # positions count as dense if at least one in 64 is present
_WINDOWS_AT_ONCE = 16  # windows that are renumbered in one call

# A source, the places among the positions where it is drawn, and its draw numbers there, from the sequence's start.
Assignment = tuple[int, Indices, Indices]


def rounded_share(counts: Indices, part: int, total: int) -> Indices:
    """Return ``floor(counts * part / total + 1/2)`` exactly, for counts and part from 0 to total, up to 2**62."""
    if total <= MAX_PERIOD:
        return (counts * part + total // 2) // total
    # The product may need 124 bits, so the counts are taken a few bits at a time, as in long division by hand.
    bits = 63 - total.bit_length() or 1  # of the counts in one step: rest * 2**bits + limb * part < 2**64
    words, quotient, rest = counts.view(np.uint64), np.zeros(len(counts), np.uint64), np.zeros(len(counts), np.uint64)
    for shift in reversed(range(0, total.bit_length(), bits)):
        limb = (words >> np.uint64(shift)) & np.uint64(2**bits - 1)
        rest = (rest << np.uint64(bits)) + limb * np.uint64(part)
        if shift == 0:
            rest += np.uint64(total // 2)
        step = rest // np.uint64(total)
        rest -= step * np.uint64(total)
        quotient = (quotient << np.uint64(bits)) + step
    return quotient.view(np.int64)


# -- The tree ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A source, or two nodes that share its draws."""

    weight: int  # draws in one period of the whole tree
    source: int = -1
    children: tuple["Node", ...] = ()  # the heavier and the lighter


def build_tree(weights: Sequence[int]) -> Node:
    """Build the tree of integer weights; its root's weight, at most 2**62, is the period of the interleave."""
    # The second entry breaks ties between equal weights, so that the tree is the same everywhere.
    heap = [(weight, source, Node(weight, source)) for source, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, light), (_, order, heavy) = heapq.heappop(heap), heapq.heappop(heap)
        joined = Node(light.weight + heavy.weight, children=(heavy, light))
        heapq.heappush(heap, (joined.weight, order, joined))
    return heap[0][2]


def draws_before(root: Node, positions: Indices, sources: int) -> Indices:
    """Count each source's draws before some positions, ``[m]``; returns ``[m, sources]``.

    >>> draws_before(build_tree([2, 1]), np.array([0, 1, 2, 3, 6]), sources=2).tolist()
    [[0, 0], [1, 0], [1, 1], [2, 1], [4, 2]]
    """
    counts = np.zeros((len(positions), sources), np.int64)
    periods = positions // root.weight
    waiting = [(root, positions - periods * root.weight)]
    while waiting:
        node, own = waiting.pop()
        if node.children:
            heavy, light = node.children
            to_heavy = rounded_share(own, heavy.weight, node.weight)
            waiting += [(heavy, to_heavy), (light, own - to_heavy)]
        else:
            counts[:, node.source] = own + periods * node.weight
    return counts


# -- Assigning positions to sources --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A part of the sequence within one epoch and one stage."""

    root: Node
    length: int
    first: int  # where the segment begins in the stage
    key: int
    bases: Indices  # each source's draws before the stage, shape [s]
    sizes: Indices | None = None  # samples of each source, shape [s]; None without epochs of sources

    def assign(self, offsets: Indices) -> Iterator[Assignment]:
        """Assign ascending positions within the segment to sources."""
        sources = len(self.bases)
        moved = shuffle_in_windows(offsets, self.length, self.key)
        begins = moved.windows * WINDOW
        bounds = np.concatenate([begins, np.minimum(begins + WINDOW, self.length)])
        counts = draws_before(self.root, self.first + bounds, sources) + self.bases
        before, after = counts.reshape(2, len(begins), sources)
        window_counts = after - before
        # Before it is shuffled, a window holds its draws of source 0, then those of source 1, and so on.
        owners = _owners(moved, window_counts)
        offsets_of = before - np.cumsum(window_counts, axis=1) + window_counts  # draw number minus place
        draws = offsets_of.ravel()[moved.rows * sources + owners] + moved.places
        if self.sizes is not None:
            self._renumber(self.sizes, offsets, moved, before, window_counts, owners, draws)
        yield from _by_source(owners, draws, sources)

    def _renumber(
        self,
        sizes: Indices,
        offsets: Indices,
        moved: WindowPositions,
        before: Indices,
        window_counts: Indices,
        owners: Indices,
        draws: Indices,
    ) -> None:
        """Renumber draws by position, in place, where a pass of a source ends, so that its next pass follows it."""
        last = before + np.maximum(window_counts, 1) - 1
        crossing = ((before // sizes != last // sizes) & (sizes > 1)).any(axis=1)
        rows = np.flatnonzero(crossing)
        for low in range(0, len(rows), _WINDOWS_AT_ONCE):
            chosen = rows[low : low + _WINDOWS_AT_ONCE]
            is_chosen = np.zeros(len(crossing), bool)
            is_chosen[chosen] = True
            own = np.flatnonzero(is_chosen[moved.rows])
            place = np.searchsorted(chosen, moved.rows[own]) * WINDOW + (offsets[own] & (WINDOW - 1))
            earlier = self._earlier_draws(moved.windows[chosen], window_counts[chosen])
            draws[own] = before[moved.rows[own], owners[own]] + earlier[place]

    def _earlier_draws(self, windows: Indices, window_counts: Indices) -> Indices:
        """For each position of complete windows, the number of earlier positions of its window with its source."""
        offsets = (windows[:, None] * WINDOW + np.arange(WINDOW)).ravel()
        offsets = offsets[offsets < self.length]
        rows = np.searchsorted(windows, offsets // WINDOW)
        moved = WindowPositions(windows, rows, shuffle_in_windows(offsets, self.length, self.key).places)
        groups = rows * window_counts.shape[1] + _owners(moved, window_counts)
        order = np.argsort(groups, kind="stable")
        begins = np.flatnonzero(np.diff(groups[order], prepend=-1))
        earlier = np.empty(len(offsets), np.int64)
        earlier[order] = np.arange(len(offsets)) - np.repeat(begins, np.diff(begins, append=len(offsets)))
        return earlier


def _owners(moved: WindowPositions, window_counts: Indices) -> Indices:
    """The source of each position: the source whose share of the window contains its place."""
    windows, sources = window_counts.shape
    at = moved.rows * WINDOW + moved.places
    if windows * WINDOW <= len(at) * _DENSE:
        numbers = np.tile(np.arange(sources, dtype=np.uint16), windows)
        return np.take(np.repeat(numbers, window_counts.ravel()), at).astype(np.int64)
    bounds = np.cumsum(window_counts, axis=1) + np.arange(windows)[:, None] * WINDOW
    owners: Indices = np.searchsorted(bounds.ravel(), at, side="right") - moved.rows * sources
    return owners


def _by_source(owners: Indices, draws: Indices, sources: int) -> Iterator[Assignment]:
    order = np.argsort(owners.astype(np.uint16), kind="stable")
    counts: NDArray[np.int64] = np.bincount(owners, minlength=sources)
    ends = np.cumsum(counts)
    for source in np.flatnonzero(counts).tolist():
        where = order[ends[source] - counts[source] : ends[source]]
        yield source, where, draws[where]


# -- The sequence --------------------------------------------------------------------------------------------------


class Mixture:
    """Sources by position, for the stages of a schedule; windows restart with every epoch and every stage.

    With ``sizes``, the samples of each source, an epoch of a source ends before its next one begins. With
    ``every_epoch`` the stages' positions count from the beginning of each epoch.

    >>> mixture = Mixture([Stage(0, (2, 1))], epoch_length=6, seed=0)
    >>> {source: sorted(draws.tolist()) for source, where, draws in mixture.assign(1, np.arange(6))}
    {0: [4, 5, 6, 7], 1: [2, 3]}
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        epoch_length: int,
        seed: int,
        sizes: Sequence[int] | None = None,
        *,
        every_epoch: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.epoch_length = epoch_length
        self.seed = seed
        self.num_sources = len(stages[0].weights)
        self._sizes = None if sizes is None else np.maximum(sizes, 1)
        self._trees = [build_tree(stage.weights) for stage in stages]
        self._every_epoch = every_epoch
        ends = [stage.start for stage in self.stages[1:]] + [epoch_length] * every_epoch
        self._bases = [np.zeros(self.num_sources, np.int64)]  # each source's draws before each stage
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
            stage = self.stage_at(start - origin)
            segment = Segment(
                root=self._trees[stage],
                length=stop - start,
                first=start - origin - self.stages[stage].start,
                key=int(derive(self.seed, WINDOWS, start)[0]),
                bases=self._bases[stage] + self._earlier(epoch),
                sizes=self._sizes,
            )
            for source, where, draws in segment.assign(offsets[low:high] - (start - begin)):
                yield source, where + low, draws

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
        begin = epoch * self.epoch_length
        return stages_before(self.stages, begin + position, begin, begin + self.epoch_length)

    def _earlier(self, epoch: int) -> Indices:
        """Each source's draws before the origin of an epoch."""
        return self._bases[-1] * (epoch * self._every_epoch)

    def _counts(self, stage: int, position: int) -> Indices:
        offset = np.array([position - self.stages[stage].start])
        counts: Indices = self._bases[stage] + draws_before(self._trees[stage], offset, self.num_sources)[0]
        return counts


# -- Samples -------------------------------------------------------------------------------------------------------

_BLOCK = 2**15  # positions computed at a time: few enough to stay in the processor's cache
_BLOCK_PER_SOURCE = 64  # with thousands of sources, larger blocks
_MAX_COUNTS = 2**21  # counts, of each source in each window, that a block needs at most
_MAX_SPAN = 2**22  # positions that a block spans at most, those of other ranks included


class SampleOrder:
    """Dataset indices at any position of a mixture; ``ranges`` refer to indices, or to places in ``members``.

    A pure function of its arguments; the tables cached between calls only make it faster.
    """

    def __init__(self, mixture: Mixture, ranges: Sequence[tuple[int, int]], members: Indices | None) -> None:
        self.mixture = mixture
        self._ranges = tuple(ranges)
        self._members = members
        self._source_epochs = self._make_source_epochs()
        self._block = max(_BLOCK, _BLOCK_PER_SOURCE * mixture.num_sources)

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Return the dataset indices at ascending positions of an epoch, shape ``[m]``."""
        found = np.empty(len(positions), np.int64)
        for source, where, draws in self.mixture.assign(epoch, positions):
            found[where] = self._source_epochs[source](draws) + self._ranges[source][0]
        return found if self._members is None else self._members[found]

    def between(self, epoch: int, start: int, stop: int) -> Indices:
        """Return the dataset indices at positions ``start .. stop - 1`` of an epoch."""
        found = np.empty(stop - start, np.int64)
        step = self.block(num_replicas=1)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            found[low - start : high - start] = self.at(epoch, np.arange(low, high))
        return found

    def block(self, num_replicas: int) -> int:
        """The best number of positions of one rank to compute at a time."""
        windows = max(1, _MAX_COUNTS // self.mixture.num_sources)
        return max(1, min(self._block, _MAX_SPAN // num_replicas, windows * max(1, WINDOW // num_replicas)))

    def _make_source_epochs(self) -> list[SourceEpochs]:
        begins, ends = np.array(self._ranges, np.uint64).T  # in the keys, so that other sources change nothing
        keys = derive(self.mixture.seed, DRAWS, begins, ends).tolist()
        return [SourceEpochs(end - begin, key) for (begin, end), key in zip(self._ranges, keys, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source_epochs": self._make_source_epochs()}  # without the tables


class StreamOrder:
    """The source at every position of one stream: a pure function of stages, seed, epoch, rank and worker.

    After some sources were ``dropped`` and have weight 0, positions count from the latest drop.

    >>> order = StreamOrder([Stage(0, (3, 1))], seed=0, epoch=0, rank=0, worker=0)
    >>> sum(order.source_at(position) for position in range(1024))
    256
    """

    def __init__(
        self, stages: Sequence[Stage], seed: int, epoch: int, rank: int, worker: int, dropped: int = 0
    ) -> None:
        key = int(derive(seed, STREAMS, epoch, rank, worker, *([dropped] if dropped else []))[0])
        self._mixture = Mixture(stages, MAX_POSITION, key)
        self._window = -1
        self._sources: list[int] = []  # of that window, so that a position costs one look-up

    def source_at(self, position: int) -> int:
        """Return the number of the source at a position from 0 to 2**62 - 1."""
        window, place = divmod(position, WINDOW)
        if window != self._window:
            owners = np.empty(WINDOW, np.int64)
            for source, where, _ in self._mixture.assign(0, np.arange(window * WINDOW, (window + 1) * WINDOW)):
                owners[where] = source
            self._sources, self._window = owners.tolist(), window
        return self._sources[place]
