"""Equal shares of samples for ranks and workers, as ranges of shards."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate


def rank_share(n: int, world: int, rank: int) -> tuple[int, int]:
    """The samples of one rank: a range of the list of all samples, which begins again where it ends.

    Args:
        n: Samples in the list.
        world: Number of ranks.
        rank: One of them.

    Returns:
        Start and stop. All ranks get equally many, and the last ones at most `world - 1` samples from beyond `n`.

    >>> [rank_share(7, 3, rank) for rank in range(3)]
    [(0, 3), (3, 6), (6, 9)]
    """
    each = -(-n // world)
    return rank * each, (rank + 1) * each


def worker_share(start: int, stop: int, worker: int, workers: int) -> tuple[int, int]:
    """The samples of one worker among those of its rank; none when there are fewer samples than workers.

    Args:
        start: First sample of the rank.
        stop: The one after its last.
        worker: Number of the worker.
        workers: How many the rank has.

    Returns:
        Start and stop.

    >>> [worker_share(3, 8, worker, 2) for worker in range(2)]
    [(3, 5), (5, 8)]
    """
    n = stop - start
    return start + n * worker // workers, start + n * (worker + 1) // workers


def pieces(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Which parts of which shards hold some samples.

    Args:
        counts: Samples in each shard, in the order of the list. What is beyond its end is its begin again.
        start: First sample.
        stop: The one after the last.

    Yields:
        Position of a shard in the list, its first sample and the one after its last.

    >>> list(pieces([2, 0, 3], 1, 6))
    [(0, 1, 2), (2, 0, 3), (0, 0, 1)]
    """
    ends = list(accumulate(counts))
    at = start
    while ends and ends[-1] and at < stop:
        shard = bisect_right(ends, at % ends[-1])
        first = at % ends[-1] - (ends[shard] - counts[shard])
        last = min(counts[shard], first + stop - at)
        yield shard, first, last
        at += last - first
