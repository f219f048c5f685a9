"""From a position in an epoch to where each worker has to begin."""

from typing import NamedTuple

from headrace.webdatamodule.streaming.counting import Batched
from headrace.webdatamodule.streaming.shares import worker_share


class Place(NamedTuple):
    """Where to begin.

    Attributes:
        turn: How often the promised epoch was given in full before, by a loader that repeats it.
        lap: How often the shards were begun again before, in all turns together.
        done: Batches of this turn that were given.
        items: Items that the workers gave in this lap.
    """

    turn: int = 0
    lap: int = 0
    done: int = 0
    items: int = 0


class Counting(NamedTuple):
    """What one pass over the samples gives on each rank.

    Attributes:
        samples: Samples of a rank.
        workers: Number of its workers, at least 1.
        inside: What the stages in the workers do to their number.
        outside: What the stages behind the workers do.
    """

    samples: int
    workers: int
    inside: Batched
    outside: Batched

    def items(self) -> list[int]:
        """Items that each worker gives."""
        return worker_items(self.samples, self.workers, self.inside)

    def batches(self) -> int:
        """Batches of the pass.

        >>> Counting(9, 2, Batched(), Batched(4)).batches(), Counting(9, 2, Batched(4), Batched()).batches()
        (3, 3)
        """
        return self.outside.count(sum(self.items()))

    def place(self, position: int, promised: int) -> Place:
        """Where a position is.

        Args:
            position: Batches that were delivered.
            promised: Batches of a whole epoch, which may be more than one pass gives, or fewer.

        >>> Counting(9, 2, Batched(), Batched(4)).place(5, 7)
        Place(turn=0, lap=1, done=5, items=8)
        """
        a_pass = max(1, self.batches())
        turn, done = divmod(position, promised)
        lap, inside = divmod(done, a_pass)
        return Place(turn, turn * -(-promised // a_pass) + lap, done, inside * self.outside.size)


def worker_items(samples: int, workers: int, inside: Batched) -> list[int]:
    """Items that each worker gives in a pass.

    Args:
        samples: Samples of a rank.
        workers: Number of its workers, at least 1.
        inside: What the stages in the workers do to their number.

    >>> worker_items(9, 2, Batched(4))
    [1, 2]
    """
    shares = (worker_share(0, samples, worker, workers) for worker in range(workers))
    return [inside.count(stop - start) for start, stop in shares]
