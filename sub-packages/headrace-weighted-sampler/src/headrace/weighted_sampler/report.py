"""Requested and delivered samples of an epoch, by source: as numbers and as a table."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from headrace.weighted_sampler._arguments import MAX_POSITION
from headrace.weighted_sampler._growth import source_epochs
from headrace.weighted_sampler._mixture import SampleOrder
from headrace.weighted_sampler._mixture_arguments import MixtureSpec
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._shared.display import counted, never_raises
from headrace.weighted_sampler._token_mixture import TokenAxis, TokenMixture
from headrace.weighted_sampler.schedule import Stage

HEADINGS = ("source", "size", "weight", "asked", "share", "delivered", "coverage", "repeats")
_SUMMED = ("size", "weight", "asked", "draws", "delivered", "share", "seen", "repeats")
_SUMMED_TOKENS = ("asked_token_share", "token_share")
TOKEN_HEADINGS = ("asked token share", "token share")
_MAX_WALKED = 2**22  # draws of an epoch over which the largest deviation is looked for
MAX_SHOWN = 40  # lines of a table, sources in a plot


@dataclass(frozen=True)
class SourceReport:
    """One line of the report.

    Attributes:
        name: Name of the source.
        size: Number of samples of the source.
        weight: Exact weight in the stage in which the epoch begins.
        asked: Requested share of the epoch's draws, 0 to 1.
        draws: Draws from the source in this epoch.
        delivered: Samples that all ranks together receive: draws minus dropped samples plus padding.
        share: ``delivered`` as a share of all deliveries, 0 to 1.
        seen: Distinct samples drawn from epoch 0 to the end of this epoch.
        repeats: Draws beyond the first draw of each sample, from epoch 0 to the end of this epoch.
        asked_token_share: Requested share of the epoch's tokens; None if shares refer to samples.
        token_share: Delivered share of the epoch's tokens; None if shares refer to samples.
        groups: Names of the enclosing groups of nested weights, outermost first.
    """

    name: str
    size: int
    weight: Fraction
    asked: float
    draws: int
    delivered: int
    share: float
    seen: int
    repeats: int
    asked_token_share: float | None = None
    token_share: float | None = None
    groups: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """Fraction of the source that has been drawn, 0 to 1."""
        return self.seen / self.size if self.size else 1.0


@dataclass(frozen=True)
class MixtureReport:
    """Report on one epoch of a mixture; ``str()`` returns a table.

    Attributes:
        epoch: Number of the epoch.
        num_replicas: Number of ranks.
        sources: One entry per source, including sources of weight 0.
        padded: Dataset indices that are repeated so that all ranks get the same number.
        dropped: Dataset indices that are dropped so that all ranks get the same number.
        not_drawn: Number of samples that are never drawn, because they are in no source or in a source of weight 0.
        rounding: Largest relative rounding error of a weight; above 0 only with thousands of distinct weights of
            samples.
        changes: Positions within this epoch where a schedule changes the weights, or a source is dropped.
        leaving: Sources that leave the mixture after ``max_passes``: (name, position), with positions counted over all
            ranks and epochs.
        deviation: Largest deviation of a source from its share of the tokens, in units of the longest sample. Tokens
            are counted from the start of epoch 0; the maximum is over the positions of this epoch (at most its first
            4,194,304). None if shares refer to samples, and with ``stopping="drop_exhausted"``.
        deviation_bound: Proven upper bound of the deviation at any position of any epoch while the weights stay the
            same, in units of the longest sample.
    """

    epoch: int
    num_replicas: int
    sources: tuple[SourceReport, ...]
    padded: tuple[int, ...]
    dropped: tuple[int, ...]
    not_drawn: int
    rounding: float
    changes: tuple[int, ...] = ()
    leaving: tuple[tuple[str, int], ...] = ()
    deviation: float | None = None
    deviation_bound: float | None = None

    @property
    def tree(self) -> tuple[SourceReport, ...]:
        """The sources; with nested weights, the sum of each group precedes its members."""
        return tuple(_tree(self.sources))

    @never_raises
    def __repr__(self) -> str:
        total, sources = sum(line.delivered for line in self.sources), len(self.sources)
        return (
            f"{type(self).__name__}(epoch {self.epoch}: {counted(total, 'sample')} of {counted(sources, 'source')} "
            f"over {counted(self.num_replicas, 'rank')}, {len(self.padded)} padded, {len(self.dropped)} dropped)"
        )

    def __str__(self) -> str:
        head, *rows = self._table()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (head, *rows))
        return "\n".join([self._title(), *lines, *self._notes()])

    def _title(self) -> str:
        total = sum(line.delivered for line in self.sources)
        return (
            f"epoch {self.epoch}: {counted(total, 'sample')} over {counted(self.num_replicas, 'rank')}, "
            f"{len(self.padded)} padded, {len(self.dropped)} dropped"
        )

    def _table(self) -> list[tuple[str, ...]]:
        by_tokens = any(line.token_share is not None for line in self.sources)
        head = tuple("first weight" if name == "weight" and self.changes else name for name in HEADINGS)
        return [head + TOKEN_HEADINGS * by_tokens, *map(_cells, self.tree[:MAX_SHOWN])]

    def _notes(self) -> list[str]:
        hidden = len(self.tree) - MAX_SHOWN
        return [
            *([f"and {counted(hidden, 'more source')}"] if hidden > 0 else []),
            f"never drawn: {counted(self.not_drawn, 'sample')} in no source or of weight 0",
            *([f"the weights change at {_positions(self.changes)}"] if self.changes else []),
            *(
                f"{name} leaves after its last pass, at position {position} of the run"
                for name, position in self.leaving
            ),
            *([f"weights rounded by at most {self.rounding:.2%}"] if self.rounding else []),
            *([] if self.deviation is None else [self._deviation_text()]),
        ]

    def _deviation_text(self) -> str:
        return (
            f"largest deviation from the token shares: {self.deviation:.2f} of the longest sample "
            f"(at most {self.deviation_bound:.2f})"
        )


def _positions(numbers: tuple[int, ...]) -> str:
    return f"position{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of this epoch"


def _tree(lines: Sequence[SourceReport], depth: int = 0) -> Iterator[SourceReport]:
    done: set[str] = set()
    for line in lines:
        if len(line.groups) == depth:
            yield line
        elif (group := line.groups[depth]) not in done:
            done.add(group)
            members = [other for other in lines if other.groups[depth : depth + 1] == (group,)]
            yield _sum(group, line.groups[:depth], members)
            yield from _tree(members, depth + 1)


def _sum(name: str, groups: tuple[str, ...], members: Sequence[SourceReport]) -> SourceReport:
    tokens = members[0].token_share is not None
    summed = {key: sum(getattr(member, key) for member in members) for key in _SUMMED + _SUMMED_TOKENS * tokens}
    return SourceReport(name=name, groups=groups, **summed)


def _cells(line: SourceReport) -> tuple[str, ...]:
    asked, delivered = line.asked_token_share, line.token_share
    tokens = () if delivered is None else (f"{asked:.4f}", f"{delivered:.4f}")
    return (
        "  " * len(line.groups) + line.name,
        f"{line.size}",
        f"{float(line.weight):g}",
        f"{line.asked:.4f}",
        f"{line.share:.4f}",
        f"{line.delivered}",
        f"{line.coverage:.1%}",
        f"{line.repeats}",
        *tokens,
    )


def mixture_report(
    spec: MixtureSpec, order: SampleOrder, padded: Indices, dropped: Indices, *, epoch: int, num_replicas: int
) -> MixtureReport:
    """Count the deliveries of one epoch, from the ascending positions that are padded and dropped."""
    mixture, origin = order.mixture, order.mixture.origin(epoch)
    begin, end = epoch * spec.epoch_length - origin, (epoch + 1) * spec.epoch_length - origin
    before, after = mixture.draws_before(epoch), mixture.draws_before(epoch + 1)
    extra, less = (_count_draws(order, epoch, positions) for positions in (padded, dropped))
    delivered = [
        new - old + added - left_out for old, new, added, left_out in zip(before, after, extra, less, strict=True)
    ]
    total = sum(delivered)
    asked = asked_shares(spec.stages, spec.requested, begin, end)
    token_shares = _token_shares(spec, order, padded, dropped, epoch)
    asked_token_shares = _asked_token_shares(spec, asked)
    weights = spec.weights[mixture.stage_at(begin)]
    ever_drawn = _ever_drawn(spec, order, after)
    lines = tuple(
        SourceReport(
            name=part.name,
            size=part.size,
            weight=weights[place],
            asked=float(asked[place]),
            draws=after[place] - before[place],
            delivered=delivered[place],
            share=delivered[place] / total,
            seen=ever_drawn[place][0],
            repeats=ever_drawn[place][1],
            asked_token_share=asked_token_shares[place],
            token_share=token_shares[place],
            groups=part.groups,
        )
        for place, part in enumerate(spec.sources.parts)
    )
    deviation, most = None, None
    if isinstance(mixture, TokenMixture):
        deviation = mixture.deviation(epoch, min(spec.epoch_length, _MAX_WALKED))
        most = max(
            mixture.stage(number).bound for number in range(mixture.stage_at(begin), mixture.stage_at(end - 1) + 1)
        )
    ever = [any(stage.weights[place] for stage in spec.stages) for place in range(len(lines))]
    return MixtureReport(
        epoch=epoch,
        num_replicas=num_replicas,
        sources=lines,
        padded=tuple(order.at(epoch, padded).tolist()),
        dropped=tuple(order.at(epoch, dropped).tolist()),
        not_drawn=spec.length - sum(line.size for line, drawn in zip(lines, ever, strict=True) if drawn),
        rounding=spec.sources.rounding,
        changes=tuple(start - begin for start in mixture.changes(epoch)),
        leaving=tuple((leaving.name, leaving.position) for leaving in spec.leaving),
        deviation=deviation,
        deviation_bound=most,
    )


def _ever_drawn(spec: MixtureSpec, order: SampleOrder, after: Sequence[int]) -> list[tuple[int, int]]:
    """Count the distinct samples of each source among its draws since epoch 0, and the draws beyond these."""
    if spec.growth is None:
        sizes = [part.size for part in spec.sources.parts]
        return [(min(size, count), max(0, count - size)) for size, count in zip(sizes, after, strict=True)]
    growth = spec.growth
    counts = []
    passes_of = source_epochs(order.mixture.seed, spec.sources.ranges, growth)
    draws_there = order.mixture.draws_before(growth.epoch)
    for passes, first, there, now in zip(passes_of, growth.first, draws_there, after, strict=True):
        draws = first + now - there
        seen = passes.seen(draws)
        counts.append((seen, passes.count(draws) - seen))
    return counts


def _count_draws(order: SampleOrder, epoch: int, positions: Indices) -> list[int]:
    """Count the given ascending positions by source."""
    counts = [0] * order.mixture.num_sources
    for source, where, _ in order.mixture.assign(epoch, positions):
        counts[source] += len(where)
    return counts


def asked_of_epoch(spec: MixtureSpec, origin: int, epoch: int) -> dict[str, float]:
    """Return the requested share of each source in an epoch: of its tokens if weights refer to these, else samples."""
    begin = epoch * spec.epoch_length - origin
    asked = asked_shares(spec.stages, spec.requested, begin, begin + spec.epoch_length)
    by_tokens = _asked_token_shares(spec, asked)
    return {
        part.name: float(share) if tokens is None else tokens
        for part, share, tokens in zip(spec.sources.parts, asked, by_tokens, strict=True)
    }


def _asked_token_shares(spec: MixtureSpec, asked: Sequence[Fraction]) -> list[float] | list[None]:
    """Shares of tokens, from shares of draws and mean sizes; Nones if shares refer to samples."""
    if spec.means is None:
        return [None] * len(asked)
    tokens = [count * mean for count, mean in zip(asked, spec.means, strict=True)]
    total = sum(tokens)
    return [float(part / total) for part in tokens]


def _token_shares(
    spec: MixtureSpec, order: SampleOrder, padded: Indices, dropped: Indices, epoch: int
) -> list[float] | list[None]:
    """Delivered shares of an epoch's tokens; Nones if shares refer to samples."""
    if spec.tokens is None:
        return [None] * len(spec.sources.parts)
    begins = np.array([begin for begin, _ in spec.sources.ranges])
    if isinstance(order.mixture, TokenMixture):
        tokens = np.array(order.mixture.tokens(epoch), float)
    else:  # each sample once
        drawn = [any(stage.weights[place] for stage in spec.stages) for place in range(len(begins))]
        sums = [spec.tokens[begin:end].sum() for begin, end in spec.sources.ranges]
        tokens = np.where(drawn, np.array(sums, float), 0.0)
    for positions, sign in ((padded, 1), (dropped, -1)):
        indices = order.at(epoch, positions)
        sources = np.searchsorted(begins, indices, side="right") - 1
        tokens += sign * np.bincount(sources, spec.tokens[indices], minlength=len(begins))
    shares: list[float] = (tokens / (tokens.sum() or 1.0)).tolist()
    return shares


