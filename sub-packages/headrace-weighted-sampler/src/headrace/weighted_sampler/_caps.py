"""Caps: a source that has been drawn so many times leaves the mixture, at positions that are known beforehand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.weighted_sampler._arguments import MAX_POSITION, shown
from headrace.weighted_sampler._mixture_arguments import Leaving, MixtureSpec, normalized_shares
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._stopping import MAX_DROPPED
from headrace.weighted_sampler._token_mixture import TokenAxis, TokenMixture
from headrace.weighted_sampler.schedule import Stage
from headrace.weighted_sampler.weights import WeightedSources


def cap_passes(spec: MixtureSpec, max_passes: Mapping[Any, int] | None, seed: int) -> MixtureSpec:
    """Return a mixture whose sources leave it after so many passes; the others take their weight in proportion."""
    if max_passes is None:
        return spec
    limits = _limits(spec, max_passes)
    stages: list[Stage] = []
    requested, weights, left = [], [], []
    first = spec.growth.first if spec.growth else [0] * len(spec.sources.parts)
    gone = {source for source, limit in limits.items() if first[source] >= limit}
    axes: list[TokenAxis] = []
    for number, scheduled in enumerate(spec.stages):
        start, end = scheduled.start, next((stage.start for stage in spec.stages[number + 1 :]), MAX_POSITION)
        while start < end:
            own = [0 if source in gone else weight for source, weight in enumerate(scheduled.weights)]
            if not any(own):
                last = f"at position {start}" if stages else "at once"
                raise ValueError(
                    f"max_passes ends the mixture {last}: all sources with a weight above 0 there have been drawn as "
                    "often as they may; leave one source out of max_passes"
                )
            stages.append(Stage(start, tuple(own)))
            requested.append(
                normalized_shares([share * (w > 0) for share, w in zip(spec.requested[number], own, strict=True)])
            )
            weights.append(tuple(w * (o > 0) for w, o in zip(spec.weights[number], own, strict=True)))
            mixture = replace(spec, stages=tuple(stages)).order(seed).mixture
            if isinstance(mixture, TokenMixture):
                mixture.axes = axes = axes or mixture.axes  # their cumulated sizes serve all stages
            capped = {source: limit for source, limit in limits.items() if own[source]}
            start = min(end, mixture.leaves_at(len(stages) - 1, capped) or end)
            counts = mixture.counts_at(len(stages) - 1, start) if capped and start < MAX_POSITION else []
            for source, limit in capped.items():
                if counts and counts[source] >= limit:
                    gone.add(source)
                    left.append(Leaving(spec.sources.parts[source].name, start))
    return replace(spec, stages=tuple(stages), requested=tuple(requested), weights=tuple(weights), leaving=tuple(left))


def _limits(spec: MixtureSpec, max_passes: object) -> dict[int, int]:
    """The draws after which each capped source leaves."""
    if not isinstance(max_passes, Mapping):
        raise TypeError(f"max_passes must be a mapping {{source: passes}}, got {shown(max_passes)}")
    if spec.drops:
        raise ValueError("max_passes is not for stopping='drop_exhausted', which draws each sample once per epoch")
    if spec.sources.members is not None:
        raise ValueError("max_passes needs weights of datasets or ranges, got one weight per sample")
    places = places_of(spec.sources)
    limits = {}
    for key, passes in max_passes.items():
        if key not in places:
            allowed = ", ".join(map(repr, list(places)[:10]))
            raise ValueError(f"max_passes names {shown(key)}, which is no source; the sources are {allowed}")
        part = spec.sources.parts[places[key]]
        limits[places[key]] = part.size * checked_int(f"max_passes[{key!r}]", passes, 1)
    if len(limits) > MAX_DROPPED:
        raise ValueError(f"max_passes must name at most {MAX_DROPPED} sources, got {len(limits)}; concatenate some")
    return {source: limit for source, limit in limits.items() if limit}


def places_of(sources: WeightedSources) -> dict[Any, int]:
    """The number of each source, by the key under which its weight is given."""
    if sources.by_range:
        return {bounds: place for place, bounds in enumerate(sources.ranges)}
    numbers: dict[Any, int] = {place: place for place in range(len(sources.parts))}
    return {part.name: place for place, part in enumerate(sources.parts)} | numbers
