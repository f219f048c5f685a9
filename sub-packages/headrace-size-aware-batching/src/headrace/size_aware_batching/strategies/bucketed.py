"""Neighbours in size share a batch: the least padding."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.cost import Limits
from headrace.size_aware_batching.strategies.sequential import NOTHING_FITS, next_fit


def cut(falling: NDArray[Any], limits: Limits) -> NDArray[np.int64]:
    """Cut sizes that fall into batches; the first of a batch is its largest and sets how many it holds.

    Args:
        falling: Sizes, largest first, shape ``[n]``; each fits a batch of its own.
        limits: The budgets.

    Returns:
        Where each batch begins and, last, where the last one ends; shape ``[batches + 1]``.

    >>> from headrace.size_aware_batching.cost import PaddedCapacity
    >>> cut(np.array([50, 40, 20, 10, 10]), Limits(capacity=PaddedCapacity(100))).tolist()
    [0, 2, 5]
    """
    if limits.capacity is None:
        return next_fit(falling, limits)
    caps = np.minimum(limits.capacity(falling), limits.most_items).tolist()
    cuts, begin, length = [0], 0, len(caps)
    while begin < length:
        if caps[begin] < 1:
            raise ValueError(NOTHING_FITS.format(size=falling[begin]))
        begin = min(length, begin + limits.floor(caps[begin]))
        cuts.append(begin)
    return np.array(cuts, np.int64)
