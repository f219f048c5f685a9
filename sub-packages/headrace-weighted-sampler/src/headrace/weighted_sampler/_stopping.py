"""Stop criteria: what happens when a source has no more samples, and when that is the end."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from headrace.weighted_sampler._mixture import build_tree, draws_before
from headrace.weighted_sampler.schedule import Stage

Stopping: TypeAlias = Literal["first_exhausted", "all_exhausted", "drop_exhausted", "endless"]

STOPPINGS: tuple[Stopping, ...] = get_args(Stopping)
BEGINS_AGAIN = ("all_exhausted", "endless")  # rules by which a source that has run out begins again
MAX_DROPPED = 256  # sources that are dropped one by one: each needs weights of its own


def drop_stages(weights: Sequence[int], sizes: Sequence[int]) -> list[Stage]:
    """Draw each source once through, then drop it; those that are left keep their proportions.

    >>> drop_stages([1, 1], [2, 4])
    [Stage(start=0, weights=(1, 1)), Stage(start=4, weights=(0, 1))]
    """
    left = np.where(np.array(weights, bool), sizes, 0)
    stages, start = [], 0
    while left.any():
        stages.append(Stage(start, tuple(weight if rest else 0 for weight, rest in zip(weights, left, strict=True))))
        tree = build_tree(stages[-1].weights)
        # A count is less than 2 away from its share, so the first source runs out above low, not above high.
        parts = [(weight, rest) for weight, rest in zip(stages[-1].weights, left.tolist(), strict=True) if rest]
        low = max(0, min((rest - 2) * tree.weight // weight for weight, rest in parts))
        high = min(int(left.sum()), *((rest + 2) * tree.weight // weight + 1 for weight, rest in parts))
        while high - low > 1:
            points = low + (high - low) * np.arange(1, 65) // 64
            counts = draws_before(tree, points, len(left))
            first = int(np.argmax(((counts >= left) & (left > 0)).any(axis=1)))
            low, high = int(points[first - 1]) if first else low, int(points[first])
        left = left - draws_before(tree, np.array([high]), len(left))[0]
        start += high
    return stages
