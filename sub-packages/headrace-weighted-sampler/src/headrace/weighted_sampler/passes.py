"""An endless run of passes over one source, each pass in an order of its own."""

import numpy as np

from headrace.weighted_sampler.feistel import MOST_ROWS, Rectangle, permute, permute_by, tables
from headrace.weighted_sampler.keyed import Indices, Words, derive
from headrace.weighted_sampler.shuffles import MOST, shuffles

BLOCK = 2**19  # places shuffled in one call; bounds the memory when many short passes are drawn


class Passes:
    """Draw ``k`` is place ``k % size`` of pass ``k // size``: a place comes again only after all the others.

    A pure function of (size, key, draw). What is kept between calls, the tables of the latest pass, makes it
    faster and changes nothing: at most 0.5 MB for a short source, 0.8 MB for a long one.

    Args:
        size: Number of places in one pass; one of 0 is never drawn from.
        key: A 64-bit word.

    >>> import numpy as np
    >>> drawn = Passes(4, key=0)(np.arange(2, 10))
    >>> sorted(drawn[2:6].tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._key = np.uint64(key)
        self._shape = Rectangle.of(max(1, size))
        self._kept: tuple[int, list[Indices]] = (-1, [])

    def __call__(self, draws: Indices) -> Indices:
        """Find the places of some draws.

        Args:
            draws: Shape ``[m]``, from 0 to 2**62.

        Returns:
            Shape ``[m]``, values ``0 .. size - 1``.
        """
        if self.size == 1 or not draws.size:
            return np.zeros_like(draws)
        numbers = draws // self.size
        places = draws - numbers * self.size
        low, high = int(numbers.min()), int(numbers.max())
        if self.size <= MOST:
            return self._short(numbers, places, low, high)
        if low == high:
            return self._pass(low, places)
        return self._long(numbers, places)

    def _keys(self, numbers: Indices) -> Words:
        return derive(np.atleast_1d(self._key), numbers.astype(np.uint64))

    def _short(self, numbers: Indices, places: Indices, low: int, high: int) -> Indices:
        if low == high:
            return self._row(low)[places]
        wanted, row = np.unique(numbers, return_inverse=True)
        found = np.empty_like(places)
        step = max(1, BLOCK // self.size)
        for first in range(0, len(wanted), step):
            made = shuffles(self.size, self._keys(wanted[first : first + step]))
            here = np.flatnonzero((row >= first) & (row < first + step)) if len(wanted) > step else slice(None)
            found[here] = made[row[here] - first, places[here]]
        self._kept = (int(wanted[-1]), [made[-1].copy()])
        return found

    def _row(self, number: int) -> Indices:
        kept, made = self._kept
        if kept != number:
            made = [shuffles(self.size, self._keys(np.array([number])))[0]]
            self._kept = (number, made)
        return made[0]

    def _long(self, numbers: Indices, places: Indices) -> Indices:
        """Draws that lie in several passes: each with its own key, or pass by pass where there are many of one."""
        if len(numbers) < self._shape.rows:
            return permute(self._shape, places, self._keys(numbers))
        found = np.empty_like(places)
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            found[here] = self._pass(int(number), places[here])
        return found

    def _pass(self, number: int, places: Indices) -> Indices:
        kept, made = self._kept
        if kept != number:
            key = self._keys(np.array([number]))
            if self._shape.rows > MOST_ROWS or len(places) * 4 < self._shape.rows:
                return permute(self._shape, places, key)  # the tables would cost more than they save
            made = tables(self._shape, key)
            self._kept = (number, made)
        return permute_by(self._shape, made, places)
