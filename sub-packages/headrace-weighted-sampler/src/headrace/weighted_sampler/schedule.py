"""Schedules: weights that change at positions of a sequence, for the sampler and for streams.

A schedule is a list of pairs ``(position, weights)``. Write it by hand, or use ``cosine_schedule``.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeAlias, TypeVar

from headrace.weighted_sampler._arguments import MAX_POSITION, is_pair, shown
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler.weights import (
    StreamWeights,
    Weight,
    WeightedSources,
    Weights,
    as_fraction,
    check_names,
    parse_sources,
)

W = TypeVar("W")
Schedule: TypeAlias = Sequence[tuple[int, Weights]]
StreamSchedule: TypeAlias = Sequence[tuple[int, StreamWeights]]


def cosine_schedule(
    first: Mapping[str, Weight], last: Mapping[str, Weight], *, start: int = 0, stop: int, stages: int = 32
) -> list[tuple[int, dict[str, Fraction]]]:
    """Return a schedule that moves from one mixture to another along half a cosine, in equal stages.

    Before ``start`` the weights are ``first``: pass them as ``weights`` together with the schedule. The ``k``-th stage
    begins at ``start + (stop - start) * k // stages`` with the weights ``first + (last - first) * (1 - cos(pi * k /
    stages)) / 2``. The cosine factor is rounded to six decimals, the same on every platform. From ``stop`` on the
    weights are ``last``.

    Args:
        first: ``{name: weight}``, not nested.
        last: Weights of the same names. The shares follow the cosine if both mappings have the same sum.
        start: Position where the weights begin to change.
        stop: Position where the weights reach ``last``.
        stages: Number of times that the weights change.

    Returns:
        ``[(position, {name: weight}), ...]`` with exact weights, for ``schedule=`` of ``WeightedDistributedSampler`` or
        ``InterleavedDataset``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the names differ, a weight is negative, or there are fewer positions than stages.

    >>> for position, weights in cosine_schedule({"web": 1, "books": 0}, {"web": 0, "books": 1}, stop=900, stages=3):
    ...     print(position, {name: float(weight) for name, weight in weights.items()})
    300 {'web': 0.75, 'books': 0.25}
    600 {'web': 0.25, 'books': 0.75}
    900 {'web': 0.0, 'books': 1.0}
    """
    for argument, given in (("first", first), ("last", last)):
        if not isinstance(given, Mapping):
            raise TypeError(f"{argument} must be a mapping {{name: weight}}, got {shown(given)}")
    check_names("last", last, list(first), "first does not have; it has")
    begin = checked_int("start", start, 0, MAX_POSITION - 1)
    count = checked_int("stages", stages, 1)
    length = checked_int("stop", stop, begin + count, MAX_POSITION) - begin
    old, new = (
        {name: as_fraction(f"{argument}[{name!r}]", given[name]) for name in first}
        for argument, given in (("first", first), ("last", last))
    )
    made = []
    for stage in range(1, count + 1):
        done = Fraction(round(10**6 * (1 - math.cos(math.pi * stage / count)) / 2), 10**6)
        weights = {name: old[name] + (new[name] - old[name]) * done for name in old}
        made.append((begin + length * stage // count, weights))
    return made


# -- As given ------------------------------------------------------------------------------------------------------


NAMED = "schedule[{}]"


@dataclass(frozen=True)
class StageWeights(Generic[W]):
    """The weights of one stage, as parsed."""

    start: int
    argument: str  # name of the weights in messages
    weights: W


def parse_schedule(schedule: object, parse: Callable[[str, Any], W], named: str = NAMED) -> list[StageWeights[W]]:
    """Check a schedule; ``parse(argument, weights)`` checks the weights of one stage, ``named`` so in messages."""
    if not isinstance(schedule, Sequence) or not all(map(is_pair, schedule)):
        raise TypeError(f"schedule must be a list of tuples (position, weights), got {shown(schedule)}")
    stages: list[StageWeights[W]] = []
    start = 0
    for place, (position, weights) in enumerate(schedule):
        name = named.format(place)
        start = checked_int(f"{name} position", position, start + 1, MAX_POSITION)
        argument = f"{name} weights"
        stages.append(StageWeights(start, argument, parse(argument, weights)))
    return stages


def parse_source_schedule(
    schedule: object, first: WeightedSources, dataset: Sized, named: str = NAMED
) -> list[StageWeights[WeightedSources]]:
    """Validate the schedule of a sampler; its stages have the sources of the ``first`` weights."""
    stages = parse_schedule(schedule, lambda argument, weights: parse_sources(argument, weights, dataset), named)
    for place, stage in enumerate(stages):
        if first.members is not None or stage.weights.members is not None:
            raise ValueError(
                f"{named.format(place)}: weights cannot change with one weight per sample; give weights of datasets "
                "or ranges"
            )
        if stage.weights.ranges != first.ranges:
            raise ValueError(
                f"{named.format(place)} must have weights for the same ranges as the first weights, "
                f"{_some(first.ranges)}, got {_some(stage.weights.ranges)}: give 0 to leave a range out"
            )
    return stages


def _some(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(str, ranges[:5])) + ", ..." * (len(ranges) > 5)


# -- By position ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Integer weights that apply from a position on, for the same sources in every stage."""

    start: int
    weights: tuple[int, ...]


def stages_before(stages: Sequence[Stage], position: int) -> int:
    """Count the stages that the order before a position depends on, at least one."""
    return max(1, bisect_left(stages, position, key=lambda stage: stage.start))


def stage_at(stages: Sequence[Stage], position: int) -> int:
    """Return the number of the stage that contains a position."""
    return bisect_right(stages, position, key=lambda stage: stage.start) - 1


def still_drawn(stages: Sequence[Stage], position: int) -> list[bool]:
    """For each source, whether the stage at a position or a later one draws from it."""
    return [any(weights) for weights in zip(*(s.weights for s in stages[stage_at(stages, position) :]), strict=True)]
