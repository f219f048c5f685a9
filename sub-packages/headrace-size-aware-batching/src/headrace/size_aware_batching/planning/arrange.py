"""The order of batches: like costs together, so that a step costs the same on every rank."""

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.keyed import draws

GROUP = 64  # batches of like cost that stay together at most; world sizes that divide it gain most
GROUPS = 16  # that there are at least, where there are so many batches


def group_length(n_batches: int) -> int:
    """Return how many batches of like cost stay together: 64, or fewer where that would leave few groups."""
    return min(GROUP, 1 << max(0, (n_batches // GROUPS).bit_length() - 1))


def arranged(work: NDArray[np.float64], key: int, before: int, group: int) -> NDArray[np.int64]:
    """Return where each batch goes: sorted by work, cut into groups, the groups shuffled.

    Groups begin at multiples of ``group`` in the whole epoch's list, whatever is arranged at a time, so that the
    steps of a world size that divides ``group`` lie inside one. What is over at both ends is taken from the
    lightest batches, which are alike everywhere.

    Args:
        work: Cost of each batch, shape ``[m]``.
        key: Key of the shuffle.
        before: Batches that stand before these in the epoch.
        group: Batches in a group.

    Returns:
        The place of each batch, shape ``[m]``, a permutation.

    >>> arranged(np.array([5.0, 1.0, 4.0, 2.0]), key=0, before=3, group=2)[1]
    np.int64(0)
    """
    count = len(work)
    head = min(-before % group, count)
    groups = (count - head) // group
    tail = count - head - groups * group
    ranked = np.argsort(work, kind="stable")
    words = draws(key, groups)
    begins = head + np.argsort(np.argsort(words, kind="stable")) * group
    inside = np.arange(group)
    # Half of the groups fall instead of rising: no rank gets the lighter batches of every step.
    rows = np.where((words & np.uint64(1)).astype(bool)[:, None], inside, inside[::-1])
    places = np.empty(count, np.int64)
    places[ranked[:head]] = np.arange(head)
    places[ranked[head : head + tail]] = np.arange(count - tail, count)
    places[ranked[head + tail :].reshape(groups, group)] = begins[:, None] + rows
    return places
