"""The order of samples: shuffled by a key, or as a function gives it."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.random import LONGEST_ROW, fold_in, shuffle_rows
from headrace.size_aware_batching.planning.strata import Strata


@dataclass(frozen=True)
class ShuffledOrder:
    """A keyed shuffle readable from any position: neighbours go to different windows, each of which is shuffled."""

    n_samples: int
    kept: NDArray[Any] | None = None

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:
        """Return the samples at these positions of the epoch."""
        stop = min(stop, self.n_samples)
        if start >= stop:
            return np.zeros(0, np.int64)
        strata = Strata(self.n_samples, -(-self.n_samples // LONGEST_ROW))
        shifts = strata.shifts(int(fold_in(epoch_key, 3)[0]))
        first, last = strata.window_of(start), strata.window_of(stop - 1)
        parts = []
        for begin, end, depth in (
            (first, min(last + 1, strata.n_full), strata.depth),
            (max(first, strata.n_full), last + 1, strata.depth - 1),
        ):
            if begin < end and depth:
                places = strata.places(begin, end, shifts)[:, :depth]
                keys = fold_in(epoch_key, np.arange(begin, end, dtype=np.uint64), 4)
                rows = np.arange(len(keys), dtype=np.int64)[:, None] * depth
                parts.append(places.ravel()[(shuffle_rows(keys, depth) + rows).ravel()])
        offset = strata.start(first)
        taken = np.concatenate(parts)[start - offset : stop - offset]
        return taken if self.kept is None else self.kept[taken]


@dataclass(frozen=True)
class SliceOrder:
    """An order given by a function from two positions to the samples between them.

    ``draw`` gives a position's place in the sampler's whole order of the epoch. It never falls: of samples that stand
    together in another order, as windows may leave them, it is the last one. ``read`` are the draws before all these.
    """

    n_samples: int
    give: Callable[[int, int], NDArray[Any]]
    epoch: Any = None  # of a sampler that is asked; another one makes this another order
    draw: Callable[[int], int] = int
    read: int = 0

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:  # noqa: ARG002  # the function knows the epoch
        """Return the samples at these positions."""
        return self.give(start, min(stop, self.n_samples))

    def place_of(self, draw: int) -> int:
        """Return the first position of a draw or a later one."""
        return bisect_left(range(self.n_samples), draw, key=self.draw)


Order: TypeAlias = ShuffledOrder | SliceOrder  # the samples of an epoch, in order


def natural_order(n_samples: int, kept: NDArray[Any] | None) -> SliceOrder:
    """Return the samples in their own order: 0, 1, 2, ... or those that were kept."""
    return SliceOrder(n_samples, np.arange if kept is None else lambda start, stop: kept[start:stop])
