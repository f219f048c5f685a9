"""Statistics of delivered batches, and their report, which is logged at the end of a stage."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.display import counted, never_raises
from headrace.webdatamodule.loading.batch_plans import extra_of, longest_of, samples_of, sizes_of
from headrace.webdatamodule.loading.batch_reading import SkippedSample
from headrace.webdatamodule.loading.sample_places import describe_sample, find_sources, source_names
from headrace.webdatamodule.loading.sizes import check_sizes

_TOGETHER = 512  # batches that are counted together, which costs less than one by one
LATE = 0.005  # seconds; a batch that was ready comes in a fraction of them
_SHOWN = 10  # skipped samples that a report names


class RemoteReads(NamedTuple):
    """What batches from another machine took: requests, bytes that came, bytes that were used, and late batches.

    `cached` is the number of used bytes that came from a cache of samples.
    """

    requests: int
    fetched: int
    used: int
    waited: int
    cached: int = 0


class Resumed(NamedTuple):
    """Where a loader resumed, and where its epoch is now.

    Args:
        epoch: In which it resumed.
        steps: Batches of that epoch that the earlier runs delivered.
        now: The present epoch.
        delivered: Batches of the present epoch on this rank, those of the earlier runs included.
        batches: All batches of the present epoch on this rank; None before the first of this run.
        counted: Whether the loader has also counted batches from before the resume: it loaded a state of its own run.
    """

    epoch: int
    steps: int
    now: int
    delivered: int
    batches: int | None
    counted: bool = False

    def __str__(self) -> str:
        total = "" if self.batches is None else f" of {self.batches:,}"
        before = f"after {counted(self.steps, 'batch')}"
        begun = f"resumed in epoch {self.epoch} {before}{'' if self.counted else ', which are not counted here'}"
        return f"{begun}; of epoch {self.now} {self.delivered:,}{total} are delivered"


@dataclass(frozen=True, repr=False)
class LoaderReport:
    """The batches that one rank's loader has delivered since its construction, none from before a resume.

    Args:
        name: Name of the loader.
        batches: Number of batches.
        samples: {source: number of samples}.
        fill: Sum of the sizes over number times largest size, over all batches: 1 means no padding. None without sizes,
            and for packed batches (`cost="sum"`).
        n_skipped: How often a damaged sample was left out, in all epochs.
        skipped: The damaged samples, each once.
        rank: (number of ranks, this rank), if there are several ranks.
        n_over_budget: Samples that the batch sampler leaves out of every epoch, its ``skipped_indices``.
        over_budget: The first samples over the budget.
        remote: Reads of samples from other machines: the numbers `requests`, `fetched` (bytes), `used` (bytes),
            `waited` (batches that came more than 5 ms late) and `cached` (used bytes from a cache of samples). They
            come with the batches: what workers fetched ahead for batches that were never delivered, after a `break`
            or an error, is missing, though the server counts it. None without any.
        cache_room: The share of the data that a cache of samples has room for, by the mean bytes of the samples that
            were read; None without one, and for several sources. On a single node no cache of this size gives more of
            a later epoch.
        tokens: {source: sum of the sizes}; None without sizes.
        asked: What the mixture's shares refer to, "sample" or "token", and {source: requested share of the present
            epoch}; None without a mixture of these sources.
        resumed: Where the loader resumed, and how much of the present epoch is delivered since its beginning; None if
            it did not resume. All other figures count this loader's own batches.
    """

    name: str
    batches: int
    samples: dict[str, int]
    fill: float | None
    n_skipped: int = 0
    skipped: tuple[SkippedSample, ...] = field(default=(), repr=False)
    rank: tuple[int, int] | None = None
    n_over_budget: int = 0
    over_budget: tuple[str, ...] = field(default=(), repr=False)
    remote: RemoteReads | None = None
    resumed: Resumed | None = None
    tokens: dict[str, float] | None = None
    cache_room: float | None = None
    asked: tuple[str, dict[str, float]] | None = None

    def __str__(self) -> str:
        title, sources, notes = self._parts()
        lines = [f"  {name}: {count} ({share})" for name, count, share in sources]
        return "\n".join([title, *lines, *(f"  {note}" for note in notes)])

    @never_raises
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parts()[0]}, {len(self.skipped):,} skipped as damaged)"

    def _parts(self) -> tuple[str, list[tuple[str, str, str]], list[str]]:
        """The first line, the sources, and the lines below."""
        total = sum(self.samples.values())
        where = f", rank {self.rank[1]} of {self.rank[0]}" if self.rank else ""
        batches = counted(self.batches, "batch")
        sources = [(name, counted(count, "sample"), self._shares(name)) for name, count in self.samples.items()]
        sources = [] if list(self.samples) == [self.name] else sources  # which say more than the first line
        times = f", {self.n_skipped:,} times" if self.n_skipped > len(self.skipped) else ""
        notes = [] if self.resumed is None else [str(self.resumed)]
        notes += [] if self.fill is None else [f"padding: {1 - self.fill:.1%} of what padded batches hold"]
        if self.remote is not None:
            requests, fetched, used, waited, cached = self.remote
            suffix = f", {fetched / used:.2f} for each byte that was used" if used else ""
            notes.append(f"fetched: {fetched:,} bytes in {requests:,} requests{suffix}")
            room = "" if self.cache_room is None else f"; it has room for {self.cache_room:.1%} of the data"
            if cached or room:
                notes.append(f"from the cache: {cached:,} bytes, {cached / max(used, 1):.1%} of those used{room}")
            notes.append(f"waited: {waited:,} of {batches} came more than {LATE * 1e3:g} ms late")
        notes.append(f"skipped as damaged: {counted(len(self.skipped), 'sample')}{times}")
        notes += _listed([one.message for one in self.skipped[:_SHOWN]], len(self.skipped))
        if self.n_over_budget:
            notes.append(f"left out as over the budget: {counted(self.n_over_budget, 'sample')}")
            notes += _listed(self.over_budget, self.n_over_budget)
        return f"{self.name}{where}: {counted(total, 'sample')} in {batches}", sources, notes

    def _shares(self, name: str) -> str:
        """Of a source in the samples and, where there are others, in the tokens."""
        per, asked = self.asked or ("", {})
        asked_for = f", {asked[name]:.1%} asked for" if name in asked else ""
        share = f"{self.samples[name] / max(sum(self.samples.values()), 1):.1%}"
        share += asked_for if per == "sample" else ""
        if self.tokens is None or len(self.samples) == 1:
            return share
        share += f"; {self.tokens[name] / (sum(self.tokens.values()) or 1.0):.1%} of the tokens"
        return share + (asked_for if per == "token" else "")


def _listed(items: Sequence[str], count: int) -> list[str]:
    more = [f"  and {count - len(items):,} more"] if count > len(items) else []
    return [*(f"  {item}" for item in items), *more]


class Reports(dict[Any, LoaderReport]):
    """The reports of several loaders; printed one below the other."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))

    def log(self, info: Callable[[str], None]) -> None:
        """Log them one by one, as at the end of a stage."""
        for report in self.values():
            info(str(report))