def asked_shares(stages: Sequence[Stage], asked: Sequence[Sequence[Fraction]], begin: int, end: int) -> list[Fraction]:
    """Average the requested shares of the stages over positions ``begin .. end - 1``."""
    bounds = [max(begin, min(end, stage.start)) for stage in stages] + [end]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return [
        sum((length * share for length, share in zip(lengths, column, strict=True)), Fraction(0)) / (end - begin)
        for column in zip(*asked, strict=True)
    ]


# -- A run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceRun:
    """What a run draws from one source.

    Attributes:
        name: Name of the source.
        size: Number of samples of the source.
        tokens: Tokens of the source; None if sizes are not known.
        weight: Exact weight where the run begins.
        asked: Requested share of the run, 0 to 1: of the tokens if weights refer to tokens, else of the samples.
        drawn: Samples drawn from the source.
        drawn_tokens: Their tokens; None if sizes are not known.
        leaves_at: The position at which the source leaves the mixture in this run; None if it stays.
    """

    name: str
    size: int
    tokens: int | None
    weight: Fraction
    asked: float
    drawn: int
    drawn_tokens: int | None
    leaves_at: int | None

    @property
    def passes(self) -> float:
        """How often the source was drawn."""
        return self.drawn / self.size if self.size else 0.0

    @property
    def repeats(self) -> int:
        """Draws beyond the first of each sample."""
        return max(0, self.drawn - self.size)


