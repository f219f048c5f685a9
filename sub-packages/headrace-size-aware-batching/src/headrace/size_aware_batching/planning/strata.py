"""Samples sorted by size, cut into strata, dealt to windows that are all alike.

With ``n_windows`` windows, stratum j holds ``n_windows`` consecutive samples of the sorted order and gives each
window one of them. Every window then has the same spread of sizes, can be listed alone, and none of its samples
is larger than the first of the sample's stratum: what is planned for the first samples fits every window.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.keyed import derive, scramble


@dataclass(frozen=True)
class Strata:
    """How ``n_samples`` sorted samples are dealt to ``n_windows`` windows (at most as many as samples)."""

    n_samples: int
    n_windows: int

    @property
    def depth(self) -> int:
        """Number of strata, the samples in a full window."""
        return -(-self.n_samples // self.n_windows)

    @property
    def n_full(self) -> int:
        """Number of windows that have a sample of the last stratum: the first ones."""
        return self.n_samples - (self.depth - 1) * self.n_windows

    def start(self, window: int) -> int:
        """Return the number of samples in the windows before this one."""
        return window * (self.depth - 1) + min(window, self.n_full)

    def window_of(self, position: int) -> int:
        """Return the window that holds the sample at a position of the epoch."""
        full = self.n_full * self.depth
        if position < full or self.depth == 1:
            return position // self.depth
        return self.n_full + (position - full) // (self.depth - 1)

    def firsts(self) -> NDArray[np.int64]:
        """Return the place, in the sorted order, of each stratum's first sample, shape ``[depth]``."""
        return np.arange(self.depth, dtype=np.int64) * self.n_windows

    def shifts(self, key: int) -> NDArray[np.int64]:
        """Return each stratum's keyed rotation, shape ``[depth]``; the last stratum, which may be short, has none."""
        words = scramble(np.arange(self.depth, dtype=np.uint64) ^ derive(key)) >> np.uint64(32)
        shifts = ((words * np.uint64(self.n_windows)) >> np.uint64(32)).astype(np.int64)
        shifts[-1] = 0
        return shifts

    def places(self, first: int, stop: int, shifts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in the sorted order of the samples of some windows.

        Args:
            first: First window.
            stop: One past the last window.
            shifts: What ``shifts`` returned, shape ``[depth]``.

        Returns:
            Shape ``[stop - first, depth]``. Windows from ``n_full`` on have no sample in the last column; what
            stands there is a valid place but not theirs.
        """
        places = np.arange(first, stop, dtype=np.int64)[:, None] + shifts
        places -= (places >= self.n_windows) * np.int64(self.n_windows)
        places += self.firsts()
        np.minimum(places, self.n_samples - 1, out=places)
        return places
