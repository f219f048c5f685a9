"""Random words and keys by integer arithmetic alone: keyed, counter-based, the same on every platform."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from .digest import digest64

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


def key_of(key: int, words: Iterable[int]) -> int:
    """Return a key of 64 bits that is drawn by another one and some signed integers of 64 bits.

    A key takes a quarter of a microsecond, where `fold_in` takes 50: a loader needs one for each sample.

    >>> key_of(7, [1, 2]) == key_of(7, [1, 2]) != key_of(7, [2, 1])
    True
    """
    return digest64(array("q", words).tobytes(), seed=key)


def text_key(text: str, size: int = 16) -> bytes:
    """Return so many bytes that are drawn by a text: BLAKE2b, on which the orders of streams hang."""
    return blake2b(text.encode(), digest_size=size).digest()
