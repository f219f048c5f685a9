"""A permutation of a long list that gives any place by itself.

The list is laid out as a rectangle of ``a`` rows and ``b`` columns with ``a * b`` at or just above its length.
A round adds a keyed random number to the row, chosen by the column, or to the column, chosen by the row: each
can be undone, so together they permute the rectangle. A place beyond the list is sent through again until it
is inside ("cycle walking"). This is the generalised Feistel network of Black and Rogaway, "Ciphers with
arbitrary finite domains" (CT-RSA 2002).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.weighted_sampler.keyed import Indices, Words, below, derive, splitmix64

ROUNDS = 6  # three still show in chi-square tests, six do not
MOST_ROWS = 2**13  # of a tabulated permutation: 800 KB of tables


@dataclass(frozen=True)
class Rectangle:
    """The layout of a list of ``size`` places.

    Attributes:
        size: Number of places, 1 to 2**62.
        rows: ``a``, the square root of it, rounded up.
        columns: ``b``, so that ``(b - 1) * a < size <= a * b``.
    """

    size: int
    rows: int
    columns: int

    @classmethod
    def of(cls, size: int) -> "Rectangle":
        """Lay out ``size`` places.

        >>> Rectangle.of(10)
        Rectangle(size=10, rows=4, columns=3)
        """
        rows = math.isqrt(size - 1) + 1
        return cls(size, rows, -(-size // rows))

    def sides(self) -> list[tuple[int, int]]:
        """Pairs (what is added to, what chooses) of each round: row and column take turns."""
        return [(self.rows, self.columns) if turn % 2 == 0 else (self.columns, self.rows) for turn in range(ROUNDS)]


# One round's number to add: (which round, what chooses it, the elements it is for) -> numbers.
Round = Callable[[int, Indices, Indices], Indices]


def permute(shape: Rectangle, places: Indices, keys: Words) -> Indices:
    """Send places through the permutation of each one's key.

    Args:
        shape: The layout.
        places: Shape ``[m]``, values ``0 .. size - 1``.
        keys: Shape ``[m]`` or ``[1]``.

    Returns:
        Shape ``[m]``, values ``0 .. size - 1``; for one key a bijection.

    >>> sorted(permute(Rectangle.of(10), np.arange(10), derive(3)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    sides = shape.sides()

    def number(turn: int, chooser: Indices, elements: Indices) -> Indices:
        own = round_keys if len(keys) == 1 else round_keys[elements]
        chooser = chooser - chooser // sides[turn][1] * sides[turn][1]
        return below(splitmix64(own[:, turn] ^ chooser.view(np.uint64)), sides[turn][0])

    round_keys = derive(keys[:, None], np.arange(ROUNDS, dtype=np.uint64)[None])
    return _walk(shape, places, number)


def tables(shape: Rectangle, key: Words) -> list[Indices]:
    """Tabulate the rounds of one key's permutation, for many places.

    Args:
        shape: The layout, of at most ``MOST_ROWS`` rows.
        key: Shape ``[1]``.

    Returns:
        For each round the numbers to add, repeated as often as the chooser can have gone round.
    """
    made = []
    for turn, (modulus, length) in enumerate(shape.sides()):
        words = derive(key, turn) ^ np.arange(length, dtype=np.uint64)
        made.append(np.tile(below(splitmix64(words), modulus), 1 + (turn + 1) // 2))
    return made


def permute_by(shape: Rectangle, made: list[Indices], places: Indices) -> Indices:
    """Send places through a tabulated permutation; the same as ``permute``, faster.

    >>> shape, key = Rectangle.of(1000), derive(3)
    >>> places = np.arange(1000)
    >>> bool((permute_by(shape, tables(shape, key), places) == permute(shape, places, key)).all())
    True
    """

    def number(turn: int, chooser: Indices, _elements: Indices) -> Indices:
        return np.take(made[turn], chooser, mode="clip")  # clip is the mode that checks nothing

    return _walk(shape, places, number)


def _walk(shape: Rectangle, places: Indices, number: Round) -> Indices:
    """Apply all rounds, again for what lands outside the list."""
    elements = np.arange(len(places))
    moved = _rounds(shape, places, elements, number)
    while (outside := np.flatnonzero(moved >= shape.size)).size:
        moved[outside] = _rounds(shape, moved[outside], outside, number)
    return moved


def _rounds(shape: Rectangle, places: Indices, elements: Indices, number: Round) -> Indices:
    """Apply all rounds once. Rows and columns are brought back into the rectangle only at the end."""
    row = places // shape.columns
    column = places - row * shape.columns
    for turn in range(0, ROUNDS, 2):
        row += number(turn, column, elements)
        column += number(turn + 1, row, elements)
    row -= row // shape.rows * shape.rows  # numpy divides much faster than it takes remainders
    column -= column // shape.columns * shape.columns
    row *= shape.columns
    row += column
    return row
