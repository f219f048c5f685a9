"""Keyed shuffles by integer arithmetic alone, the same on every platform."""

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.random import Words, fold_in, splitmix64

LONGEST_ROW = 2**11  # numbers that are shuffled together: few, so that sorting them stays in the cache
PLACE = np.int32(LONGEST_ROW - 1)  # bits of a number's place


def random_words(key: int, count: int) -> Words:
    """Return the first ``count`` words of the stream with this key."""
    return splitmix64(np.arange(count, dtype=np.uint64) ^ fold_in(key))


def shuffle_rows(keys: Words, length: int) -> NDArray[np.int32]:
    """Shuffle ``0 .. length - 1``, at most 2**11 numbers, once for each key; shape ``[keys, length]``.

    >>> sorted(shuffle_rows(fold_in(3), 5)[0].tolist())
    [0, 1, 2, 3, 4]
    """
    # One word gives two numbers of 31 bits; their low bits make way for the place, so that no two are equal.
    half = -(-length // 2)
    words = splitmix64(keys[:, None] ^ splitmix64(np.arange(half, dtype=np.uint64)))
    marks = np.empty((len(keys), 2 * half), np.int32)
    marks[:, :half] = (words >> np.uint64(33)).astype(np.int32)
    marks[:, half:] = (words & np.uint64(0x7FFFFFFF)).astype(np.int32)
    marks = marks[:, :length]
    marks &= ~PLACE
    marks |= np.arange(length, dtype=np.int32)
    marks.sort(axis=1)
    marks &= PLACE
    return marks


def shuffle_groups(key: int, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a shuffle of the places of a list in which every place keeps its group; ascending groups, from 0 on.

    >>> shuffle_groups(1, np.array([0, 0, 0, 1, 1])).tolist()[3:] in ([3, 4], [4, 3])
    True
    """
    count = len(groups)
    if not count:
        return np.zeros(0, np.int64)
    low = np.uint64(max(1, (count - 1).bit_length()))
    high = np.uint64(64 - max(1, int(groups[-1]).bit_length()))
    # Group, random bits and place in one word: sorting words is faster than sorting places by words.
    words = random_words(key, count) >> (np.uint64(64) - high + low) << low
    words |= groups.astype(np.uint64) << high
    words |= np.arange(count, dtype=np.uint64)
    words.sort()
    places: NDArray[np.int64] = (words & np.uint64((1 << int(low)) - 1)).astype(np.int64)
    return places


def shuffle_blocks(key: int, count: int, block: int) -> NDArray[np.int64]:
    """Return a shuffle of ``0 .. count - 1`` in which every number stays in its block of so many.

    >>> sorted(shuffle_blocks(1, 5, 3)[:3].tolist())
    [0, 1, 2]
    """
    if block > LONGEST_ROW:
        return shuffle_groups(key, np.arange(count) // block)
    begins = np.arange(0, count, block)
    places: NDArray[np.int64] = (shuffle_rows(fold_in(key, begins.astype(np.uint64)), block) + begins[:, None]).ravel()
    return places[places < count]
