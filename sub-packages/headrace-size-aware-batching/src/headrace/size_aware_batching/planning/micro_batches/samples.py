"""The samples of one optimizer step in whole units, and what is made of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.costs import columns_of
from headrace.size_aware_batching.planning.limits import Limits
from headrace.size_aware_batching.planning.units import FINE

Meet = Literal["micro_batch", "step"]

Ints = NDArray[np.int64]


class NoPlanError(ValueError):
    """There are too few samples for so many micro-batches on each rank."""

    def __init__(self, n_micro_batches: int) -> None:
        super().__init__(n_micro_batches)
        self.n_micro_batches = n_micro_batches


@dataclass(frozen=True)
class Samples:
    """The samples of a step, the largest first, in whole units.

    ``sizes`` ``[n, d]`` are bounded by ``budgets`` ``[d]`` in a micro-batch; ``work`` ``[n]`` is what is balanced, the
    sum of its ``parts`` ``[n, c]`` where there are several kinds.
    """

    sizes: Ints
    budgets: Ints
    work: Ints
    parts: Ints | None = None

    def __len__(self) -> int:
        return len(self.work)

    def of(self, chosen: Ints) -> Samples:
        """Return some of the samples, in this order."""
        parts = None if self.parts is None else self.parts[chosen]
        return Samples(self.sizes[chosen], self.budgets, self.work[chosen], parts)


@dataclass(frozen=True)
class Assignment:
    """Rank and micro-batch of each sample, how many micro-batches a rank has, and bounds of this and the objective."""

    rank: Ints
    micro_batch: Ints
    n_micro_batches: int
    fewest: int
    bound: int  # in units of `whole_work`
    width: Ints | None = None  # ranks that run a sample together, from ``rank`` on


def binding_columns(sizes: Ints, budgets: Ints) -> tuple[Ints, Ints]:
    """Return the columns whose budget all samples together exceed, in units so large that sums are exact in float64.

    What fits by itself does so in these units, too.
    """
    totals = np.array([int(column.sum()) for column in sizes.T])
    binding = totals > budgets
    if not binding.any():
        return np.zeros((len(sizes), 1), np.int64), np.ones(1, np.int64)
    sizes, budgets = sizes[:, binding], budgets[binding]
    unit = np.maximum(-(-budgets // FINE), 1)
    fit, budgets = sizes <= budgets, np.maximum(budgets // unit, 1)
    sizes = -(-sizes // unit)
    return np.where(fit, np.minimum(sizes, budgets), sizes), budgets


def largest_first(sizes: Ints, limits: Limits, work: Ints, parts: Ints | None = None) -> tuple[Ints, Samples]:
    """Return samples sorted by the largest share of a budget that each takes, and their order."""
    columns, budgets = limits.with_counts(columns_of(sizes).astype(np.int64), len(sizes))
    columns, budgets = binding_columns(columns, budgets)
    order = np.lexsort((-work, -(columns / budgets).max(axis=1)))
    return order, Samples(columns, budgets, work, parts).of(order)


def whole_work(work: NDArray[np.float64]) -> Ints:
    """Scale works by a power of two to integers."""
    whole: Ints = np.rint(np.ldexp(work, work_exponent(work))).astype(np.int64)
    return whole


def work_exponent(work: NDArray[np.float64]) -> int:
    """Return the power of two to scale works by, so that no sum of sums of the integers leaves 62 bits."""
    return 61 - 2 * max(len(work).bit_length(), 9) - int(np.frexp(work.max(initial=0.0))[1])
