"""In which order samples come: as they stand, shuffled by a key, or as a sampler says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.keyed import derive, shuffle_blocks
from headrace.size_aware_batching.planning.strata import Strata

WINDOW = 2**11  # samples that are shuffled in one go: few, so that sorting their marks stays in the cache


class Order(Protocol):
    """The samples of an epoch, in order."""

    @property
    def n_samples(self) -> int:
        """Positions of an epoch."""

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:
        """Return the samples at these positions of the epoch."""


@dataclass(frozen=True)
class Natural:
    """The samples as they stand: 0, 1, 2, ... or the ones that were kept."""

    n_samples: int
    kept: NDArray[Any] | None = None

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:  # noqa: ARG002  # the same in all epochs
        """Return the samples at these positions."""
        return np.arange(start, stop) if self.kept is None else self.kept[start:stop]


@dataclass(frozen=True)
class Shuffled:
    """A keyed shuffle that can be read from any position.

    Samples that stand together go to different windows, one each, and every window is shuffled.
    """

    n_samples: int
    kept: NDArray[Any] | None = None

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:
        """Return the samples at these positions."""
        stop = min(stop, self.n_samples)
        if start >= stop:
            return np.zeros(0, np.int64)
        strata = Strata(self.n_samples, -(-self.n_samples // WINDOW))
        shifts = strata.shifts(int(derive(epoch_key, 3)[0]))
        first, last = strata.window_of(start), strata.window_of(stop - 1)
        parts = []
        for begin, end, depth in (
            (first, min(last + 1, strata.n_full), strata.depth),
            (max(first, strata.n_full), last + 1, strata.depth - 1),
        ):
            if begin < end and depth:
                places = strata.places(begin, end, shifts)[:, :depth]
                keys = derive(epoch_key, np.arange(begin, end, dtype=np.uint64), 4)
                mixed = shuffle_blocks(keys, depth, WINDOW)
                rows = np.arange(len(keys), dtype=np.int64)[:, None] * depth
                parts.append(places.ravel()[(mixed + rows).ravel()])
        offset = strata.start(first)
        taken = np.concatenate(parts)[start - offset : stop - offset]
        return taken if self.kept is None else self.kept[taken]


@dataclass(frozen=True)
class Given:
    """An order that somebody else gives: a function from two positions to the samples between them."""

    n_samples: int
    give: Callable[[int, int], NDArray[Any]]

    def take(self, epoch_key: int, start: int, stop: int) -> NDArray[Any]:  # noqa: ARG002  # the giver's affair
        """Return the samples at these positions."""
        return self.give(start, min(stop, self.n_samples))
