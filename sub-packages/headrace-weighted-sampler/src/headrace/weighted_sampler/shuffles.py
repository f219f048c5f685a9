"""True shuffles of short lists: all orders are alike, and one sort makes many."""

import numpy as np

from headrace.weighted_sampler.keyed import Indices, Words, splitmix64

MOST = 2**16  # places of the longest list
PLACE = np.uint64(MOST - 1)


def shuffles(size: int, keys: Words) -> Indices:
    """Shuffle ``0 .. size - 1`` once for each key.

    Each place is written below a scrambled word of 48 bits, and the words are sorted. No two words are the
    same, so the order does not depend on how the sort works.

    Args:
        size: Number of places, at most 2**16.
        keys: Shape ``[p]``.

    Returns:
        Shape ``[p, size]``; every row is a permutation.

    >>> from headrace.weighted_sampler.keyed import derive
    >>> sorted(shuffles(5, derive(0))[0].tolist())
    [0, 1, 2, 3, 4]
    """
    places = np.arange(size, dtype=np.uint64)
    words = splitmix64(keys[:, None] ^ splitmix64(places))
    words &= ~PLACE
    words |= places
    words.sort(axis=1)
    words &= PLACE
    return words.view(np.int64)
