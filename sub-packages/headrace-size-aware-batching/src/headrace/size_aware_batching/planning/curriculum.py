"""Short samples first: which share of the batches may come after how many."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.random import Words

Competence = Callable[[NDArray[np.int64]], NDArray[np.float64]]  # batches before -> share of the batches that may come

FIRST = 0.01  # the share at the beginning, as in the paper
TOGETHER = 2  # ramps' worth of batches that are planned together: the long ones that wait come by their end


def competence(passed: NDArray[np.int64], ramp: int) -> NDArray[np.float64]:
    """Return the share of the batches, the shortest ones, that may come after so many since the first epoch.

    The square root of Platanios et al., "Competence-based curriculum learning for neural machine translation" (NAACL
    2019): longer batches come in at a rate that falls as there are more to choose from.

    >>> competence(np.array([0, 250, 1000, 5000]), 1000).round(2).tolist()
    [0.01, 0.5, 1.0, 1.0]
    """
    return np.sqrt(FIRST**2 + (1 - FIRST**2) * np.minimum(passed / ramp, 1))


def turns(words: Words, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return when each of some things comes: each turn draws one of those left in the first share of all.

    Where a share holds nothing any more, the next one comes. Shares do not fall.

    >>> turns(np.array([5, 5, 5], np.uint64), np.array([0.1, 0.1, 1.0])).tolist()
    [0, 1, 2]
    """
    count = len(words)
    stops = np.maximum(np.ceil(shares * count).astype(np.int64), np.arange(1, count + 1)).tolist()
    found = np.empty(count, np.int64)
    left: list[int] = []
    known = 0
    for turn, (stop, word) in enumerate(zip(stops, (words >> np.uint64(1)).tolist(), strict=True)):
        left.extend(range(known, stop))
        known = max(known, stop)
        drawn = word % len(left)
        left[drawn], left[-1] = left[-1], left[drawn]
        found[left.pop()] = turn
    return found
