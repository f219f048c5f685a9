"""Schedules: weights that change at positions of a sequence, for the sampler and for streams."""

from bisect import bisect_left
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

from headrace.weighted_sampler._arguments import MAX_POSITION, as_int, shown
from headrace.weighted_sampler._permutation import WINDOW
from headrace.weighted_sampler.weights import StreamWeights, WeightedSources, Weights, parse_sources

Schedule: TypeAlias = Sequence[tuple[int, Weights]]
StreamSchedule: TypeAlias = Sequence[tuple[int, StreamWeights]]


@dataclass(frozen=True)
class Stage:
    """Integer weights that hold from a position on, the same sources in every stage."""

    start: int
    weights: tuple[int, ...]


def stages_before(stages: Sequence[Stage], position: int, begin: int, end: int) -> int:
    """Count the stages that the order from ``begin`` depends on, to the end of the window of a position."""
    segment = max((stage.start for stage in stages if begin < stage.start < position), default=begin)
    reached = min(segment + -(-(position - segment) // WINDOW) * WINDOW, end)
    return max(1, bisect_left(stages, reached, key=lambda stage: stage.start))


def later_stages(schedule: object, first: WeightedSources, dataset: Sized) -> dict[tuple[int, str], WeightedSources]:
    """The sources by (position, name of the weights in messages)."""
    stages: dict[tuple[int, str], WeightedSources] = {}
    start = 0
    for place, (given, weights) in enumerate(pairs_of(schedule)):
        name = f"schedule[{place}]"
        start = as_int(f"{name} position", given, start + 1, MAX_POSITION)
        later = parse_sources(f"{name} weights", weights, dataset)
        if first.members is not None or later.members is not None:
            raise ValueError(
                f"{name}: schedule is not supported with one weight per sample; give weights of datasets or ranges"
            )
        if [(part.begin, part.end) for part in later.parts] != [(part.begin, part.end) for part in first.parts]:
            raise ValueError(f"{name} must weigh the same ranges as the first weights; 0 leaves a range out")
        stages[start, f"{name} weights"] = later
    return stages


def pairs_of(schedule: object) -> Sequence[tuple[Any, Any]]:
    """Return a schedule if it is a list of pairs."""
    if isinstance(schedule, Sequence) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in schedule):
        return schedule
    raise TypeError(f"schedule must be a list of tuples (position, weights), got {shown(schedule)}")
