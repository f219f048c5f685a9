"""From sizes and options to a listing of batches: how many windows, and what one of them looks like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.planning import template as templates
from headrace.size_aware_batching.planning.strata import Strata
from headrace.size_aware_batching.planning.template import Template
from headrace.size_aware_batching.planning.windowed import Windowed
from headrace.size_aware_batching.strategies.stratified import GRID

TARGET = 0.998  # of a budget that random dealing aims at; what is left lets nearly every window fit at once
BATCHES = 512  # of a window, about: enough to balance, few enough to list in a millisecond
WIDE = 2**40  # a budget in the units of the wide grid
MANY = 256  # samples in a batch whose rounding up the narrow grid would show
FAR = 2**43  # budgets from here on are divided, not multiplied, to get to the dealing grid
LISTED = 170_000  # samples that are listed together, at most, unless one window holds more
BUCKETED, LEAST_BUCKETED = 2**17, 2**12
PACKED = 2**18
PACKED_WASTE = 8e-5  # wasted share that is small enough
BRIM = 3e-5  # share that best-fit leaves empty


@dataclass(frozen=True)
class Grid:
    """Maps integer sizes to units of the dealing grid, rounded up: sums never come out smaller than they are.

    Args:
        budget: Of a batch, in the unit of the sizes.
        wide: Whether to count in 64 bits: slower, but fine enough for batches of very many samples.
    """

    budget: int
    wide: bool = False

    @property
    def unit(self) -> int:
        """What a unit of the grid stands for, where sizes are too large to be multiplied."""
        return max(1, -(-self.budget // (WIDE if self.wide else GRID)))

    @property
    def exact(self) -> bool:
        """Whether sizes stay what they are."""
        return self.unit == 1

    @property
    def capacity(self) -> int:
        """The budget in units of the grid."""
        return self.budget // self.unit if self.exact or self.wide or self.budget >= FAR else GRID

    def __call__(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return sizes in units of the grid, in 32 or 64 bits."""
        kind = np.int64 if self.wide else np.int32
        if self.exact:
            return sizes.astype(kind)
        whole = sizes.astype(np.int64)
        multiplied = not self.wide and self.budget < FAR
        units = -(-(whole * GRID) // self.budget) if multiplied else -(-whole // self.unit)
        # What fits a batch of its own does so here, too: rounded up, nothing but zeros can join it then.
        return np.minimum(units, self.capacity).astype(kind)


def together(depth: int) -> int:
    """Return how many windows are listed together: as many as take milliseconds."""
    return max(1, LISTED // depth)


def both(strata: Strata, firsts: NDArray[Any], plan: Callable[[NDArray[Any]], Template]) -> tuple[Template, Template]:
    """Plan windows with a sample of every stratum, and windows without one of the last."""
    full = plan(firsts)
    short = plan(firsts[:-1]) if strata.n_full < strata.n_windows and strata.depth > 1 else full
    return full, short


def stratified(order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None) -> Windowed:
    """List batches of nearly equal sum."""
    budget = limits.budgets[0]
    total = float(falling.sum(dtype=np.float64))
    items = len(falling) * budget / max(total, 1.0)
    grid = Grid(budget, wide=budget > GRID and items > MANY)
    capacity = grid.capacity
    in_grid = Limits((capacity,), most_items=limits.most_items, quadratic=limits.quadratic * budget / capacity)
    needed = max(total / (budget * TARGET), len(falling) / limits.most_items)
    if n_windows is None:
        n_windows = max(1, min(round(needed / BATCHES), len(falling)))
    batches = max(1, int(np.ceil(needed / n_windows)))
    strata = Strata(len(falling), n_windows)
    firsts = grid(falling[strata.firsts()])
    pair = both(strata, firsts, lambda part: templates.stratified(part, in_grid, batches))
    return Windowed(order, falling, strata, pair, in_grid, grid, together(strata.depth))


def bucketed(order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None) -> Windowed:
    """List batches of neighbours in size."""
    length = len(falling)
    if n_windows is None:
        n_windows = max(1, round(length / min(BUCKETED, max(LEAST_BUCKETED, length // 8))))
    strata = Strata(length, n_windows)
    pair = both(strata, falling[strata.firsts()], lambda part: templates.bucketed(part, limits))
    return Windowed(order, falling, strata, pair, limits, None, together(strata.depth))


def packed(order: NDArray[Any], falling: NDArray[Any], limits: Limits, n_windows: int | None = None) -> Windowed:
    """List batches that are filled to the brim."""
    if n_windows is None:
        n_windows = packed_windows(falling, limits.budgets[0])
    strata = Strata(len(falling), n_windows)
    firsts = falling[strata.firsts()].astype(np.int64)
    pair = both(strata, firsts, lambda part: templates.packed(part, limits))
    return Windowed(order, falling, strata, pair, limits, None, together(strata.depth))


def packed_windows(falling: NDArray[Any], budget: int) -> int:
    """Return the number of windows, of the usual length or twice that, that wastes least.

    A window wastes what its last batch leaves empty and what its samples are smaller than the strata's firsts.
    """
    total = float(falling.sum(dtype=np.float64))
    best, least = 1, np.inf
    for length, enough in ((PACKED, PACKED_WASTE), (2 * PACKED, np.inf)):
        middle = max(1, round(len(falling) / length))
        fewest = max(1, -(-len(falling) // (2 * PACKED)))
        for count in np.unique(np.linspace(max(fewest, 0.9 * middle), 1.3 * middle + 1, 16).astype(int)).tolist():
            firsts = float(falling[::count].sum(dtype=np.float64))
            waste = count * np.ceil(firsts / budget * (1 + BRIM)) * budget / max(total, 1.0) - 1
            if waste < least:
                best, least = count, waste
        if least <= enough:
            break
    return best