class _Totals(NamedTuple):
    """Of all batches up to a moment."""

    batches: int
    counts: npt.NDArray[np.int64]  # samples of each source
    tokens: npt.NDArray[np.float64]  # their sizes
    used: npt.NDArray[np.float64]  # sum of the sizes in each column
    padded: npt.NDArray[np.float64]  # the same, each sample as long as the longest of its batch
    waited: float
    moment: float


class DeliveryStats:
    """Counts delivered batches: samples of each source that `dataset` names, and of `sizes` what padding they need."""

    def __init__(self, name: str, dataset: Any, sizes: npt.ArrayLike | None, rank: tuple[int, int] = (1, 0)) -> None:
        self.rank = rank
        self._name, self._dataset = name, dataset
        self._names = source_names(dataset, name)
        self._columns = self._checked(sizes)
        self._longest, self._extra = [math.inf] * len(self._columns), [0.0] * len(self._columns)
        self._used, self._padded = np.zeros(len(self._columns)), np.zeros(len(self._columns))
        self._indices, self._lengths = array("q"), list[int]()  # all indices in a row, and how many each batch has
        self._parts: dict[int, int] = {}  # sizes of pieces, by their place among these indices
        self._counts = np.zeros(len(self._names), np.int64)
        self._batches = 0
        self._tokens = np.zeros(len(self._names))
        self._remote: RemoteReads | None = None
        self._skipped: dict[int, SkippedSample] = {}
        self.n_skipped = 0
        self._waited = 0.0
        self._told: _Totals | None = None  # when figures were asked for last; before the first batch none

    def _checked(self, sizes: npt.ArrayLike | None) -> list[npt.NDArray[Any]]:
        """The columns of the sizes; none without sizes."""
        if sizes is None:
            return []
        checked = check_sizes(np.asarray(sizes), self._dataset)
        return [checked] if checked.ndim == 1 else [*checked.T]

    def count_as(self, batch_sampler: Any) -> None:
        """Count samples as a batch sampler does: by its sizes, where none were given, its extra and its longest."""
        if not self._columns:
            self._columns = self._checked(sizes_of(batch_sampler))
        columns = len(self._columns)
        self._longest, self._extra = longest_of(batch_sampler, columns), extra_of(batch_sampler, columns)
        self._used, self._padded = np.zeros(columns), np.zeros(columns)

    def emptied(self) -> DeliveryStats:
        """The same without any batch."""
        other = DeliveryStats(self._name, self._dataset, None, self.rank)
        other._columns, other._longest, other._extra = self._columns, self._longest, self._extra
        other._used, other._padded = np.zeros(len(self._columns)), np.zeros(len(self._columns))
        return other

    def skip(self, sample: SkippedSample) -> bool:
        """Count a sample that was left out of a batch; return whether it is the first time."""
        self.n_skipped += 1
        return self._skipped.setdefault(sample.sample, sample) is sample

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The skipped samples, each once."""
        return tuple(self._skipped.values())

    def add(self, indices: Sequence[int]) -> None:
        """Count a batch."""
        begin = len(self._indices)
        try:
            self._indices.fromlist(indices if type(indices) is list else list(indices))  # at once
        except TypeError:  # keys that are no integers; none of them was taken
            self._indices.fromlist(samples_of(indices))
            parts = ((place, getattr(key, "length", None)) for place, key in enumerate(indices, begin))
            self._parts.update((place, length) for place, length in parts if length is not None)
        self._lengths.append(len(indices))
        if len(self._lengths) >= _TOGETHER:
            self._count()

    def longest_of(self, indices: Sequence[Any]) -> float:
        """The largest size in a batch; 0 without sizes."""
        if not self._columns or not len(indices):
            return 0.0
        sizes = self._columns[0]
        try:
            longest = float(sizes[indices].max())
        except IndexError:  # pieces
            longest = float(max(getattr(key, "length", None) or sizes[int(key)] for key in indices))
        return min(longest + self._extra[0], self._longest[0])

    def add_remote(self, traffic: Sequence[int], *, late: bool) -> None:
        """Count what a batch from another machine took, and whether the loop waited for it."""
        before = self._remote or RemoteReads(0, 0, 0, 0)
        requests, fetched, used, cached = traffic
        self._remote = RemoteReads(*map(sum, zip(before, (requests, fetched, used, late, cached), strict=True)))

    def wait(self, asked: float, came: float) -> None:
        """Count the time for which the loop waited for a batch."""
        if self._told is None:
            self._told = self._totals(asked)
        self._waited += came - asked

    def _totals(self, moment: float) -> _Totals:
        sums = self._counts.copy(), self._tokens.copy(), self._used.copy(), self._padded.copy()
        return _Totals(self._batches, *sums, self._waited, moment)

    def metrics(
        self, cost: object = None, budgets: Sequence[float] = (), asked: Callable[[], Any] = lambda: None
    ) -> dict[str, float]:
        """Figures of the batches since the last figures; none without any. `budgets` are of batches of that `cost`."""
        self._count()
        before = self._told
        if before is None or self._batches == before.batches:
            return {}
        self._told = now = self._totals(time.perf_counter())
        counts, batches = now.counts - before.counts, now.batches - before.batches
        tokens, waited = now.tokens - before.tokens, now.waited - before.waited
        used, padded = now.used - before.used, now.padded - before.padded
        seconds = now.moment - before.moment
        found = {"data/samples_per_second": float(counts.sum()) / seconds}
        if self._columns:
            found["data/tokens_per_second"] = float(used[0]) / seconds
            if cost != "sum" and padded[0]:
                found["data/padding"] = 1 - float(used[0] / padded[0])
            if cost in ("sum", "padded") and budgets:
                costs = (used if cost == "sum" else padded).tolist()
                found["data/fill"] = max(cost / budget for cost, budget in zip(costs, budgets, strict=False)) / batches
        if len(self._names) > 1:
            shares = counts / max(1, int(counts.sum()))
            found |= {f"data/share/{name}": share for name, share in zip(self._names, shares.tolist(), strict=True)}
            if self._columns:
                shares = tokens / (tokens.sum() or 1.0)
                names = (f"data/token_share/{name}" for name in self._names)
                found |= dict(zip(names, shares.tolist(), strict=True))
            if (requested := self._asked(asked())) is not None:
                per, of_source = requested
                kind = "asked_share" if per == "sample" else "asked_token_share"
                found |= {f"data/{kind}/{name}": share for name, share in of_source.items()}
        return {**found, "data/wait_seconds": waited, "data/wait_share": min(1.0, waited / seconds)}

    def _asked(self, asked: Any) -> tuple[str, dict[str, float]] | None:
        """The requested shares of the sources that the dataset names; None where a mixture has others."""
        if asked is None or not {*self._names} <= {*asked[1]}:
            return None
        return asked[0], {name: asked[1][name] for name in self._names}

    def report(
        self,
        over_budget: Sequence[int] = (),
        *,
        packed: bool = False,
        resumed: Resumed | None = None,
        asked: Any = None,
    ) -> LoaderReport:
        """All batches up to now, and what the batch sampler leaves out; `packed` ones have no padding to report."""
        self._count()
        samples = dict(zip(self._names, self._counts.tolist(), strict=True))
        tokens = dict(zip(self._names, self._tokens.tolist(), strict=True)) if self._columns else None
        padded = float(self._padded[0]) if self._columns else 0.0
        fill = float(self._used[0]) / padded if padded and not packed else None
        rank = self.rank if self.rank[0] > 1 else None
        over = tuple(describe_sample(self._dataset, int(index)) for index in over_budget[:_SHOWN])
        counts = self._name, self._batches, samples, fill, self.n_skipped, self.skipped, rank
        room, shares = self._cache_room(), self._asked(asked)
        return LoaderReport(*counts, len(over_budget), over, self._remote, resumed, tokens, room, shares)

    def _cache_room(self) -> float | None:
        """The share of the data that a cache has room for."""
        remote, samples = self._remote, int(self._counts.sum())
        if remote is None or not samples:
            return None
        share: float | None = self._dataset.cached_share(remote.used / samples)  # as all have that read remotely
        return share

    def _count(self) -> None:
        waiting, lengths = self._indices, np.array(self._lengths, np.int64)
        if not len(lengths):
            return
        parts, self._parts = self._parts, {}
        self._indices, self._lengths = array("q"), []
        indices = np.frombuffer(waiting, np.int64)
        self._batches += len(lengths)
        sources = find_sources(self._dataset, indices)
        self._counts += np.bincount(sources, minlength=len(self._names))
        if not len(indices):
            return
        begins, counts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[lengths > 0], lengths[lengths > 0]
        for column, table in enumerate(self._columns):
            sizes = table[indices].astype(np.float64)
            sizes[list(parts)] = list(parts.values())  # samples that are cut have one size
            sizes = np.minimum(sizes + self._extra[column], self._longest[column])
            self._used[column] += sizes.sum()
            self._padded[column] += (np.maximum.reduceat(sizes, begins) * counts).sum()
            if column == 0:
                self._tokens += np.bincount(sources, sizes, minlength=len(self._names))
