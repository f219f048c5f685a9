"""Mixtures in JSON: what a state holds of the sources and weights, so that their order can be made again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from headrace.weighted_sampler._arguments import MAX_POSITION, shown
from headrace.weighted_sampler._caps import places_of
from headrace.weighted_sampler._growth import changed
from headrace.weighted_sampler._mixture_arguments import MixtureSpec
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler.weights import Weight, as_fraction

Recorded = dict[str, Any]


class Parts:
    """In place of a concatenation of datasets: the ends of its parts."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.cumulative_sizes = list(ends)

    def __len__(self) -> int:
        return self.cumulative_sizes[-1] if self.cumulative_sizes else 0


def recorded_mixture(
    spec: MixtureSpec,
    *,
    data: str,
    seed: int,
    semantics: str | None,
    temperature: Weight | None,
    per: str,
    stopping: str,
    max_passes: Mapping[Any, int] | None,
    drop_last: bool,
) -> Recorded | None:
    """Return a mixture in JSON, from its arguments; None for one weight per sample, as these would fill a state.

    ``spec`` is that of the arguments, before any source leaves it.
    """
    sources = spec.sources
    if sources.members is not None:
        return None
    first, *later = zip(spec.stages if not spec.drops else spec.stages[:1], spec.weights, strict=False)
    places = places_of(sources)
    caps = {places[key]: int(passes) for key, passes in (max_passes or {}).items() if key in places}
    return {
        "length": spec.length,
        "ranges": [[begin, end] for begin, end in sources.ranges],
        "by_range": sources.by_range,
        "data": data,
        "seed": seed,
        "weights": plain_weights(first[1]),
        "schedule": [[stage.start, plain_weights(weights)] for stage, weights in later],
        "semantics": semantics or ("ratio" if sources.by_range else "proportion"),
        "temperature": None if temperature is None else plain_weights([as_fraction("temperature", temperature)])[0],
        "epoch_length": spec.epoch_length,
        "per": per,
        "stopping": stopping,
        "max_passes": [[place, passes] for place, passes in sorted(caps.items())],
        "drop_last": drop_last,
        "growth": None if spec.growth is None else spec.growth.plain(),
    }


def plain_weights(weights: Sequence[Fraction]) -> list[int | str]:
    """Return exact weights in JSON: an int, or a fraction such as "3/10"."""
    return [weight.numerator if weight.denominator == 1 else str(weight) for weight in weights]


def is_plain_weight(weight: object) -> bool:
    """Whether a weight is as states have it."""
    if isinstance(weight, str):
        return len(weight) < 2000 and re.fullmatch(r"[0-9]+/[1-9][0-9]*", weight) is not None
    return type(weight) is int and weight >= 0


def arguments_of(mixture: Any) -> dict[str, Any]:
    """Return the arguments of a sampler of a recorded mixture.

    Raises:
        ValueError: If the record was changed.
    """
    try:
        length = checked_int("length", mixture["length"], 0, MAX_POSITION)
        ranges = [
            (checked_int("begin", begin, 0, length), checked_int("end", end, 0, length))
            for begin, end in mixture["ranges"]
        ]
        by_range, drops = mixture["by_range"] is True, mixture["stopping"] == "drop_exhausted"
        keys: list[Any] = ranges if by_range else list(range(len(ranges)))

        def weights(plain: Sequence[Any]) -> dict[Any, Fraction]:
            return dict(zip(keys, map(_fraction, plain), strict=True))

        temperature, caps = mixture["temperature"], mixture["max_passes"]
        return {
            "dataset": range(length) if by_range else Parts([end for _, end in ranges]),
            "weights": weights(mixture["weights"]),
            "schedule": [(start, weights(plain)) for start, plain in mixture["schedule"]],
            "semantics": mixture["semantics"],
            "temperature": None if temperature is None else _fraction(temperature),
            "epoch_length": None if drops else mixture["epoch_length"],
            "per": mixture["per"],
            "stopping": mixture["stopping"],
            "max_passes": {keys[place]: passes for place, passes in caps} or None,
            "drop_last": mixture["drop_last"],
            "seed": mixture["seed"],
        }
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise changed(error) from error


def _fraction(plain: object) -> Fraction:
    if not is_plain_weight(plain):
        raise ValueError(f"weights must be ints and fractions, got {shown(plain)}")
    return Fraction(cast("int | str", plain))
