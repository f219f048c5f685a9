"""Counter-based random numbers and permutations in which any element is computed alone.

Everything is 64-bit integer arithmetic on keys, the same on every platform and numpy version. From the bottom up:

- ``sort_shuffles``: true shuffles of up to 2**16 elements, by sorting random words;
- ``permute``: a generalised Feistel network for any length (Black and Rogaway, "Ciphers with arbitrary finite
  domains", CT-RSA 2002);
- ``SourceEpochs``: the epochs over one source, without end, each in an order of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.weighted_sampler._shared.random import Words, fold_in, splitmix64

Indices = NDArray[np.int64]


def below(words: Words, bound: int) -> Indices:
    """Scale random words to ``0 .. bound - 1``, uniform to within ``bound / 2**32``, for a bound of at most 2**31."""
    scaled: Indices = (((words >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).view(np.int64)
    return scaled


# -- Shuffles of short lists ---------------------------------------------------------------------------------------

MAX_SORTED = 2**16  # longest list that is shuffled by sorting


def sort_shuffles(size: int, keys: Words) -> Indices:
    """Shuffle ``0 .. size - 1`` once for each key ``[p]``; returns a permutation in each row of ``[p, size]``."""
    # 48 random bits above 16 of the element: no two words are equal, so every sorting algorithm gives the same.
    low_bits = np.uint64(MAX_SORTED - 1)
    elements = np.arange(size, dtype=np.uint64)
    words = splitmix64(keys[:, None] ^ splitmix64(elements))
    words &= ~low_bits
    words |= elements
    words.sort(axis=1)
    words &= low_bits
    return words.view(np.int64)


# -- A Feistel network for long lists ------------------------------------------------------------------------------

# Three rounds fail chi-square tests, six pass. Another number makes other orders, so `STATE_VERSION` rises with
# it. Rounds come in pairs, of a row and a column.
ROUNDS = 6
if ROUNDS % 2:
    raise ValueError(f"ROUNDS must be even, got {ROUNDS}: rounds come in pairs, of a row and a column")
MAX_TABLE_ROWS = 2**13  # of a tabulated permutation: 800 KB of tables

# The number that one round adds: (round, selector, elements) -> numbers.
Round = Callable[[int, Indices, Indices], Indices]


@dataclass
class Rectangle:
    """The domain of the network: ``size`` elements, 1 to 2**62, in rows and columns.

    A round adds a keyed random number to the row, selected by the column, or to the column, selected by the row. Each
    round can be undone, so together they permute the rectangle. An element that lands beyond ``size`` goes through
    the network again until it lands inside ("cycle walking").
    """

    size: int
    rows: int = field(init=False)  # the square root of ``size``, rounded up
    columns: int = field(init=False)  # the smallest number with ``rows * columns >= size``

    def __post_init__(self) -> None:
        self.rows = math.isqrt(self.size - 1) + 1
        self.columns = -(-self.size // self.rows)

    def moduli(self) -> list[tuple[int, int]]:
        """(Modulus of the number added, modulus of its selector) of each round; row and column alternate."""
        return [(self.rows, self.columns) if step % 2 == 0 else (self.columns, self.rows) for step in range(ROUNDS)]


def permute(shape: Rectangle, elements: Indices, keys: Words) -> Indices:
    """Apply the permutation of each key, ``[m]`` or ``[1]``, to its element, ``[m]``.

    >>> sorted(permute(Rectangle(10), np.arange(10), fold_in(3)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    moduli = shape.moduli()
    round_keys = fold_in(keys[:, None], np.arange(ROUNDS, dtype=np.uint64)[None])

    def number(step: int, selector: Indices, at: Indices) -> Indices:
        own_keys = round_keys if len(keys) == 1 else round_keys[at]
        selector = selector - selector // moduli[step][1] * moduli[step][1]
        return below(splitmix64(own_keys[:, step] ^ selector.view(np.uint64)), moduli[step][0])

    return _cycle_walk(shape, elements, number)


def round_tables(shape: Rectangle, key: Words) -> list[Indices]:
    """The numbers to add in each round of one key's permutation, repeated where the selector exceeds its modulus."""
    tables = []
    for step, (modulus, length) in enumerate(shape.moduli()):
        words = fold_in(key, step) ^ np.arange(length, dtype=np.uint64)
        tables.append(np.tile(below(splitmix64(words), modulus), 1 + (step + 1) // 2))
    return tables


def permute_by_tables(shape: Rectangle, tables: list[Indices], elements: Indices) -> Indices:
    """Apply a tabulated permutation; the same as ``permute``, faster."""

    def number(step: int, selector: Indices, _at: Indices) -> Indices:
        return np.take(tables[step], selector, mode="clip")  # the mode without a bounds check

    return _cycle_walk(shape, elements, number)


def _cycle_walk(shape: Rectangle, elements: Indices, number: Round) -> Indices:
    moved = _all_rounds(shape, elements, np.arange(len(elements)), number)
    while (outside := np.flatnonzero(moved >= shape.size)).size:
        moved[outside] = _all_rounds(shape, moved[outside], outside, number)
    return moved


def _all_rounds(shape: Rectangle, elements: Indices, at: Indices, number: Round) -> Indices:
    row = elements // shape.columns
    column = elements - row * shape.columns
    for step in range(0, ROUNDS, 2):
        row += number(step, column, at)
        column += number(step + 1, row, at)
    # Reduced once at the end. numpy divides much faster than it takes remainders.
    row -= row // shape.rows * shape.rows
    column -= column // shape.columns * shape.columns
    row *= shape.columns
    row += column
    return row


# -- Epochs of one source --------------------------------------------------------------------------------------------

MAX_SHUFFLED = 2**19  # elements that are shuffled in one call; bounds the memory when many short epochs are drawn


class SourceEpochs:
    """The endless sequence of draws from one source: draw ``k`` is element ``k % size`` of epoch ``k // size``.

    Each epoch has an order of its own, a pure function of (size, key, epoch). The tables of the latest one are kept for
    speed: at most 0.5 MB for a short source, 0.8 MB for a long one.

    >>> drawn = SourceEpochs(4, key=0)(np.arange(2, 10))
    >>> sorted(drawn[2:6].tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._key = np.uint64(key)
        self._shape = Rectangle(max(1, size))
        self._cache: tuple[int, list[Indices]] = (-1, [])  # (number, its tables)

    def __call__(self, draws: Indices) -> Indices:
        """Return the elements, ``0 .. size - 1``, of some draws, shape ``[m]``."""
        if self.size == 1 or not draws.size:
            return np.zeros_like(draws)
        epochs = draws // self.size
        elements = draws - epochs * self.size
        first, last = int(epochs.min()), int(epochs.max())
        if self.size <= MAX_SORTED:
            return self._short_epoch(first)[elements] if first == last else self._short(epochs, elements)
        return self._long_epoch(first, elements) if first == last else self._long(epochs, elements)

    def size_of(self, _number: int) -> int:
        """Number of samples of a pass."""
        return self.size

    def count(self, draws: int) -> int:
        """How many draws there were before one of this number."""
        return draws

    def seen(self, draws: int) -> int:
        """How many distinct samples there were before a draw of this number."""
        number, done = divmod(draws, self.size) if self.size else (0, 0)
        whole = self.size_of(number - 1) if number else 0  # of the pass before
        if not whole or whole == self.size:
            return whole or done
        blocks = range(draws - done, draws, MAX_SHUFFLED)
        return whole + sum(int((self(np.arange(low, min(low + MAX_SHUFFLED, draws))) >= whole).sum()) for low in blocks)

    def _keys(self, epochs: Indices) -> Words:
        return fold_in(np.atleast_1d(self._key), epochs.astype(np.uint64))

    def _short(self, epochs: Indices, elements: Indices) -> Indices:
        wanted, row = np.unique(epochs, return_inverse=True)
        found = np.empty_like(elements)
        step = max(1, MAX_SHUFFLED // self.size)
        for first in range(0, len(wanted), step):
            orders = sort_shuffles(self.size, self._keys(wanted[first : first + step]))
            here = np.flatnonzero((row >= first) & (row < first + step)) if len(wanted) > step else slice(None)
            found[here] = orders[row[here] - first, elements[here]]
        self._cache = (int(wanted[-1]), [orders[-1].copy()])
        return found

    def _short_epoch(self, number: int) -> Indices:
        if self._cache[0] != number:
            self._cache = (number, [sort_shuffles(self.size, self._keys(np.array([number])))[0]])
        return self._cache[1][0]

    def _long(self, epochs: Indices, elements: Indices) -> Indices:
        if len(epochs) < self._shape.rows:
            return permute(self._shape, elements, self._keys(epochs))
        found = np.empty_like(elements)
        for number in np.unique(epochs):
            here = np.flatnonzero(epochs == number)
            found[here] = self._long_epoch(int(number), elements[here])
        return found

    def _long_epoch(self, number: int, elements: Indices) -> Indices:
        if self._cache[0] != number:
            key = self._keys(np.array([number]))
            if self._shape.rows > MAX_TABLE_ROWS or len(elements) * 4 < self._shape.rows:
                return permute(self._shape, elements, key)  # tables would cost more than they save
            self._cache = (number, round_tables(self._shape, key))
        return permute_by_tables(self._shape, self._cache[1], elements)
