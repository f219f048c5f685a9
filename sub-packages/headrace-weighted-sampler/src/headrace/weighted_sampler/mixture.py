"""The global order of one epoch: which sample of which range stands at which position."""

import hashlib
from collections.abc import Sequence

import numpy as np

from headrace.weighted_sampler.permutation import Indices, derive, places, shuffles
from headrace.weighted_sampler.weights import WeightedRange

# What a key is for, so that draws and order never share one.
DRAWS, ORDER = 1, 2


def epoch_length(ranges: Sequence[WeightedRange]) -> int:
    """Count the draws of one epoch, all ranks together."""
    return sum(part.draws for part in ranges)


def range_draws(part: WeightedRange, seed: int, epoch: int) -> Indices:
    """List the dataset indices that ``epoch`` draws from one range, in the order of drawing.

    The draws run on from epoch to epoch: epoch ``e`` has draws ``e * draws .. (e + 1) * draws - 1`` of the
    range's passes. The keys come from the range's own bounds, so other ranges do not matter.

    Args:
        part: The range.
        seed: 64-bit word.
        epoch: From 0.

    Returns:
        Shape ``[part.draws]``.
    """
    key = int(derive(seed, DRAWS, part.begin, part.end)[0])
    return part.begin + places(part.size, key, epoch * part.draws, (epoch + 1) * part.draws)


def epoch_order(ranges: Sequence[WeightedRange], seed: int, epoch: int) -> Indices:
    """Shuffle the draws of all ranges into the one sequence that the ranks share.

    Args:
        ranges: Sorted by their first index.
        seed: 64-bit word.
        epoch: From 0.

    Returns:
        Dataset indices, shape ``[epoch_length(ranges)]``. Takes time and memory in proportion to that.

    >>> from fractions import Fraction
    >>> order = epoch_order([WeightedRange(0, 3, Fraction(2))], seed=0, epoch=0)
    >>> sorted(order.tolist())
    [0, 0, 1, 1, 2, 2]
    """
    draws = np.concatenate([range_draws(part, seed, epoch) for part in ranges])
    mixed: Indices = draws[shuffles(len(draws), derive(seed, ORDER, epoch))[0]]
    return mixed


def fingerprint(length: int, ranges: Sequence[WeightedRange]) -> str:
    """Name the data and the weights that an order depends on: ``"<dataset length>-<digest>"``."""
    text = ";".join(f"{part.begin},{part.end},{part.draws}" for part in ranges)
    return f"{length}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
