"""The source of each draw where shares are in tokens: exact in integers, at every prefix.

The sources are the leaves of a binary tree. A node merges its two children by virtual time: a draw's time is the tokens
of its child before it, plus half of its own, over the child's weight. This is fair queueing of packets with the
two flows of each node (Bennett and Zhang, "WF2Q: worst-case fair weighted fair queueing", INFOCOM 1996), so of any
prefix of a node each child has its share to within half of the longest sample. A leaf is off by the sum over its
ancestors of half a sample times its share of them; the tree is chosen to make the largest such sum small (``bound``).
One flat merge of all sources would be simpler, but with many sources it is off by hundreds of samples.

Nothing is replayed. A node's draws around any point of its token axis follow from its children's around the same
virtual time, and a leaf finds them in the cumulated sizes of one pass.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from headrace.weighted_sampler._interleave import Assignment, by_source
from headrace.weighted_sampler._permutation import MAX_SORTED, Indices, SourceEpochs
from headrace.weighted_sampler.schedule import Stage, stage_at

UNIT = 2  # parts of a token, so that the middle of a sample is an integer
MAX_SIZE = 2**32  # tokens of the longest sample: in a window, sums and products of units then stay below 2**62
_FAR = 2**62  # units; beyond every draw of a window
_CHUNK = 2**12  # draws between two cumulated sizes that are kept
_MAX_PASSES = 4  # passes of a source whose cumulated sizes are kept
_MAX_CHUNKS = 8  # chunks of a source whose sizes are kept one by one: 256 KiB
_WINDOW = 2**13  # draws that are merged at a time, on average
_WINDOW_PER_SOURCE = 2**9  # with many sources, larger windows
_MAX_WINDOWS = 4
_WALKED = 2**16  # draws that a report looks at in one step
_LONGEST = 8  # samples of the longest kind that fit a window, at least
_MAX_UNEVEN = 2**17  # a longest sample in mean draws: a window then has a million draws, and takes a second or two
_MAX_STEP = 2**58  # units of a window
_MAX_INSERTED = 16  # sources whose places in the tree are searched; lighter ones are grouped before


# -- The tree ------------------------------------------------------------------------------------------------------


@dataclass
class TokenNode:
    """A source, or two nodes that share its tokens."""

    weight: int
    source: int = -1
    children: tuple["TokenNode", ...] = ()
    # Of the leaves, (weight, sum over the leaf and its ancestors up to this node of weight / their weight): of those
    # that can still become the worst.
    costs: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        below = [(leaf, cost + leaf / self.weight) for child in self.children for leaf, cost in child.costs]
        self.costs = _worst(below) if self.children else [(self.weight, 1.0)]


def _worst(costs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep the leaves for which no heavier one costs as much."""
    kept: list[tuple[int, float]] = []
    for leaf, cost in sorted(costs, reverse=True):
        if not kept or cost > kept[-1][1]:
            kept.append((leaf, cost))
    return kept


def token_tree(weights: Sequence[int]) -> TokenNode:
    """Build the tree of integer weights that keeps every source near its share of the tokens.

    >>> round(bound(token_tree([7, 2, 1])), 3)
    0.833
    """
    nodes = [TokenNode(weight, source) for source, weight in enumerate(weights) if weight]
    nodes.sort(key=lambda node: (-node.weight, node.source))
    light = nodes[_MAX_INSERTED:]  # grouped with sources of like weights, level by level
    while len(light) > 1:
        groups = [_inserted(light[low : low + _MAX_INSERTED]) for low in range(0, len(light), _MAX_INSERTED)]
        light = sorted(groups, key=lambda node: -node.weight)
    return _inserted([*nodes[:_MAX_INSERTED], *light])


def bound(root: TokenNode) -> float:
    """The largest possible deviation of a source from its share, in longest samples."""
    return max((cost for child in root.children for _, cost in child.costs), default=1.0) / 2


