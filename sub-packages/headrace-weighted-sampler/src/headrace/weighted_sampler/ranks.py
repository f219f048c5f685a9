"""How the positions of one sequence are dealt to the ranks, by integer arithmetic."""

from collections.abc import Iterator

import numpy as np

from headrace.weighted_sampler.keyed import Indices

FIRST = 256  # positions in the first block


def deal_end(length: int, start: int, world: int, drop_last: bool) -> int:
    """Find the position where dealing ``start, start + 1, ...`` stops.

    What is dealt is a multiple of ``world``, so that every rank gets the same number.

    Args:
        length: Number of positions in the sequence.
        start: First position to deal.
        world: Number of ranks.
        drop_last: Stop short of ``length`` rather than go beyond it.

    Returns:
        One past the last position dealt. Positions from ``length`` on stand for those from 0 on.

    >>> deal_end(10, 0, 4, drop_last=False), deal_end(10, 0, 4, drop_last=True)
    (12, 8)
    """
    rest = max(0, length - start)
    return start + (rest // world if drop_last else -(-rest // world)) * world


def rank_positions(start: int, end: int, world: int, rank: int, block: int) -> Iterator[Indices]:
    """List one rank's positions: ``start + rank``, then every ``world``-th.

    The blocks begin small and grow, so that the first position does not wait for many others.

    Args:
        start: First position dealt to rank 0.
        end: One past the last position dealt.
        world: Number of ranks.
        rank: From 0.
        block: Most positions in one array.

    Yields:
        Arrays of positions, which together hold them all.

    >>> [part.tolist() for part in rank_positions(0, 12, world=4, rank=1, block=2)]
    [[1, 5], [9]]
    """
    low, size = start + rank, min(block, FIRST)
    while low < end:
        high = low + world * size
        yield np.arange(low, min(high, end), world, dtype=np.int64)
        low, size = high, min(block, 4 * size)
