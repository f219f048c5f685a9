"""One listing for each way of asking: which modules work together for a strategy and an order."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning import build
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.ordered import Formed, Sequential
from headrace.size_aware_batching.planning.orders import Natural, Order, Shuffled
from headrace.size_aware_batching.planning.prepared import Sized
from headrace.size_aware_batching.planning.sorting import sorted_by_size
from headrace.size_aware_batching.planning.windowed import Chunk, Windowed

BUILDERS = {"stratified": build.stratified, "bucketed": build.bucketed, "packed": build.packed}


class Listing(Protocol):
    """The batches of every epoch, which none of them need be planned for beforehand."""

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""

    def chunks(self, epoch_key: int, position: int) -> Iterator[Chunk]:
        """Yield the batches behind the first ``position`` samples of the epoch's list."""

    def count_from(self, epoch_key: int, position: int) -> int:
        """Return how many batches these are."""


def listing(sized: Sized, options: Options, order: Order | None = None) -> Listing:
    """Choose how batches are listed.

    Args:
        sized: Sizes and budgets.
        options: What was asked for.
        order: An order that was given; None for one of our own.
    """
    if order is None and options.shuffle and options.strategy != "sequential":
        return whole(sized, options)
    if order is None:
        n_samples = len(sized.sizes) if sized.kept is None else len(sized.kept)
        order = Shuffled(n_samples, sized.kept) if options.shuffle else Natural(n_samples, sized.kept)
    if options.strategy == "sequential" or order.n_samples == 0:
        return Sequential(order, sized.sizes.__getitem__, sized.limits)
    return in_windows(sized, options, order)


def whole(sized: Sized, options: Options) -> Listing:
    """List batches over all samples, sorted by size once."""
    sizes = sized.sizes if sized.kept is None else sized.sizes[sized.kept]
    if not len(sizes):
        return Sequential(Natural(0), sizes.__getitem__, sized.limits)
    order, falling = sorted_by_size(sizes)
    if sized.kept is not None:
        order = sized.kept[order].astype(order.dtype)
    n_windows = None if options.window is None else max(1, round(len(order) / options.window))
    return BUILDERS[options.strategy](order, falling, sized.limits, n_windows)


def in_windows(sized: Sized, options: Options, order: Order) -> Listing:
    """Form batches inside windows of an order, each window as if it were all there is."""
    build_one = BUILDERS[options.strategy]

    def form(samples: NDArray[Any]) -> Windowed:
        sizes = sized.sizes[samples]
        by_size, falling = sorted_by_size(sizes)
        return build_one(samples[by_size], falling, sized.limits, 1)

    length = options.window or window_length(sized, options)
    return Formed(order, max(1, round(order.n_samples / length)), form)


def window_length(sized: Sized, options: Options) -> int:
    """Return how many samples of an order make a window, about."""
    if options.strategy == "bucketed":
        return build.BUCKETED
    if options.strategy == "packed":
        return build.PACKED
    mean = float(sized.sizes.mean(dtype=np.float64))
    return int(np.clip(build.BATCHES * sized.limits.budgets[0] / max(mean, 1.0), 2**10, 2**17))
