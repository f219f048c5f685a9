"""Where one step after another begins, when batches are of equal count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deal:
    """The places of one step: ranks get neighbouring stretches of them, equal up to one place.

    Args:
        start: The first place.
        stop: The one after the last.
    """

    start: int
    stop: int

    def of_rank(self, rank: int, world: int) -> tuple[int, int]:
        """The stretch of a rank; empty when there are fewer places than ranks.

        >>> [Deal(10, 15).of_rank(rank, 2) for rank in range(2)]
        [(10, 12), (12, 15)]
        """
        count = self.stop - self.start
        return self.start + count * rank // world, self.start + count * (rank + 1) // world


def n_steps(left: int, batch_size: int, world: int) -> int:
    """How many steps it takes to deal out `left` samples."""
    return -(-left // (batch_size * world))


def deal(step: int, start: int, end: int, batch_size: int, world: int) -> Deal:
    """The places of a step, counted from `start`.

    All steps but the last hold `batch_size * world` samples. Where the last one would leave ranks without a sample,
    the last two share theirs.

    Args:
        step: Which one.
        start: Where the steps begin.
        end: Number of places in the epoch.
        batch_size: Most samples of a rank.
        world: Number of ranks.

    >>> [deal(step, 0, 17, 4, 4) for step in range(2)]
    [Deal(start=0, stop=8), Deal(start=8, stop=17)]
    """
    whole = batch_size * world
    steps = n_steps(end - start, batch_size, world)
    rest = end - start - (steps - 1) * whole
    if rest < world and steps > 1 and batch_size > 1 and step >= steps - 2:
        first = start + (steps - 2) * whole
        middle = first + (end - first) // 2
        return Deal(first, middle) if step == steps - 2 else Deal(middle, end)
    begin = start + step * whole
    return Deal(begin, min(begin + whole, end))
