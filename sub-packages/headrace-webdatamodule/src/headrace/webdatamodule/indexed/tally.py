"""What a loader delivered: samples of each source, padding, what was left out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule.indexed.delivering import Skipped
from headrace.webdatamodule.indexed.sources import Sources

_TOGETHER = 512  # batches that are counted together, which costs less than one by one
_SHOWN = 10


@dataclass(frozen=True)
class LoaderReport:
    """What one rank's loader has delivered since it was made.

    Args:
        name: Of the loader.
        batches: How many.
        samples: {source: samples of it}.
        fill: Sum of the sizes over number times largest size, over all batches: 1 is no padding. None without sizes.
        n_skipped: How often a sample was left out as damaged, in all epochs.
        skipped: Those samples, each once.
        rank: (number of ranks, this one), when there are several.
    """

    name: str
    batches: int
    samples: dict[str, int]
    fill: float | None
    n_skipped: int = 0
    skipped: tuple[Skipped, ...] = field(default=(), repr=False)
    rank: tuple[int, int] | None = None

    def __str__(self) -> str:
        total = sum(self.samples.values())
        where = f" of rank {self.rank[1]}, one of {self.rank[0]}" if self.rank else ""
        lines = [f"{self.name}{where}: {total:,} samples in {self.batches:,} batches"]
        lines += [f"  {name}: {count:,} samples ({count / max(total, 1):.1%})" for name, count in self.samples.items()]
        if self.fill is not None:
            lines.append(f"  padding: {1 - self.fill:.1%} of what padded batches hold")
        times = f", {self.n_skipped:,} times" if self.n_skipped > len(self.skipped) else ""
        lines.append(f"  skipped as damaged: {len(self.skipped):,} samples{times}")
        lines += [f"    {one.message}" for one in self.skipped[:_SHOWN]]
        if len(self.skipped) > _SHOWN:
            lines.append(f"    and {len(self.skipped) - _SHOWN:,} more")
        return "\n".join(lines)


class Reports(dict[Any, LoaderReport]):
    """The reports of several loaders; printed one below the other."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))


class Tally:
    """Counts what is delivered.

    Args:
        name: Of the loader.
        sources: Where the samples come from.
        sizes: Of each sample, shape [n] or [n, k]; None without.
        rank: (number of ranks, this one).
    """

    def __init__(
        self, name: str, sources: Sources, sizes: npt.NDArray[np.int64] | None, rank: tuple[int, int] = (1, 0)
    ) -> None:
        self._rank = rank if rank[0] > 1 else None
        self._name, self._sources = name, sources
        self._sizes = None if sizes is None else sizes.reshape(len(sizes), -1)[:, 0]
        self._waiting, self._lengths = array("q"), list[int]()  # all indices in a row, and each batch's number of them
        self._counts = np.zeros(len(sources.names), np.int64)
        self._batches = 0
        self._used = self._padded = 0.0
        self._skipped: dict[int, Skipped] = {}
        self.n_skipped = 0

    def skip(self, one: Skipped) -> bool:
        """A sample was left out of a batch; gives whether that is the first time."""
        self.n_skipped += 1
        return self._skipped.setdefault(one.position, one) is one

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """What was left out, each sample once."""
        return tuple(self._skipped.values())

    def add(self, indices: Sequence[int]) -> None:
        """A batch was delivered."""
        if type(indices) is list:
            self._waiting.fromlist(indices)  # at once; a batch's own list is let go of
        else:
            self._waiting.extend(indices)
        self._lengths.append(len(indices))
        if len(self._lengths) >= _TOGETHER:
            self._count()

    def report(self) -> LoaderReport:
        """All that was delivered so far."""
        self._count()
        samples = dict(zip(self._sources.names, self._counts.tolist(), strict=True))
        fill = self._used / self._padded if self._padded else None
        return LoaderReport(self._name, self._batches, samples, fill, self.n_skipped, self.skipped, self._rank)

    def _count(self) -> None:
        waiting, lengths = self._waiting, np.array(self._lengths, np.int64)
        if not len(lengths):
            return
        self._waiting, self._lengths = array("q"), []
        indices = np.frombuffer(waiting, np.int64)
        self._batches += len(lengths)
        self._counts += self._sources.counts(indices)
        if self._sizes is not None and len(indices):
            sizes = self._sizes[indices].astype(np.float64)
            begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])[lengths > 0]
            self._used += float(sizes.sum())
            self._padded += float((np.maximum.reduceat(sizes, begins) * lengths[lengths > 0]).sum())
