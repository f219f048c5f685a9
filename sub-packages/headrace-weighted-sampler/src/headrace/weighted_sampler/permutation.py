"""Stateless shuffles: which place comes at which draw, by 64-bit integer arithmetic alone.

No generator is carried from draw to draw, so any stretch can be computed by itself, and the result is the
same on every platform and numpy version.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
BLOCK = 2**20  # numbers sorted in one call; bounds the memory when many short passes are drawn


def splitmix64(words: Words) -> Words:
    """Scramble 64-bit words, a bijection of the 2**64 words.

    One step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014) with each word as the generator's state.

    Args:
        words: Array of any shape.

    Returns:
        A new array of that shape.

    >>> hex(splitmix64(np.zeros(1, np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    mixed: Words = words + GOLDEN  # arrays of unsigned words wrap, which is what is wanted
    mixed ^= mixed >> np.uint64(30)
    mixed *= FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derive(*words: int | Words) -> Words:
    """Fold words into keys; every word and its place in the list matter.

    Args:
        words: Integers from 0 to 2**64 - 1, or arrays of them, which broadcast.

    Returns:
        The keys, shape ``[n]``; ``[1]`` when all words are integers.

    >>> derive(7, 1).shape, derive(7, np.arange(4, dtype=np.uint64)).shape
    ((1,), (4,))
    """
    folded = np.zeros(1, np.uint64)
    for word in words:
        folded = splitmix64(folded ^ splitmix64(np.atleast_1d(np.asarray(word, np.uint64))))
    return folded


def shuffles(size: int, keys: Words) -> Indices:
    """Shuffle ``0 .. size - 1`` once for each key.

    Each place gets a scrambled word and the places are put in the order of their words. For one key the
    words are all different, so there are no ties and the order does not depend on how the sort works.

    Args:
        size: Number of places.
        keys: Shape ``[p]``.

    Returns:
        Shape ``[p, size]``; every row is a permutation.

    >>> sorted(shuffles(5, derive(0))[0].tolist())
    [0, 1, 2, 3, 4]
    """
    places = splitmix64(np.arange(size, dtype=np.uint64))
    order: Indices = np.argsort(splitmix64(keys[:, None] ^ places), axis=1).astype(np.int64, copy=False)
    return order


def places(size: int, key: int, start: int, stop: int) -> Indices:
    """List the places of draws ``start .. stop - 1`` from an endless run of passes.

    Draw ``k`` is place ``k % size`` of pass ``k // size``, and every pass has its own shuffle: a place comes
    again only after all the others have come.

    Args:
        size: Number of places in one pass, at least 1.
        key: A 64-bit word.
        start: First draw.
        stop: One past the last draw.

    Returns:
        Shape ``[stop - start]``, values ``0 .. size - 1``.

    >>> drawn = places(4, key=0, start=2, stop=10)
    >>> sorted(drawn[2:6].tolist()) == sorted(places(4, 0, 4, 8).tolist()) == [0, 1, 2, 3]
    True
    """
    if stop <= start:
        return np.empty(0, np.int64)
    first, last, rows = start // size, (stop - 1) // size, max(1, BLOCK // size)
    blocks = [_passes(size, key, low, min(low + rows, last + 1)) for low in range(first, last + 1, rows)]
    drawn: Indices = np.concatenate(blocks)
    return drawn[start - first * size : stop - first * size]


def _passes(size: int, key: int, low: int, high: int) -> Indices:
    numbers = np.arange(high - low, dtype=np.uint64) + np.uint64(low % 2**64)
    return shuffles(size, derive(key, numbers)).ravel()
