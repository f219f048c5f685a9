"""Sizes and budgets in the form that planning works on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._sizes import any_column, checked_budget
from headrace.size_aware_batching.cost import (
    UNLIMITED,
    AtLeastOne,
    Capacity,
    FunctionCapacity,
    Limits,
    PaddedCapacity,
)
from headrace.size_aware_batching.planning.options import Options

FINE = 2**40  # units of a budget that sizes are rounded up to where they cannot stay what they are
COARSE = 2**19  # the same where several budgets are made into one


@dataclass(frozen=True)
class Sized:
    """Sizes ready for planning.

    Args:
        sizes: Shape ``[n]``, or ``[n, k]`` for several budgets; integers wherever sums are taken.
        limits: The budgets, in the unit of ``sizes``.
        kept: Samples that are planned, rising; None for all.
        oversize: Samples that no batch holds within its budget, rising.
    """

    sizes: NDArray[Any]
    limits: Limits
    kept: NDArray[np.int64] | None
    oversize: NDArray[np.int64]


Budget = int | float | list[int | float]


def plain_budget(max_total_size: Any) -> Budget:
    """Return a budget, or a list of them, as plain numbers.

    Raises:
        TypeError: If one is no real number.
        ValueError: If one is NaN, zero or negative.
    """
    given = max_total_size
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [plain_number(budget) for budget in given]
    return plain_number(given)


def plain_number(budget: Any) -> int | float:
    """Return one budget as a plain number; what is beyond 2**62 limits nothing."""
    number = checked_budget(budget)
    return math.inf if number >= UNLIMITED else number


def prepare(sizes: NDArray[Any], budget: Budget, options: Options) -> Sized:
    """Bring sizes and budgets into whole units, and deal with samples that are too large.

    Args:
        sizes: What `read_sizes` returned.
        budget: What `plain_budget` returned.
        options: What was asked for.

    Raises:
        ValueError: If budgets and columns of sizes differ in number, or a sample is too large and
            ``oversize="raise"``.
    """
    sizes = cut_sizes(sizes, options.max_length)
    table, budgets, capacity, over = summed(sizes, budget, options) if options.sums else counted(sizes, budget, options)
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
    return Sized(table, limits, kept, over)


def cut_sizes(sizes: NDArray[Any], max_length: float | None) -> NDArray[Any]:
    """Return what counts of the sizes: at most ``max_length``."""
    if max_length is None:
        return sizes
    if sizes.dtype.kind in "iu" and float(max_length).is_integer():
        shortened: NDArray[Any] = np.minimum(sizes, min(int(max_length), np.iinfo(sizes.dtype).max)).astype(sizes.dtype)
    else:
        shortened = np.minimum(sizes.astype(np.float64), max_length)
    return shortened


Parts = tuple[NDArray[Any], tuple[float, ...], Capacity | None, NDArray[np.int64]]


def summed(sizes: NDArray[Any], budget: Budget, options: Options) -> Parts:
    """Return sizes and budgets in units, no capacity, and which samples are too large, for costs that are sums."""
    limits = budgets_of(budget, sizes)
    table, budgets = whole_units(sizes, limits)
    over = np.flatnonzero(any_column(sizes > whole_limits(sizes, limits)))
    if table is not sizes or len(over):
        # What fits a batch of its own does so in rounded units, too; what does not is left out, or clipped to fit.
        table = np.minimum(table.astype(np.int64), budgets if table.ndim == 2 else budgets[0])
    if table.ndim == 2 and options.strategy != "sequential":
        return one_column(table, budgets), (COARSE,), None, over
    return table, budgets, None, over


def counted(sizes: NDArray[Any], budget: Budget, options: Options) -> Parts:
    """Return the same, and how many samples fit, for costs that depend on the count and the largest sample."""
    if sizes.ndim != 1:
        raise ValueError(f"sizes: got shape {sizes.shape}; cost={options.cost!r} takes one size a sample, [n]")
    (limit,) = budgets_of(budget, sizes)
    most = options.max_items or max(1, len(sizes))
    capacity: Capacity = PaddedCapacity(limit, options.length_multiple)
    if callable(options.cost):
        capacity = FunctionCapacity(options.cost, limit, most, options.length_multiple)
    over = np.zeros(0, np.int64)
    if len(sizes) and capacity(sizes.max(keepdims=True))[0] < 1:
        over = np.flatnonzero(capacity(sizes) < 1)
    return sizes, (limit,), AtLeastOne(capacity) if options.oversize == "own_batch" else capacity, over


def refuse_oversize(sizes: NDArray[Any], over: NDArray[np.int64], budget: Any, options: Options) -> None:
    """Raise an error that names samples that are too large, if that is what was asked for."""
    if len(over) and options.oversize == "raise":
        some = ", ".join(f"{index}: {sizes[index]}" for index in over[:5])
        raise ValueError(
            f"sizes: {len(over)} of {len(sizes)} samples exceed max_total_size={budget} by themselves "
            f"(index: size {some}{', ...' if len(over) > 5 else ''}): raise the budget, cut them with max_length, "
            "or choose oversize='skip' or 'own_batch'"
        )


def budgets_of(budget: Budget, sizes: NDArray[Any]) -> tuple[float, ...]:
    """Return one budget a column of sizes."""
    columns = 1 if sizes.ndim == 1 else sizes.shape[1]
    given = budget if isinstance(budget, list) else [budget]
    if len(given) != columns or not columns:
        raise ValueError(f"max_total_size: got {len(given)} budgets for sizes of shape {sizes.shape}: one a column")
    return tuple(given)


def whole_limits(sizes: NDArray[Any], budgets: tuple[float, ...]) -> NDArray[Any]:
    """Return the largest sizes that fit by themselves, to be compared with sizes exactly."""
    if sizes.dtype.kind not in "iu":
        return np.array(budgets, np.float64)
    return np.array([math.floor(budget) if budget < UNLIMITED else UNLIMITED for budget in budgets], np.int64)


def whole_units(sizes: NDArray[Any], budgets: tuple[float, ...]) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Turn sizes into integers whose sums are exact and stay inside 63 bits.

    Integers stay what they are unless their total leaves 62 bits. All else is rounded up to a 2**40th of the budget:
    sums never come out smaller than they are.
    """
    whole = sizes.dtype.kind in "iu" or (bool((sizes == np.floor(sizes)).all()) and float(sizes.max(initial=0)) < 2**53)
    if whole and all(budget >= 1 for budget in budgets):
        integers = sizes if sizes.dtype.kind in "iu" else sizes.astype(np.int64)
        limits = [min(UNLIMITED, math.floor(budget) if math.isfinite(budget) else UNLIMITED) for budget in budgets]
        if float(sizes.sum(axis=0, dtype=np.float64).max(initial=0)) < UNLIMITED:
            return integers, tuple(limits)
        return coarser_units(integers, limits)
    divisor = np.array(budgets) if sizes.ndim == 2 else np.float64(budgets[0])
    with np.errstate(over="ignore"):
        units = np.minimum(np.ceil(sizes / divisor * FINE), 2.0**60).astype(np.int64)
    return units, (FINE,) * len(budgets)


def coarser_units(sizes: NDArray[Any], limits: list[int]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Count integers in larger units, so that no budget has more than about 40 bits."""
    units = [max(1, -(-limit // FINE)) for limit in limits]
    divisor = np.array(units) if sizes.ndim == 2 else units[0]
    return -(-sizes.astype(np.int64) // divisor), tuple(
        limit // unit for limit, unit in zip(limits, units, strict=True)
    )


def one_column(table: NDArray[Any], budgets: tuple[int, ...]) -> NDArray[np.int32]:
    """Reduce several sizes to one: the largest share of a budget that a sample takes.

    Where these shares sum to at most 1, so do those of every budget.
    """
    shares = np.ceil(table * (COARSE / np.array(budgets, np.float64)))
    column: NDArray[np.int32] = np.minimum(shares.max(axis=1), COARSE + 1).astype(np.int32)
    return column
