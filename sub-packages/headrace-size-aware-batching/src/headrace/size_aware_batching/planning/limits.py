"""What a batch may hold: its budgets, read and checked, and further limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._validation import UNLIMITED, Number, real_number

Capacity = Callable[[NDArray[Any]], NDArray[np.int64]]  # largest sizes -> how many samples fit


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    ``budgets`` are the largest sums, one for each column of sizes. With ``capacity`` (costs of the count and the
    largest sample) the largest size says how many samples fit. Batches of more than ``multiple`` samples hold a
    multiple of it. ``quadratic`` is the weight of a size's square when batches are compared by their time, as in
    attention.
    """

    budgets: tuple[int, ...] = ()
    capacity: Capacity | None = None
    most_items: int = UNLIMITED
    multiple: int = 1
    quadratic: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether nothing but budgets limits a batch."""
        return self.most_items == UNLIMITED and self.multiple == 1

    def work(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Return the time that samples take, in units of their size."""
        exact = sizes.astype(np.float64)
        return exact + self.quadratic * exact**2

    def floor(self, count: int) -> int:
        """Return the largest number of samples up to ``count`` that ``multiple`` allows."""
        return count - count % self.multiple if count > self.multiple else count


Budget = int | float | list[int | float]


def checked_budget(max_total_size: object) -> Number:
    """Return a budget as a number greater than 0; infinity means that everything fits.

    >>> checked_budget(4096)
    4096
    """
    number = real_number(max_total_size, "max_total_size")
    if number <= 0:
        raise ValueError(
            f"max_total_size must be greater than 0, got {number}: where nothing limits a batch give math.inf"
        )
    if UNLIMITED <= number < math.inf:
        raise ValueError(
            f"max_total_size must be less than 2**62, or math.inf for no limit, got {number}: count sizes and budget "
            "in a larger unit"
        )
    return number


def plain_budget(max_total_size: Any) -> Budget:
    """Return a budget, or a list of them, as plain numbers."""
    given = max_total_size
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    numbers: list[int | float] = [checked_budget(budget) for budget in (given if several else [given])]
    return numbers if several else numbers[0]


def budgets_of(budget: Budget, sizes: NDArray[Any]) -> tuple[float, ...]:
    """Return one budget a column of sizes."""
    columns = 1 if sizes.ndim == 1 else sizes.shape[1]
    given = budget if isinstance(budget, list) else [budget]
    if len(given) != columns or not columns:
        raise ValueError(
            f"max_total_size must have one budget for each column of sizes, got {len(given)} for shape {sizes.shape}"
        )
    return tuple(given)
