"""Random words as a function of a key: 64-bit integer arithmetic, the same on every platform and numpy version."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
HALF = np.uint64(32)


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


def below(words: Words, bound: int) -> Indices:
    """Scale random words to ``0 .. bound - 1``.

    Args:
        words: Random words of any shape.
        bound: At most 2**31. The values are even to within ``bound / 2**32``.

    >>> below(np.array([0, 2**64 - 1], np.uint64), 10).tolist()
    [0, 9]
    """
    scaled: Indices = (((words >> HALF) * np.uint64(bound)) >> HALF).view(np.int64)
    return scaled
