"""Next-fit: fill a batch until the next element does not fit, then begin another one."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.size_aware_batching._sizes import Number
from headrace.size_aware_batching._validation import shortlist

Element = TypeVar("Element")
Key = TypeVar("Key")

_NAMED = 10  # skipped elements that the summary names


@dataclass(slots=True)
class Tally:
    """What one pass did.

    Attributes:
        budget: The largest total allowed.
        noun: What the names of skipped elements are, in the plural.
        batches: How many were handed out.
        elements: How many are in them.
        filled: The sum of their sizes, in the unit of ``exact``.
        skipped: How many elements were larger than the budget.
        named: The first of these.
    """

    budget: Number
    noun: str
    batches: int = 0
    elements: int = 0
    filled: int = 0
    skipped: int = 0
    named: list[object] = field(default_factory=list)

    def close(self, count: int, total: int) -> None:
        """Count a batch in."""
        self.batches += 1
        self.elements += count
        self.filled += total

    def skip(self, key: object) -> None:
        """Count an element that is left out."""
        self.skipped += 1
        if len(self.named) < _NAMED:
            self.named.append(key)

    def fill(self) -> float:
        """Return the mean share of the budget that is used, 0 to 1; NaN where there is none."""
        if not self.batches or math.isinf(self.budget):
            return math.nan
        return self.filled / (self.batches * exact(self.budget))

    def summary(self) -> str:
        """Say it in one line.

        >>> tally = Tally(budget=10, noun="indices")
        >>> tally.close(2, exact(9)); tally.skip(7)
        >>> tally.summary()
        '1 batches of 2 elements, fill 0.9000 of max_total_size=10; 1 skipped as larger than that: indices 7'
        """
        line = f"{self.batches} batches of {self.elements} elements, "
        line += f"fill {self.fill():.4f} of max_total_size={self.budget}; {self.skipped} skipped"
        if not self.skipped:
            return line
        return f"{line} as larger than that: {self.noun} {shortlist(self.named, self.skipped)}"


def exact(number: Number) -> int:
    """Express a finite number as a whole multiple of 2**-1074, which every finite double is.

    Sums of these do not round, so that no batch exceeds its budget and none is closed early by an error in
    the last place.

    >>> exact(0.1) + exact(0.2) > exact(0.3), exact(0.5) + exact(0.25) == exact(0.75)
    (True, True)
    """
    numerator, denominator = number.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())


def next_fit(
    sized: Iterable[tuple[Key, Element, Number]], tally: Tally, oversize: Callable[[Key, Number], None]
) -> Iterator[list[Element]]:
    """Group elements in their order so that the sizes of each group sum to at most the budget.

    Next-fit as in D. S. Johnson, "Near-optimal bin packing algorithms" (1973): one batch is open at a time,
    so memory is that of one batch.

    Args:
        sized: (what names the element, the element, its size).
        tally: Holds the budget; counts along.
        oversize: Called for an element that is larger than the budget and therefore left out.

    Yields:
        Lists that are not empty.

    >>> sized = [("a", "A", 3), ("b", "B", 4), ("c", "C", 9), ("d", "D", 1)]
    >>> list(next_fit(sized, Tally(7, "names"), lambda key, size: print(key, size)))
    c 9
    [['A', 'B'], ['D']]
    """
    limit: Number = math.inf if math.isinf(tally.budget) else exact(tally.budget)
    batch: list[Element] = []
    total = 0
    for key, element, size in sized:
        if size > tally.budget or math.isinf(size):
            tally.skip(key)
            oversize(key, size)
            continue
        cost = exact(size)
        if batch and total + cost > limit:
            tally.close(len(batch), total)
            yield batch
            batch, total = [], 0
        batch.append(element)
        total += cost
    if batch:
        tally.close(len(batch), total)
        yield batch