def _inserted(nodes: Sequence[TokenNode]) -> TokenNode:
    """Insert nodes into a tree one by one, the heaviest first, each where the worst leaf stays best."""
    root, *others = sorted(nodes, key=lambda node: -node.weight)
    for node in others:
        best = min(_places(root, node, 0.0, 0), key=lambda place: place[:2])
        root = _insert(root, node, best[2])
    return root


def _places(
    at: TokenNode, new: TokenNode, above: float, depth: int, path: tuple[int, ...] = ()
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """(Cost of the worst leaf of both, depth, path) for each place where ``new`` can become a sibling.

    ``above`` is the sum of 1 / weight over the ancestors, the root excluded, with the new node in them.
    """
    joined = at.weight + new.weight
    total = above + (1 / joined if depth else 0.0)
    yield max(cost + leaf * total for leaf, cost in (*at.costs, *new.costs)), depth, path
    for number, child in enumerate(at.children):
        yield from _places(child, new, total, depth + 1, (*path, number))


def _insert(at: TokenNode, new: TokenNode, path: tuple[int, ...]) -> TokenNode:
    if not path:
        return TokenNode(at.weight + new.weight, children=(at, new))
    children = list(at.children)
    children[path[0]] = _insert(children[path[0]], new, path[1:])
    return TokenNode(at.weight + new.weight, children=tuple(children))


# -- One source ----------------------------------------------------------------------------------------------------


class TokenAxis:
    """The endless draws of one source along its tokens.

    Cumulated sizes are kept for some passes, one number for 4,096 draws, and found as far as they are asked for: that
    evaluates the permutation up to there. After that any place is found by bisection.
    """

    def __init__(self, sizes: Indices, epochs: SourceEpochs) -> None:
        self._sizes = sizes
        self._epochs = epochs
        self.samples = len(sizes)
        self.total = int(sizes.sum())  # tokens of a pass
        self.longest = int(sizes.max(initial=0))
        self._forget()

    def _forget(self) -> None:
        self._passes: OrderedDict[int, list[int]] = OrderedDict()  # tokens before each chunk of a pass
        self._chunks: OrderedDict[tuple[int, int], Indices] = OrderedDict()  # cumulated sizes of a chunk of a pass

    def sizes(self, first: int, stop: int) -> Indices:
        """Tokens of the draws ``first .. stop - 1``."""
        if self.samples <= MAX_SORTED or stop == first:  # their passes are tabulated anyway
            return self._sizes[self._epochs(np.arange(first, stop))]
        parts = []
        while first < stop:
            number, offset = divmod(first, self.samples)
            chunk, place = divmod(offset, _CHUNK)
            cumulated = self._cumulated(number, chunk)
            end = min(len(cumulated) - 1, place + stop - first)
            parts.append(np.diff(cumulated[place : end + 1]))
            first += end - place
        return np.concatenate(parts)

    def before(self, draw: int) -> int:
        """Tokens of all earlier draws."""
        if not draw:  # an empty source has nothing but this
            return 0
        number, offset = divmod(draw, self.samples)
        if not offset:
            return number * self.total
        chunk, place = divmod(offset, _CHUNK)
        sums = self._sums(number, lambda sums: len(sums) > chunk)
        return number * self.total + sums[chunk] + (int(self._cumulated(number, chunk)[place]) if place else 0)

    def reaching(self, tokens: int) -> int:
        """The first draw with which ``tokens`` tokens are reached; 0 for no tokens."""
        if tokens <= 0:
            return 0
        number = (tokens - 1) // self.total
        rest = tokens - number * self.total  # 1 to total
        sums = self._sums(number, lambda sums: sums[-1] >= rest)
        chunk = bisect_left(sums, rest) - 1
        place = int(np.searchsorted(self._cumulated(number, chunk), rest - sums[chunk])) - 1
        return number * self.samples + chunk * _CHUNK + place

    def _sums(self, number: int, enough: Callable[[list[int]], bool]) -> list[int]:
        """Tokens before each chunk of a pass, as far as is enough, or to its end."""
        sums = self._passes.setdefault(number, [0])
        self._passes.move_to_end(number)
        if len(self._passes) > _MAX_PASSES:
            self._passes.popitem(last=False)
        chunks = -(-self.samples // _CHUNK)
        while len(sums) <= chunks and not enough(sums):
            sums.append(sums[-1] + int(self._cumulated(number, len(sums) - 1)[-1]))
        return sums

    def _cumulated(self, number: int, chunk: int) -> Indices:
        """Tokens before each draw of a chunk of a pass, and before the next chunk."""
        if (number, chunk) not in self._chunks:
            begin, end = chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.samples)
            elements = self._epochs(number * self.samples + np.arange(begin, end))
            found = np.zeros(end - begin + 1, np.int64)
            np.cumsum(self._sizes[elements], out=found[1:])
            self._chunks[number, chunk] = found
            if len(self._chunks) > _MAX_CHUNKS:
                self._chunks.popitem(last=False)
        return self._chunks[number, chunk]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_passes": OrderedDict(), "_chunks": OrderedDict()}


# -- Merging -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Consecutive draws of a node; its token axis counts units."""

    begin: int  # where the first of them begins on the node's axis
    position: int  # draws of the node before them
    sources: Indices
    draws: Indices
    sizes: Indices  # in tokens

    def begins(self) -> Indices:
        """Where each draw begins on the axis, in units."""
        return self.begin + UNIT * (np.cumsum(self.sizes) - self.sizes)

    def cut(self, first: int, stop: int) -> "Run":
        """The draws ``first .. stop - 1`` of the run."""
        part = slice(first, stop)
        return Run(
            self.begin + UNIT * int(self.sizes[:first].sum()),
            self.position + first,
            self.sources[part],
            self.draws[part],
            self.sizes[part],
        )


@dataclass
class _Starts:
    """Counts each source's draws before a run."""

    first: Indices  # of the draws that were looked at
    skipped: list[Indices] = field(default_factory=list)  # sources of those before the run

    def counts(self) -> Indices:
        skipped = np.concatenate([np.zeros(0, np.int64), *self.skipped])
        return self.first + np.bincount(skipped, minlength=len(self.first))


class TokenStage:
    """The draws of one stage, from the draw of each source on with which it begins.

    ``errors`` are the tokens by which each source is ahead of its share when the stage begins, so that a stage makes up
    for the deviation of the one before.
    """

    def __init__(
        self, weights: Sequence[int], axes: Sequence[TokenAxis], first: Indices, errors: Sequence[int]
    ) -> None:
        self.tree = token_tree(weights)
        self.first = first
        self.errors = tuple(errors)
        self._axes = axes
        self._weights = tuple(weights)
        drawn = [source for source, weight in enumerate(weights) if weight]
        self.bound = max(1.0, bound(self.tree))
        self.longest = max(axes[source].longest for source in drawn)
        self._margin = UNIT * (2 * self.longest + 1 + sum(map(abs, errors)))
        self._begins = {source: axes[source].before(int(first[source])) for source in drawn}  # in tokens
        weight = self.tree.weight
        rate = sum(weights[source] / weight * axes[source].samples / axes[source].total for source in drawn)
        tokens = max(1, int(max(_WINDOW, _WINDOW_PER_SOURCE * len(drawn)) / rate), _LONGEST * self.longest)
        self._step = min(UNIT * tokens, _MAX_STEP)
        self._rate = rate * self._step / UNIT  # draws in a window, on average
        self._positions: dict[int, int] = {}
        self._windows: OrderedDict[int, tuple[Run, Indices]] = OrderedDict()

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """The source at each of some ascending positions of the stage, and its draw."""
        sources, draws = np.empty((2, len(positions)), np.int64)
        done = 0
        while done < len(positions):
            number = self._window_of(int(positions[done]))
            run = self._window(number)[0]
            end = int(np.searchsorted(positions, run.position + len(run.draws)))
            own = positions[done:end] - run.position
            sources[done:end], draws[done:end] = run.sources[own], run.draws[own]
            done = end
        return sources, draws

    def counts(self, position: int) -> Indices:
        """The number of each source's next draw at a position of the stage."""
        run, counts = self._window(self._window_of(position))
        own = run.sources[: position - run.position]
        drawn: Indices = counts + np.bincount(own, minlength=len(counts))
        return drawn

    def position_of(self, source: int, draw: int) -> int:
        """The position of the stage after a draw of a source that it draws from, at or after the stage's first."""
        # A draw's place is near its middle: where the weight is tiny, that is far behind its beginning.
        begin, end = (self._axes[source].before(at) - self._begins[source] for at in (draw, draw + 1))
        middle = begin + end + UNIT * self.errors[source]
        guess = max(0, middle * self.tree.weight // (self._step * self._weights[source]))
        number = _last(guess, lambda window: int(self._window(window)[1][source]) <= draw)
        run = self._window(number)[0]
        [found] = np.flatnonzero((run.sources == source) & (run.draws == draw))
        return run.position + int(found) + 1

    def _window_of(self, position: int) -> int:
        """The window that has a position: windows are stretches of equal tokens."""
        if self._windows:  # most often it is in the latest one or the next
            latest = next(reversed(self._windows))
            for number in (latest, latest + 1):
                begin = self._position(number)
                if begin <= position < begin + 2 * self._rate:
                    run = self._window(number)[0]
                    if position < run.position + len(run.draws):
                        return number
        return _last(max(0, int(position / self._rate)), lambda window: self._position(window) <= position)

    def _position(self, window: int) -> int:
        """The position at which a window begins."""
        if window not in self._positions:
            if window - 1 in self._windows:
                run = self._windows[window - 1][0]
                found = run.position + len(run.draws)
            else:
                run = self._run_of(window, 0, self._starts())
                found = run.position + int(np.searchsorted(run.begins(), 0)) * (window > 0)
            if len(self._positions) > 2**16:
                self._positions.clear()
            self._positions[window] = found
        return self._positions[window]

    def _window(self, number: int) -> tuple[Run, Indices]:
        """The draws that begin in a window, and each source's draws before them."""
        if number not in self._windows:
            starts = self._starts()
            run = self._run_of(number, self._step, starts)
            first, stop = (int(at) for at in np.searchsorted(run.begins(), (0, self._step)))
            first *= number > 0
            starts.skipped.append(run.sources[:first])
            self._windows[number] = run.cut(first, stop), starts.counts()
            if len(self._windows) > _MAX_WINDOWS:
                self._windows.popitem(last=False)
        return self._windows[number]

    def _starts(self) -> _Starts:
        return _Starts(self.first.copy())

    def _run_of(self, window: int, length: int, starts: _Starts) -> Run:
        """Consecutive draws of the root that begin in a window, and some around them; the window begins at 0."""
        # Moving each node by its weight times one number changes no order, and keeps the arrays' integers small.
        moved, rest = divmod(window * self._step, self.tree.weight)
        low = rest if window else -(_FAR**2)  # the first window has all that the stage before has left behind
        run = self._run(self.tree, low, rest + length, starts, moved)
        run.begin -= rest
        return run

    def _run(self, node: TokenNode, low: int, high: int, starts: _Starts, moved: int) -> Run:
        """Consecutive draws of a node, all those that touch ``low .. high`` on its axis among them."""
        if not node.children:
            return self._leaf(node, low, high, starts, moved)
        # A draw's place on the node's axis is within the margin of its virtual time times the node's weight.
        low, high = low - self._margin, high + self._margin
        parts, times = [], []
        for child in node.children:
            first, stop = (-(-child.weight * point // node.weight) for point in (low, high))
            run = self._run(child, first - 1, stop + 1, starts, moved)
            own = run.begins() + run.sizes * (UNIT // 2)
            begin, end = (int(at) for at in np.searchsorted(own, (max(first, -_FAR), stop)))
            starts.skipped.append(run.sources[:begin])
            parts.append(run.cut(begin, end))
            times.append(own[begin:end])
        return _merge(parts[0], parts[1], times[0], times[1], node)

    def _leaf(self, node: TokenNode, low: int, high: int, starts: _Starts, moved: int) -> Run:
        source = node.source
        axis, first, begin = self._axes[source], int(self.first[source]), self._begins[source]
        origin = UNIT * self.errors[source] - node.weight * moved  # where the stage's first draw begins
        # The first draw that ends at low or later, and the first that begins after high.
        start = max(first, axis.reaching(begin - (origin - low) // UNIT)) if low > origin else first
        stop = first if high < origin else axis.reaching(begin + (high - origin) // UNIT + 1) + 1
        draws = np.arange(start, max(start, stop))
        starts.first[source] = start
        return Run(
            UNIT * (axis.before(start) - begin) + origin,
            start - first,
            np.full(len(draws), source),
            draws,
            axis.sizes(start, start + len(draws)),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_positions": {}, "_windows": OrderedDict()}


def _last(guess: int, holds: Callable[[int], bool]) -> int:
    """The last number for which a condition holds that holds for 0 and ends once; a good guess needs few calls."""
    low, high, width = guess, guess + 1, 1
    while low and not holds(low):
        low, high, width = max(0, low - width), low, 2 * width
    width = 1
    while high > guess and holds(high):
        low, high, width = high, high + width, 2 * width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _merge(one: Run, two: Run, one_times: Indices, two_times: Indices, node: TokenNode) -> Run:
    """Merge two children's draws by time over weight, exactly; at equal times the first child's first."""
    heavy, light = (child.weight for child in node.children)
    # Of the second child, draws with time < one_time * light / heavy are earlier; rounded up, integers compare alike.
    quotient = one_times // heavy
    rest = one_times - quotient * heavy
    product = rest * light
    up = -(-product // heavy)
    scaled = np.maximum.accumulate(quotient * light + up)
    places = np.arange(len(one_times)) + np.searchsorted(two_times, scaled)
    is_two = np.ones(len(one_times) + len(two_times), bool)
    is_two[places] = False

    order = np.empty(len(is_two), np.int64)
    order[places] = np.arange(len(one_times))
    order[np.flatnonzero(is_two)] = np.arange(len(one_times), len(is_two))

    return Run(
        one.begin + two.begin,
        one.position + two.position,
        np.concatenate([one.sources, two.sources])[order],
        np.concatenate([one.draws, two.draws])[order],
        np.concatenate([one.sizes, two.sizes])[order],
    )


# -- The sequence --------------------------------------------------------------------------------------------------


class TokenMixture:
    """Sources by position, with exact shares of the tokens; the stages of a schedule follow one another.

    Args:
        stages: Weights in tokens, by position.
        epoch_length: Draws in an epoch.
        seed: Of the passes.
        sizes: The tokens of each source's samples.
        epochs: The passes over each source.
        first: Draws of each source before the first stage; by default 0.

    >>> sizes = [np.array([3, 3]), np.array([1])]
    >>> passes = [SourceEpochs(2, 0), SourceEpochs(1, 0)]
    >>> mixture = TokenMixture([Stage(0, (1, 1))], epoch_length=8, seed=0, sizes=sizes, epochs=passes)
    >>> mixture.draws_before(1)
    [2, 6]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        epoch_length: int,
        seed: int,
        sizes: Sequence[Indices],
        epochs: Sequence[SourceEpochs],
        first: Sequence[int] | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.epoch_length = epoch_length
        self.seed = seed
        self.num_sources = len(sizes)
        self.axes = [TokenAxis(own, passes) for own, passes in zip(sizes, epochs, strict=True)]
        for stage in self.stages:
            self._refuse_uneven(stage.weights)
        self._first = np.array(first or [0] * self.num_sources, np.int64)
        self._begun: list[TokenStage] = []  # built when they are reached: the earlier ones' sizes have to be cumulated

    def _refuse_uneven(self, weights: Sequence[int]) -> None:
        """Refuse sizes of which one sample alone reaches over more draws than can be merged."""
        drawn = [(weight, axis) for weight, axis in zip(weights, self.axes, strict=True) if weight]
        rate = sum(weight * axis.samples / axis.total for weight, axis in drawn) / sum(weights)
        uneven = max(axis.longest for _, axis in drawn) * rate
        if uneven > _MAX_UNEVEN:
            raise ValueError(
                f"sizes: the longest sample must have at most {_MAX_UNEVEN:,} times the tokens of a mean draw of the "
                f"mixture with per='token', got {uneven:,.0f} times: cut it, leave it out, or give per='sample'"
            )

    def assign(self, epoch: int, offsets: Indices) -> Iterator[Assignment]:
        """Assign ascending positions of an epoch, shape ``[m]``, to sources; yields each source once per stage."""
        positions = offsets + epoch * self.epoch_length
        done = 0
        while done < len(positions):
            number = self.stage_at(int(positions[done]))
            later = self.stages[number + 1 :]
            end = int(np.searchsorted(positions, later[0].start)) if later else len(positions)
            sources, draws = self.stage(number).at(positions[done:end] - self.stages[number].start)
            for source, where, own in by_source(sources, draws, self.num_sources):
                yield source, where + done, own
            done = end

    def assign_places(self, epoch: int, begins: Indices, length: int, places: Indices) -> Iterator[Assignment]:
        """Assign one draw of each stretch of positions to sources, the stretch's draws sorted by source."""
        whole = np.flatnonzero(begins + length <= self.epoch_length)
        rest = np.flatnonzero(begins + length > self.epoch_length)
        sources, draws = np.empty((2, len(whole) * length), np.int64)
        for source, where, own in self.assign(epoch, (begins[whole, None] + np.arange(length)).ravel()):
            sources[where], draws[where] = source, own
        order = np.argsort(sources.reshape(-1, length), axis=1, kind="stable")
        chosen = order[np.arange(len(whole)), places[whole]] + np.arange(len(whole)) * length
        for source, where, own in by_source(sources[chosen], draws[chosen], self.num_sources):
            yield source, whole[where], own
        positions = (begins[rest] + places[rest]) % self.epoch_length  # beyond its end is the epoch's beginning
        order = np.argsort(positions, kind="stable")
        for source, where, own in self.assign(epoch, positions[order]):
            yield source, rest[order[where]], own

    def draws_before(self, epoch: int) -> list[int]:
        """Count each source's draws before an epoch."""
        counts: list[int] = self._counts(epoch * self.epoch_length).tolist()
        return counts

    def origin(self, epoch: int) -> int:
        """The position from which the stages of an epoch count."""
        return 0 * epoch

    def changes(self, epoch: int) -> list[int]:
        """The starts of stages inside an epoch."""
        begin = epoch * self.epoch_length
        return [stage.start for stage in self.stages if begin < stage.start < begin + self.epoch_length]

    def stage_at(self, position: int) -> int:
        """Return the number of the stage that contains a position."""
        return stage_at(self.stages, position)

    def stages_before(self, epoch: int, position: int) -> int:
        """Count the stages that an epoch's order before a position depends on."""
        reached = epoch * self.epoch_length + position
        return max(1, bisect_left(self.stages, reached, key=lambda stage: stage.start))

    def stage(self, number: int) -> TokenStage:
        """The draws of a stage."""
        while len(self._begun) <= number:
            self._begin_stage(len(self._begun))
        return self._begun[number]

    def _begin_stage(self, number: int) -> None:
        first, errors = self._first, [0] * self.num_sources
        if number:
            first = self._counts(self.stages[number].start, number - 1)
            errors = list(map(round, self.ahead(number - 1, first)))
        self._begun.append(TokenStage(self.stages[number].weights, self.axes, first, errors))

    def ahead(self, number: int, draws: Indices) -> list[Fraction]:
        """By how many tokens each source exceeds its share, before its draws number ``draws`` of a stage."""
        stage, weights = self.stage(number), self.stages[number].weights
        tokens = [
            axis.before(int(draw)) - axis.before(int(first))
            for axis, draw, first in zip(self.axes, draws, stage.first, strict=True)
        ]
        total, whole = sum(tokens), sum(weights)
        return [
            error + own - Fraction(total * weight, whole)
            for error, own, weight in zip(stage.errors, tokens, weights, strict=True)
        ]

    def leaves_at(self, number: int, limits: Mapping[int, int]) -> int | None:
        """The first position at which a source of a stage reaches its limit of draws; None if none has one."""
        stage, start = self.stage(number), self.stages[number].start
        return min((start + stage.position_of(source, limit - 1) for source, limit in limits.items()), default=None)

    def counts_at(self, number: int, position: int) -> list[int]:
        """Each source's draws before a position of a stage, or before its end."""
        counts: list[int] = self._counts(position, number).tolist()
        return counts

    def _counts(self, position: int, number: int | None = None) -> Indices:
        number = self.stage_at(position) if number is None else number
        return self.stage(number).counts(position - self.stages[number].start)

    # -- For reports ---------------------------------------------------------------------------------------------------

    def tokens(self, epoch: int) -> list[int]:
        """Count each source's tokens in an epoch."""
        before, after = self.draws_before(epoch), self.draws_before(epoch + 1)
        return [
            axis.before(end) - axis.before(begin) for axis, begin, end in zip(self.axes, before, after, strict=True)
        ]

    def deviation(self, epoch: int, length: int) -> float:
        """The largest deviation from a source's share of the tokens in an epoch's first draws, in longest samples."""
        worst, low, end = 0.0, epoch * self.epoch_length, epoch * self.epoch_length + length
        while low < end:
            number = self.stage_at(low)
            later = self.stages[number + 1 :]
            high = min(low + _WALKED, end, *(stage.start for stage in later[:1]))
            worst = max(worst, self._deviation(number, low, high))
            low = high
        return worst

    def _deviation(self, number: int, low: int, high: int) -> float:
        stage, whole = self.stage(number), sum(self.stages[number].weights)
        start = self.stages[number].start
        sources, draws = stage.at(np.arange(low - start, high - start))
        errors = list(map(float, self.ahead(number, stage.counts(low - start))))
        sizes = np.empty(len(draws), np.int64)
        groups = list(by_source(sources, draws, self.num_sources))
        for source, where, own in groups:
            sizes[where] = self.axes[source].sizes(int(own[0]), int(own[-1]) + 1)
        total = np.cumsum(sizes)
        # A source's deviation rises with its own draws and falls between them, and from the last one to the end.
        ends = {source: 0 for source, weight in enumerate(self.stages[number].weights) if weight}
        worst = max(abs(errors[source]) for source in ends)
        for source, where, _ in groups:
            share, own_tokens = self.stages[number].weights[source] / whole, np.cumsum(sizes[where])
            after = errors[source] + own_tokens - share * total[where]
            before = after - (1 - share) * sizes[where]
            worst = max(worst, float(after.max()), -float(before.min()))
            ends[source] = int(own_tokens[-1])
        for source, own_sum in ends.items():
            share = self.stages[number].weights[source] / whole
            worst = max(worst, abs(errors[source] + own_sum - share * int(total[-1])))
        return worst / stage.longest
