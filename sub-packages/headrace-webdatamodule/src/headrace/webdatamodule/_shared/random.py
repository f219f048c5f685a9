"""Random words by integer arithmetic alone: keyed, counter-based, the same on every platform."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def splitmix64(words: Words) -> Words:
    """Scramble 64-bit words, a bijection of the 2**64 words.

    One step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014) with each word as the generator's state.

    >>> hex(splitmix64(np.zeros(1, np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    mixed: Words = words + _GOLDEN  # unsigned words wrap, which is what is wanted
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= _FIRST
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= _SECOND
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def fold_in(*words: int | Words) -> Words:
    """Fold integers of 64 bits, or arrays of them, which broadcast, into keys; every word and its place matter.

    >>> fold_in(7, 1).shape, fold_in(7, np.arange(4, dtype=np.uint64)).shape
    ((1,), (4,))
    """
    folded = np.zeros(1, np.uint64)
    for word in words:
        folded = splitmix64(folded ^ splitmix64(np.atleast_1d(np.asarray(word, np.uint64))))
    return folded
