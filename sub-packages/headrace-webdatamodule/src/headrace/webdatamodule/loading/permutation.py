"""A permutation of which any place is computed by itself.

Short lists are truly shuffled, by a sort of random words. Long ones use the generalised Feistel network of Black and
Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002): the list is a rectangle whose rows and columns are
shifted in turns by keyed random numbers, and a place outside the list goes through again.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.webdatamodule._shared.random import Words, fold_in, splitmix64

Indices = npt.NDArray[np.int64]

SHORT = 2**16  # a Feistel network of fewer places is not random enough
ROUNDS = 6  # three show in chi-square tests
_HALF = np.uint64(32)


class Shuffle:
    """The numbers 0 to `size - 1`, at most 2**62, in an order that depends on a key: 64-bit words, such as a seed.

    >>> shuffle = Shuffle(10, 3, 0)
    >>> sorted(shuffle.take(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, size: int, *key: int) -> None:
        self._size, self._key = size, fold_in(*key)
        self._order = _sorted(size, self._key) if size < SHORT else None
        self._inverse: Indices | None = None
        self._rows = math.isqrt(max(size, 1) - 1) + 1
        self._columns = -(-size // self._rows)

    def take(self, start: int, stop: int) -> Indices:
        """The numbers at the places `start` to `stop - 1`, of 0 to `size - 1`."""
        if self._order is not None:
            return self._order[start:stop]
        moved = self._moved(np.arange(start, stop, dtype=np.int64))
        while (outside := np.flatnonzero(moved >= self._size)).size:
            moved[outside] = self._moved(moved[outside])
        return moved

    def places(self, numbers: Indices) -> Indices:
        """The places of some numbers: the inverse of `take`.

        >>> shuffle = Shuffle(10, 3, 0)
        >>> shuffle.places(shuffle.take(2, 5)).tolist()
        [2, 3, 4]
        """
        if self._order is not None:
            if self._inverse is None:
                self._inverse = np.argsort(self._order)
            return self._inverse[numbers]
        places = self._moved_back(numbers)
        while (outside := np.flatnonzero(places >= self._size)).size:
            places[outside] = self._moved_back(places[outside])
        return places

    def _moved(self, places: Indices) -> Indices:
        row, column = places // self._columns, places % self._columns
        for turn in range(0, ROUNDS, 2):
            row = (row + _below(self._key, turn, column, self._rows)) % self._rows
            column = (column + _below(self._key, turn + 1, row, self._columns)) % self._columns
        return row * self._columns + column

    def _moved_back(self, places: Indices) -> Indices:
        row, column = places // self._columns, places % self._columns
        for turn in range(ROUNDS - 2, -1, -2):
            column = (column - _below(self._key, turn + 1, row, self._columns)) % self._columns
            row = (row - _below(self._key, turn, column, self._rows)) % self._rows
        return row * self._columns + column


def _sorted(size: int, key: Words) -> Indices:
    # The place is written below a random word, so that no two are the same whatever sorts them.
    places = np.arange(size, dtype=np.uint64)
    below = np.uint64(SHORT - 1)
    words = (splitmix64(key ^ splitmix64(places)) & ~below) | places
    words.sort()
    return (words & below).astype(np.int64)


def _below(key: Words, turn: int, chooser: Indices, bound: int) -> Indices:
    words = splitmix64(splitmix64(key ^ np.uint64(turn)) ^ chooser.astype(np.uint64))
    return (((words >> _HALF) * np.uint64(bound)) >> _HALF).astype(np.int64)