class RunCounts:
    """Draws and tokens of each source before any position of the endless sequence. Nothing is drawn.

    Args:
        spec: The mixture.
        order: Its samples.
        sizes: Tokens of each sample of the dataset, int64; those of the mixture if its shares are in tokens.
    """

    def __init__(self, spec: MixtureSpec, order: SampleOrder, sizes: Indices | None = None) -> None:
        self.spec = spec
        self._mixture = order.mixture
        self._axes: list[TokenAxis] | None = None
        if isinstance(order.mixture, TokenMixture):
            self._axes = order.mixture.axes
        elif sizes is not None:
            ranges = spec.sources.ranges
            passes = source_epochs(order.mixture.seed, ranges, spec.growth)
            self._axes = [TokenAxis(sizes[slice(*own)], epochs) for own, epochs in zip(ranges, passes, strict=True)]

    def draws(self, position: int) -> list[int]:
        """Count each source's draws before a position."""
        epoch, offset = divmod(position, self.spec.epoch_length) if self.spec.drops else (0, position)
        earlier = self._mixture.draws_before(epoch)
        own = self._mixture.counts_at(self._mixture.stage_at(offset), offset)
        return [before + since for before, since in zip(earlier, own, strict=True)]

    def tokens(self, draws: Sequence[int]) -> list[int] | None:
        """Count the tokens of each source's first draws; None if sizes are not known."""
        if self._axes is None:
            return None
        return [axis.before(count) for axis, count in zip(self._axes, draws, strict=True)]

    def tokens_before(self, position: int) -> int:
        """Count the tokens before a position, all sources together; sizes have to be known."""
        return sum(self.tokens(self.draws(position)) or ())

    def position_of(self, tokens: int) -> int:
        """Return the first position before which there are ``tokens`` tokens; sizes have to be known.

        Raises:
            ValueError: If no position has so many before it, or sizes are not known.
        """
        if self._axes is None:
            raise ValueError("tokens need the sizes of the samples")
        start, rate = self._stretch(tokens, self._axes)
        too_long = f"the sequence does not reach {tokens} tokens: it has 2**62 samples at most"
        if not rate:
            raise ValueError(too_long)
        guess = start
        for _ in range(3):  # the count is a line with a small deviation, so this comes near, and stays in a pass
            guess = max(start, guess + int((tokens - self.tokens_before(guess)) / rate))
            if guess > MAX_POSITION // 2:
                raise ValueError(too_long)
        low, high, width = guess, guess, 1
        while low and self.tokens_before(low) >= tokens:
            low, width = max(0, low - width), 2 * width
        width = 1
        while self.tokens_before(high) < tokens:
            low, high, width = high, high + width, 2 * width
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.tokens_before(middle) < tokens else (low, middle)
        return high

    def _stretch(self, tokens: int, axes: Sequence[TokenAxis]) -> tuple[int, Fraction]:
        """The start of the stretch of constant weights in which a token lies, and its mean tokens per draw."""
        parts, begin = self.spec.sources.parts, 0
        if self.spec.drops:  # each sample once an epoch
            drawn = [any(stage.weights[place] for stage in self.spec.stages) for place in range(len(parts))]
            total = sum(axis.total for axis, own in zip(axes, drawn, strict=True) if own)
            begin = self.spec.epoch_length * ((tokens - 1) // total) if total else 0
        starts = [begin + stage.start for stage in self.spec.stages]
        number = max(0, bisect_left(starts, tokens, key=self.tokens_before) - 1)
        means = [Fraction(axis.total, part.size or 1) for axis, part in zip(axes, parts, strict=True)]
        rate = sum((share * mean for share, mean in zip(self.spec.requested[number], means, strict=True)), Fraction(0))
        return starts[number], rate


def run_report(counts: RunCounts, samples: int) -> tuple[SourceRun, ...]:
    """Count what a run draws that ends before a position, by source."""
    spec, draws = counts.spec, counts.draws(samples)
    parts = spec.sources.parts
    tokens, sizes = counts.tokens(draws), counts.tokens([part.size for part in parts])
    asked = _asked_of_run(spec, samples)
    asked_tokens = _asked_token_shares(spec, asked)
    leaving = {leaving.name: leaving.position for leaving in spec.leaving if leaving.position < samples}
    return tuple(
        SourceRun(
            name=part.name,
            size=part.size,
            tokens=None if sizes is None else sizes[place],
            weight=spec.weights[0][place],
            asked=float(asked[place]) if (by_tokens := asked_tokens[place]) is None else by_tokens,
            drawn=draws[place],
            drawn_tokens=None if tokens is None else tokens[place],
            leaves_at=leaving.get(part.name),
        )
        for place, part in enumerate(parts)
    )


def _asked_of_run(spec: MixtureSpec, samples: int) -> list[Fraction]:
    """The requested share of each source over the first positions."""
    if not spec.drops:
        return asked_shares(spec.stages, spec.requested, 0, samples)
    epochs, rest = divmod(samples, spec.epoch_length)
    stretches = [(epochs * spec.epoch_length, spec.epoch_length), (rest, rest)]
    shares = [
        [share * length / samples for share in asked_shares(spec.stages, spec.requested, 0, end)]
        for length, end in stretches
        if length
    ]
    return [sum(column, Fraction(0)) for column in zip(*shares, strict=True)]
