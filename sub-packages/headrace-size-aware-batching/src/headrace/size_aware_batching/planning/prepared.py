"""Sizes prepared for planning, and the policy for samples that exceed a budget by themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, shortlist, shown, warn
from headrace.size_aware_batching.planning.costs import (
    FunctionCapacity,
    PaddedCapacity,
    at_least_one,
    checked_cost,
    padded_columns,
    refuse_decreasing,
)
from headrace.size_aware_batching.planning.limits import Budget, Capacity, Limits, budgets_of
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.units import round_up, whole_limits, whole_units
from headrace.size_aware_batching.sizes.read import any_column


@dataclass(frozen=True)
class PreparedSizes:
    """Sizes ready for planning: integers wherever sums are taken, and limits in their unit.

    ``kept`` are the samples that are planned, ascending (None for all), ``oversize`` those that exceed a budget by
    themselves, ``work`` what steps are balanced by (None for the sizes).
    """

    sizes: NDArray[Any]
    limits: Limits
    kept: NDArray[np.int64] | None
    oversize: NDArray[np.int64]
    work: NDArray[np.float64] | None = None

    @property
    def n_samples(self) -> int:
        """Number of samples that are planned."""
        return len(self.sizes) if self.kept is None else len(self.kept)

    @property
    def columns(self) -> int:
        """Number of sizes of a sample."""
        return 1 if self.sizes.ndim == 1 else self.sizes.shape[1]


def prepare(sizes: NDArray[Any], budget: Budget, options: Options) -> PreparedSizes:
    """Return sizes and budgets in whole units, and the samples that are too large, which may be refused."""
    table, budgets, capacity, over = summed(sizes, budget) if options.sums else counted(sizes, budget, options)
    refuse_oversize(sizes, over, budget, options)
    kept = None
    if options.oversize == "skip" and len(over):
        kept = np.setdiff1d(np.arange(len(sizes)), over, assume_unique=True)
    scale = float(budgets[0]) if options.sums else 8 * float(sizes.max(initial=1))
    if options.cost == "padded" and math.isfinite(budgets[0]):
        scale = float(budgets[0])
    limits = Limits(
        budgets=tuple(int(b) if math.isfinite(b) else UNLIMITED for b in budgets),
        capacity=capacity,
        most_items=options.max_items or UNLIMITED,
        multiple=options.batch_size_multiple,
        quadratic=8 / max(scale, 8.0),
    )
    return PreparedSizes(table, limits, kept, over)


Parts = tuple[NDArray[Any], tuple[float, ...], Capacity | None, NDArray[np.int64]]


def summed(sizes: NDArray[Any], budget: Budget) -> Parts:
    """Return sizes and budgets in units, no capacity, and which samples are too large, for costs that are sums."""
    limits = budgets_of(budget, sizes)
    table, budgets = whole_units(sizes, limits)
    over = np.flatnonzero(any_column(sizes > whole_limits(sizes, limits)))
    if table is not sizes or len(over):
        # What fits a batch of its own does so in rounded units, too; what does not is left out, or clipped to fit.
        table = np.minimum(table.astype(np.int64), budgets if table.ndim == 2 else budgets[0])
    return table, budgets, None, over


def counted(sizes: NDArray[Any], budget: Budget, options: Options) -> Parts:
    """Return sizes, budgets, capacity and which samples are too large, for costs of the count and the largest sizes."""
    most = options.max_items or max(1, len(sizes))
    capacity: Capacity
    if callable(options.cost):
        if isinstance(budget, list) and len(budget) != 1:
            raise ValueError(f"max_total_size must be one number for a cost function, got {shown(budget)}")
        limits: tuple[float, ...] = (budget[0] if isinstance(budget, list) else budget,)
        if len(sizes):
            smallest, largest = (
                round_up(end, options.length_multiple) for end in (sizes.min(axis=0), sizes.max(axis=0))
            )
            one = sizes.ndim == 1
            refuse_decreasing(
                options.cost, smallest.item() if one else smallest, largest.item() if one else largest, most
            )
        capacity = FunctionCapacity(options.cost, limits[0], most, options.length_multiple, several=sizes.ndim > 1)
    else:
        limits = budgets_of(budget, sizes)
        if sizes.ndim > 1:
            sizes, capacity = padded_columns(sizes, limits, options.length_multiple)
        else:
            capacity = PaddedCapacity(limits[0], options.length_multiple)
    over = np.zeros(0, np.int64)
    if len(sizes) and capacity(sizes.max(axis=0, keepdims=True))[0] < 1:
        over = np.flatnonzero(capacity(sizes) < 1)
    return sizes, limits, partial(at_least_one, capacity) if options.oversize == "own_batch" else capacity, over


def refuse_oversize(sizes: NDArray[Any], over: NDArray[np.int64], budget: Any, options: Options) -> None:
    """Raise an error that names samples that are too large, if that is what was asked for."""
    if not len(over) or options.oversize != "raise":
        return
    some = ", ".join(f"sample {index} has size {shown(sizes[index].tolist())}" for index in over[:3])
    cure = "raise the budget"
    if callable(options.cost):
        largest = round_up(sizes[over].max(axis=0), options.length_multiple)
        if math.isinf(checked_cost(options.cost, 1, largest if sizes.ndim > 1 else largest.item())):
            rounded = f", rounded up to length_multiple={options.length_multiple}" * (options.length_multiple > 1)
            cure = (
                f"cost(1, {largest}) is infinite, as that of a memory model is beyond what it measured: give "
                f"fit_budget these sizes{rounded}, or the sampler model.cost(extrapolate=True)"
            )
    raise ValueError(
        f"sizes must not exceed max_total_size={shown(budget)}, got {len(over)} of {len(sizes)} samples that do so "
        f"by themselves ({some}{', ...' if len(over) > 3 else ''}): {cure}, cut them in the collate function and count "
        "them so with max_length=, or choose oversize='skip' or 'own_batch'"
    )


def warn_of_skipped(over: NDArray[np.int64], budget: Any) -> None:
    """Warn of samples that an epoch does not deliver."""
    some = shortlist(over[:5].tolist(), len(over))
    left_out = "1 sample is" if len(over) == 1 else f"{len(over)} samples are"
    warn(f"{left_out} left out as larger than max_total_size={shown(budget)}: {some}")
