"""Stop criteria: the treatment of exhausted sources, and the end of a mixture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from headrace.weighted_sampler._interleave import Interleave
from headrace.weighted_sampler.schedule import Stage

Stopping: TypeAlias = Literal["first_exhausted", "all_exhausted", "drop_exhausted", "endless"]

MAX_DROPPED = 256  # sources that are dropped one by one: each drop needs new weights


@dataclass(frozen=True)
class StopRule:
    """The treatment of exhausted sources."""

    at_end: Literal["stop", "again", "drop"]  # an exhausted source stops, repeats, or is dropped
    # (how often each source was exhausted, whether it is still drawn from) -> whether the mixture ends.
    over: Callable[[Sequence[int], Sequence[bool]], bool]


def _any_exhausted(exhausted: Sequence[int], _drawn: Sequence[bool]) -> bool:
    return any(exhausted)


def _all_exhausted(exhausted: Sequence[int], drawn: Sequence[bool]) -> bool:
    # A source that no later stage draws from cannot be exhausted.
    return all(times or not needed for times, needed in zip(exhausted, drawn, strict=True))


def _never(_exhausted: Sequence[int], _drawn: Sequence[bool]) -> bool:
    return False


STOP_RULES: dict[Stopping, StopRule] = {
    "first_exhausted": StopRule("stop", _any_exhausted),
    "all_exhausted": StopRule("again", _all_exhausted),
    "drop_exhausted": StopRule("drop", _all_exhausted),
    "endless": StopRule("again", _never),
}


def drop_stages(weights: Sequence[int], sizes: Sequence[int]) -> list[Stage]:
    """Draw each source once completely, then drop it; the remaining sources keep their proportions.

    >>> drop_stages([1, 1], [2, 4])
    [Stage(start=0, weights=(1, 1)), Stage(start=4, weights=(0, 1))]
    """
    left = np.where(np.array(weights, bool), sizes, 0)
    stages, start = [], 0
    while left.any():
        stages.append(Stage(start, tuple(weight if rest else 0 for weight, rest in zip(weights, left, strict=True))))
        sequence = Interleave(stages[-1].weights)
        # A count is less than 2 off its share, so the first source is exhausted after low and not after high.
        parts = [(weight, rest) for weight, rest in zip(stages[-1].weights, left.tolist(), strict=True) if rest]
        low = max(0, min((rest - 2) * sequence.root.weight // weight for weight, rest in parts))
        high = min(int(left.sum()), *((rest + 2) * sequence.root.weight // weight + 1 for weight, rest in parts))
        while high - low > 1:
            points = low + (high - low) * np.arange(1, 65) // 64
            counts = sequence.counts(points)
            first = int(np.argmax(((counts >= left) & (left > 0)).any(axis=1)))
            low, high = int(points[first - 1]) if first else low, int(points[first])
        left = left - sequence.counts(np.array([high]))[0]
        start += high
    return stages
