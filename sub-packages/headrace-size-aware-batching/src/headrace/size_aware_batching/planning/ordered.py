"""An epoch's batches over a given order: cut as it comes, or formed anew inside windows of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.planning.orders import Order
from headrace.size_aware_batching.planning.windowed import Chunk, Windowed
from headrace.size_aware_batching.strategies.sequential import next_fit

FIRST, MOST = 2**14, 2**18  # samples looked at in one go: few at first, so that the first batch comes soon


@dataclass(frozen=True)
class Sequential:
    """Batches in the order's own order. From any batch's first position on, they come out the same."""

    order: Order
    sizes: Callable[[NDArray[Any]], NDArray[Any]]
    limits: Limits
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return self.order.n_samples

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on."""
        length, reach = self.n_samples, FIRST
        while position < length:
            stop = min(length, position + reach)
            samples = self.order.take(epoch_key, position, stop)
            offsets = next_fit(self.sizes(samples), self.limits, last=stop == length)
            reach = min(2 * reach, MOST) if len(offsets) > 1 else 2 * reach
            if len(offsets) > 1:
                yield samples[: offsets[-1]], offsets
                position += int(offsets[-1])

    def count_from(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on; they have to be planned for that."""
        known = self.counts.get((epoch_key, position))
        if known is None:
            known = sum(len(offsets) - 1 for _, offsets in self.chunks(epoch_key, position))
            self.counts.clear()
            self.counts[epoch_key, position] = known
        return known


@dataclass(frozen=True)
class Formed:
    """Batches formed inside windows of the order, each window by itself.

    Args:
        order: The samples in order.
        n_windows: Windows of an epoch, all of about the same number of positions.
        form: Plans one window: its samples to their batches.
    """

    order: Order
    n_windows: int
    form: Callable[[NDArray[Any]], Windowed]
    counts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Samples in an epoch."""
        return self.order.n_samples

    def start(self, window: int) -> int:
        """Return the first position of a window."""
        return window * self.n_samples // self.n_windows

    def window_of(self, position: int) -> int:
        """Return the window of a position."""
        window = position * self.n_windows // self.n_samples
        while self.start(window + 1) <= position:
            window += 1
        return window

    def window(self, epoch_key: int, window: int) -> Chunk:
        """Return the batches of one window."""
        samples = self.order.take(epoch_key, self.start(window), self.start(window + 1))
        return self.form(samples).list_unit(epoch_key ^ window, 0)

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches from a position on; the first may be the rest of a batch."""
        if position >= self.n_samples:
            return
        begin = self.window_of(position)
        skip = position - self.start(begin)
        indices, offsets = self.window(epoch_key, begin)
        yield indices[skip:], np.concatenate([[0], offsets[offsets > skip] - skip])
        for window in range(begin + 1, self.n_windows):
            yield self.window(epoch_key, window)

    def count_from(self, epoch_key: int, position: int) -> int:
        """Return the number of batches from a position on; the windows have to be planned for that, once."""
        if position >= self.n_samples:
            return 0
        if epoch_key not in self.counts:
            self.counts.clear()
            self.counts[epoch_key] = [len(self.window(epoch_key, w)[1]) - 1 for w in range(self.n_windows)]
        begin = self.window_of(position)
        _, offsets = self.window(epoch_key, begin)
        rest = int((offsets > position - self.start(begin)).sum())
        return rest + sum(self.counts[epoch_key][begin + 1 :])
