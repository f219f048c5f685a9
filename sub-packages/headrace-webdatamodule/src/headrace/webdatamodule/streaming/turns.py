"""The order in which a loader takes items from its workers: one from each in turn, as long as they have some."""

from bisect import bisect_right
from collections.abc import Sequence


def turns_taken(lengths: Sequence[int], n: int) -> tuple[list[int], int]:
    """How far each worker is after some items of a loader.

    Args:
        lengths: Items that each worker has, at least one worker.
        n: Items that came out of the loader.

    Returns:
        How many items each worker gave, and the worker whose turn it is.

    Raises:
        ValueError: There are fewer items.

    >>> turns_taken([3, 1, 2], 4)  # of workers 0, 1, 2, 0
    ([2, 1, 1], 1)
    """
    if not 0 <= n <= sum(lengths):
        raise ValueError(f"n must be 0 to {sum(lengths)}, got {n}")
    rounds = bisect_right(range(max(lengths) + 1), n, key=lambda done: _given(lengths, done)) - 1
    given, turn = [min(length, rounds) for length in lengths], 0
    left = n - sum(given)
    for worker, length in enumerate(lengths):
        if left and length > rounds:
            given[worker] += 1
            left -= 1
            turn = (worker + 1) % len(lengths)
    return given, turn


def _given(lengths: Sequence[int], rounds: int) -> int:
    return sum(min(length, rounds) for length in lengths)
