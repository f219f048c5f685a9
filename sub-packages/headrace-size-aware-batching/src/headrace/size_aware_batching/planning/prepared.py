"""Sizes prepared for planning, and the policy for samples that exceed a budget by themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, shortlist, shown, warn
from headrace.size_aware_batching.planning.costs import Cost, at_least_one
from headrace.size_aware_batching.planning.limits import Budget, Limits
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.shapes import Shapes, choose_shapes, given_shapes, refuse_other_sizes

CURE = (
    "cut them in the collate function and count them so with max_length=, or choose oversize='split', 'skip' or "
    "'own_batch'"
)


@dataclass(frozen=True)
class PreparedSizes:
    """Sizes ready for planning: integers wherever sums are taken, and limits in their unit.

    ``kept`` are the samples that are planned, ascending (None for all), ``oversize`` those that exceed a budget by
    themselves, ``work`` what steps are balanced by (None for the sizes). With ``shapes`` the sizes are the lengths that
    samples are padded to.
    """

    sizes: NDArray[Any]
    limits: Limits
    cost: Cost
    kept: NDArray[np.int64] | None
    oversize: NDArray[np.int64]
    work: NDArray[np.float64] | None = None
    shapes: Shapes | None = None

    @property
    def n_samples(self) -> int:
        """Number of samples that are planned."""
        return len(self.sizes) if self.kept is None else len(self.kept)

    @property
    def columns(self) -> int:
        """Number of sizes of a sample."""
        return 1 if self.sizes.ndim == 1 else self.sizes.shape[1]


def without(kept: NDArray[Any] | None, n_samples: int, left_out: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the samples that are kept, ascending, without some; None for all."""
    if not len(left_out):
        return kept
    # A mask: set operations sort or hash, which takes 20 s for 10,000,000 samples.
    there = np.ones(n_samples, bool) if kept is None else np.zeros(n_samples, bool)
    if kept is not None:
        there[kept] = True
    there[left_out] = False
    return np.flatnonzero(there)


def left_of(sized: PreparedSizes, taken: NDArray[Any]) -> NDArray[np.int64]:
    """Return the samples that are planned and not taken, ascending."""
    left = without(sized.kept, len(sized.sizes), taken)
    return np.arange(len(sized.sizes)) if left is None else left


def prepare(
    sizes: NDArray[Any], budget: Budget, options: Options, cure: str = CURE, largest: int | None = None
) -> PreparedSizes:
    """Return sizes and limits in the unit of the cost, and the samples that are too large, which may be refused.

    ``cure`` ends the error; ``largest`` is the largest size, where it is known.
    """
    cost = options.batch_cost
    table, limits, over = cost.prepare(sizes, budget, options.max_items, largest)
    refuse_oversize(sizes, over, budget, options, cure)
    kept = None
    if options.oversize == "skip" and len(over):
        kept = np.setdiff1d(np.arange(len(sizes)), over, assume_unique=True)
    capacity = limits.capacity
    if capacity is not None and options.oversize == "own_batch":
        capacity = partial(at_least_one, capacity)
    most, multiple = options.max_items or UNLIMITED, options.batch_size_multiple
    limits = replace(limits, capacity=capacity, most_items=most, multiple=multiple)
    shapes = None
    if options.shapes is not None:
        refuse_other_sizes(sizes, options.shapes)
        planned = sizes if kept is None else sizes[kept]
        if isinstance(options.shapes, int):
            shapes = choose_shapes(planned, limits, options.shapes, options.length_multiple)
        else:
            shapes = given_shapes(options.shapes, planned, limits, options.length_multiple, max(1, len(sizes)))
        table, limits = shapes.lengthened(sizes), replace(limits, capacity=shapes.capacity)
    return PreparedSizes(table, limits, cost, kept, over, shapes=shapes)


def refuse_oversize(sizes: NDArray[Any], over: NDArray[np.int64], budget: Any, options: Options, cure: str) -> None:
    """Raise an error that names samples that are too large, if that is what was asked for."""
    if not len(over) or options.oversize != "raise":
        return
    some = ", ".join(f"sample {index} has size {shown(sizes[index].tolist())}" for index in over[:3])
    raise ValueError(
        f"sizes must not exceed max_total_size={shown(budget)}, got {len(over)} of {len(sizes)} samples that do so "
        f"by themselves ({some}{', ...' if len(over) > 3 else ''}): {options.batch_cost.cure(sizes[over])}, {cure}"
    )


def warn_of_skipped(over: NDArray[np.int64], budget: Any) -> None:
    """Warn of samples that an epoch does not deliver."""
    some = shortlist(over[:5].tolist(), len(over))
    left_out = "1 sample is" if len(over) == 1 else f"{len(over)} samples are"
    warn(f"{left_out} left out as larger than max_total_size={shown(budget)}: {some}")
