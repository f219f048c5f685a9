"""Which samples of a buffer leave next, and in which batches. Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._random import derive, random_words
from headrace.size_aware_batching.streaming.budget import StreamBudget

# One of so many parts of the buffer leaves before all that is there is sorted anew. On 200,000 lognormal sizes (median
# 360, sigma 0.8), budget 16384, buffer 1,000: 1, 4, 16 parts give 1.056, 1.053, 1.052 times the fewest padded batches
# possible, in 1.1, 2.1, 4.5 microseconds a sample on one core. With a buffer of 10,000: 1.0064, 1.0064, 1.0057.
PARTS = 4


@dataclass(frozen=True)
class Rounds:
    """Sorts a buffer by size, cuts it into batches, and lets some of them go.

    Args:
        budget: What a batch may hold.
        key: Key of the random choice; None to let the batch go first that holds the oldest sample.
    """

    budget: StreamBudget
    key: int | None = None

    def leaving(
        self, sizes: NDArray[Any], arrivals: NDArray[np.int64], number: int, ended: bool
    ) -> list[NDArray[np.int64]]:
        """Return the places in the buffer that leave in this round, batch by batch.

        A quarter of the complete batches leaves, and in any case the batch of the sample that has waited longest,
        so that on a stream without an end no sample stays for ever. Of a stream that has ended, all leave.

        Args:
            sizes: Sizes of the samples in the buffer, shape ``[n]``, ``n >= 1``.
            arrivals: The position of each in the stream, shape ``[n]``.
            number: Counts the rounds: each has random numbers of its own.
            ended: Whether nothing will follow.

        >>> from headrace.size_aware_batching.streaming.budget import stream_budget
        >>> rounds = Rounds(stream_budget("padded", 10, most_items=9))
        >>> [batch.tolist() for batch in rounds.leaving(np.array([9, 1, 5, 1, 5]), np.arange(5), 0, ended=True)]
        [[0], [1, 3], [2, 4]]
        """
        key = None if self.key is None else int(derive(self.key, number)[0])
        # Equal sizes lie in random order, or those that came together would always leave together.
        ties = arrivals if key is None else random_words(int(derive(key, 0)[0]), len(sizes))
        order = np.lexsort((ties, -sizes))
        cuts, complete = self.budget.cut(sizes[order])
        oldest = np.minimum.reduceat(arrivals[order], cuts[:-1])
        turns = np.argsort(oldest if key is None else random_words(int(derive(key, 1)[0]), len(oldest)), kind="stable")
        if not ended:
            turns = turns[chosen(turns, complete, int(oldest.argmin()))]
        return [order[cuts[batch] : cuts[batch + 1]] for batch in turns]


def chosen(turns: NDArray[np.int64], complete: int, oldest: int) -> NDArray[np.bool_]:
    """Return which batches leave while the stream goes on.

    Args:
        turns: The batches in the order of their turns, shape ``[m]``.
        complete: So many batches, from 0 on, can take no more.
        oldest: The batch that leaves in any case.

    >>> chosen(np.array([2, 0, 1]), complete=2, oldest=1).tolist()
    [False, True, True]
    """
    full = turns < complete
    leave: NDArray[np.bool_] = full & (np.cumsum(full) <= -(-complete // PARTS)) | (turns == oldest)
    return leave
