"""What weights mean: ratios, proportions, counts or a temperature, turned into integer weights exactly."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from headrace.weighted_sampler._arguments import MAX_POSITION, as_choice, as_int, shown
from headrace.weighted_sampler._mixture import MAX_SOURCES, Mixture, SampleOrder, Stage, drop_stages, integer_weights
from headrace.weighted_sampler.weights import Sources, Weight, Weights, as_fraction, parse_sources, tensor_as_array

Schedule: TypeAlias = Sequence[tuple[int, Weights]]

SEMANTICS = ("ratio", "proportion", "count", "temperature")
MAX_DROPPED = 256  # sources that are dropped one by one: each needs weights of its own
_DIGITS = 40  # of powers; decimal arithmetic gives the same digits on every platform
_MIN_TEMPERATURE = Fraction(1, 100)


@dataclass(frozen=True)
class Amounts:
    """How much each source holds."""

    samples: tuple[int, ...]
    tokens: tuple[Fraction, ...] | None = None  # when weights are meant by tokens

    def means(self) -> list[Fraction]:
        """Tokens of one sample of each source; 1 by samples and for sources that are never drawn from."""
        tokens: Sequence[Fraction | int] = self.tokens or self.samples
        return [Fraction(part, size) if part else Fraction(1) for part, size in zip(tokens, self.samples, strict=True)]


@dataclass(frozen=True)
class NormalizedWeights:
    """What the weights ask for."""

    requested: tuple[Fraction, ...]  # the proportions asked for, exactly
    weights: tuple[int, ...]  # draws of each source in one period of the interleave
    epoch_length: int  # unless the user gives another one


def normalize(
    weights: Sequence[Fraction],
    amounts: Amounts,
    semantics: str,
    temperature: Fraction | None = None,
    *,
    per_sample: bool = False,
) -> NormalizedWeights:
    """Turn the weights of sources into draws; ``per_sample`` where a source is a group of samples of equal weight.

    >>> normalize([Fraction("1.1"), Fraction(0)], Amounts((100, 50)), "ratio").weights
    (110, 0)
    >>> normalize([Fraction(3), Fraction(1)], Amounts((100, 50)), "proportion").weights
    (3, 1)
    >>> normalize([Fraction(1), Fraction(1)], Amounts((100, 400)), "temperature", Fraction(2)).weights
    (1, 2)
    """
    sizes, means = amounts.samples, amounts.means()
    by_size = [weight * size for weight, size in zip(weights, sizes, strict=True)]
    by_mean = [weight / mean for weight, mean in zip(weights, means, strict=True)]
    if semantics in ("ratio", "count") and not per_sample:
        requested = by_size if semantics == "ratio" else by_mean
        draws = tuple(map(math.ceil, requested))
        return NormalizedWeights(tuple(requested), draws, sum(draws))
    if temperature is not None:
        by_mean = [_root(part * mean, temperature) / mean for part, mean in zip(by_size, means, strict=True)]
    requested = by_size if per_sample else by_mean
    length = sum(size for size, weight in zip(sizes, weights, strict=True) if weight)
    if semantics == "ratio":
        length = math.ceil(sum(by_size))  # of samples there may be thousands of groups: not each one's rounded up
    return NormalizedWeights(tuple(requested), integer_weights(requested), length)


def _root(mass: Fraction, temperature: Fraction) -> Fraction:
    """The power ``1 / temperature``: 1 keeps the proportions of sizes, more evens them out (arXiv 1907.05019)."""
    if not mass or temperature == 1:
        return mass
    with localcontext() as context:
        context.prec = _DIGITS
        power = Decimal(temperature.denominator) / Decimal(temperature.numerator)
        root = (Decimal(mass.numerator) / Decimal(mass.denominator)) ** power
        context.prec -= 4  # so that the square root of 100 is 10
        return Fraction(+root)


def parse_temperature(semantics: str | None, temperature: Weight | None) -> Fraction | None:
    """Check the temperature, which belongs to ``semantics="temperature"``."""
    if (semantics == "temperature") != (temperature is not None):
        raise ValueError(
            f"temperature={temperature} with semantics={semantics!r}: give temperature with "
            "semantics='temperature', and only then"
        )
    if temperature is None:
        return None
    if (exact := as_fraction("temperature", temperature)) < _MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {float(_MIN_TEMPERATURE)}, got {temperature}: "
            "1 keeps the proportions of the sizes, and near 0 only the largest source is left"
        )
    return exact


# -- The specification of a mixture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureSpec:
    """The sources of a mixture, and their weights by position."""

    length: int  # samples in the dataset
    sources: Sources  # with the first stage's weights
    stages: tuple[Stage, ...]  # of the endless sequence
    requested: tuple[tuple[Fraction, ...], ...]  # for each stage and source, the share of the draws
    weights: tuple[tuple[Fraction, ...], ...]  # for each stage and source, as given
    means: tuple[Fraction, ...] | None  # tokens in a sample of each source; None when shares are meant by samples
    epoch_length: int
    drops: bool = False  # whether each source is drawn once an epoch and then dropped

    def order(self, seed: int) -> SampleOrder:
        """Build the sequence of samples for a seed."""
        parts = self.sources.parts
        sizes = [part.size for part in parts]
        mixture = Mixture(self.stages, self.epoch_length, seed, sizes, every_epoch=self.drops)
        return SampleOrder(mixture, [(part.begin, part.end) for part in parts], self.sources.members)


def parse_mixture(
    argument: str,
    dataset: Sized,
    weights: Weights | None,
    *,
    semantics: str | None,
    epoch_length: int | None,
    temperature: Weight | None,
    per: str,
    sizes: ArrayLike | None,
    schedule: Schedule,
    stopping: str,
) -> MixtureSpec:
    """Check the arguments of ``WeightedDistributedSampler``; ``argument`` is the name of the weights in messages."""
    _check_dataset(dataset)
    if semantics is not None:
        as_choice("semantics", semantics, SEMANTICS)
    exact_temperature = parse_temperature(semantics, temperature)
    if weights is None:
        weights = _ones(argument, dataset, semantics)
    sources = parse_sources(argument, weights, dataset)
    if len(sources.parts) > MAX_SOURCES:
        raise ValueError(
            f"{argument} names {len(sources.parts)} sources, at most {MAX_SOURCES} are allowed; "
            "merge the smallest, or give one weight per sample"
        )
    semantics = semantics or ("ratio" if sources.by_range else "proportion")
    per_sample = sources.members is not None
    if per_sample and semantics not in ("ratio", "proportion"):
        raise ValueError(f"one weight per sample needs semantics 'ratio' or 'proportion', got {semantics!r}")
    amounts = _amounts(sources, per, sizes, semantics, len(dataset))
    stages = {(0, argument): sources} | _later_stages(schedule, sources, dataset)
    for (_, name), stage in stages.items():
        _check_stage(name, stage, amounts, semantics)
    normalized = [
        normalize(stage.weights, amounts, semantics, exact_temperature, per_sample=per_sample)
        for stage in stages.values()
    ]
    if max(stage.epoch_length for stage in normalized) > MAX_POSITION:
        raise ValueError(f"{argument} asks for more than 2**62 draws an epoch; use smaller weights")
    length = normalized[0].epoch_length if epoch_length is None else epoch_length
    spec = MixtureSpec(
        length=len(dataset),
        sources=sources,
        stages=tuple(Stage(start, stage.weights) for (start, _), stage in zip(stages, normalized, strict=True)),
        requested=tuple(_shares(stage.requested) for stage in normalized),
        weights=tuple(tuple(stage.weights) for stage in stages.values()),
        means=tuple(amounts.means()) if amounts.tokens else None,
        epoch_length=as_int("epoch_length", length, 1, MAX_POSITION),
    )
    if as_choice("stopping", stopping, ("endless", "drop_exhausted")) == "endless":
        return spec
    refused = {
        f"no epoch_length, got {epoch_length}: leave it out": epoch_length is not None,
        f"no schedule, got {len(schedule)} later {'stage' if len(schedule) == 1 else 'stages'}: leave it out": schedule,
        "no weights of single samples: give weights of datasets or ranges": per_sample,
        f"up to {MAX_DROPPED} sources, got {len(sources.parts)}: concatenate some": len(sources.parts) > MAX_DROPPED,
    }
    for what, given in refused.items():
        if given:
            raise ValueError(f"stopping='drop_exhausted' draws each sample once an epoch: it takes {what}")
    return _dropping(spec)


def _dropping(spec: MixtureSpec) -> MixtureSpec:
    """The same sources, each drawn once an epoch and then dropped."""
    [draws], [asked] = (stage.weights for stage in spec.stages), spec.requested
    sizes = [part.size for part in spec.sources.parts]
    stages = tuple(drop_stages(draws, sizes))
    kept = [[share * (weight > 0) for share, weight in zip(asked, stage.weights, strict=True)] for stage in stages]
    return replace(
        spec,
        stages=stages,
        requested=tuple(map(_shares, kept)),
        weights=spec.weights * len(stages),
        epoch_length=sum(size for size, weight in zip(sizes, draws, strict=True) if weight),
        drops=True,
    )


def _shares(parts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    whole = sum(parts)
    return tuple(part / whole for part in parts)


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, (list, tuple)) and dataset and all(isinstance(part, (Dataset, range)) for part in dataset):
        raise TypeError(
            f"dataset must be one dataset, got a {type(dataset).__name__} of {len(dataset)}: join them with "
            "NamedConcatDataset({name: dataset, ...}) or torch's ConcatDataset"
        )
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"dataset must have a length, got {type(dataset).__name__}: weights of indices need a map-style dataset"
        )


def _ones(argument: str, dataset: Sized, semantics: str | None) -> Weights:
    if semantics != "temperature":
        raise TypeError(f"{argument} must be given unless semantics='temperature', got None")
    if not hasattr(dataset, "cumulative_sizes"):
        raise TypeError(f"{argument} must be given: {type(dataset).__name__} is not a concatenation of datasets")
    return [int(size > 0) for size in np.diff(dataset.cumulative_sizes, prepend=0)]


def _later_stages(schedule: object, first: Sources, dataset: Sized) -> dict[tuple[int, str], Sources]:
    """The sources by (position, name of the weights in messages)."""
    stages: dict[tuple[int, str], Sources] = {}
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


def is_by_range(weights: object) -> bool:
    """Whether weights are those of ranges."""
    return isinstance(weights, Mapping) and all(isinstance(key, tuple) for key in weights)


def pairs_of(schedule: object) -> Sequence[tuple[Any, Any]]:
    """Return a schedule if it is a list of pairs."""
    if isinstance(schedule, Sequence) and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in schedule):
        return schedule
    raise TypeError(f"schedule must be a list of tuples (position, weights), got {shown(schedule)}")


def _check_stage(argument: str, sources: Sources, amounts: Amounts, semantics: str) -> None:
    if semantics != "proportion" and any(part.groups for part in sources.parts):
        raise ValueError(f"nested {argument} need semantics='proportion', got {semantics!r}")
    for part, tokens in zip(sources.parts, amounts.tokens or (), strict=amounts.tokens is not None):
        if part.weight and not tokens:
            raise ValueError(
                f"sizes of {part.name!r} are all 0, so that no share of tokens can come from it; "
                f"give it weight 0 in {argument}"
            )


def _amounts(sources: Sources, per: str, sizes: ArrayLike | None, semantics: str, length: int) -> Amounts:
    if (as_choice("per", per, ("sample", "token")) == "token") != (sizes is not None):
        if sizes is not None:
            raise ValueError("sizes are for shares by tokens: give per='token'")
        raise ValueError("per='token' needs sizes=, the tokens of each sample; those of a data module are its own")
    samples = tuple(part.size for part in sources.parts)
    if sizes is None:
        return Amounts(samples)
    if semantics == "ratio":
        raise ValueError(
            "per='token' changes nothing with semantics='ratio', which multiplies a source's tokens and "
            "samples alike; use 'proportion', 'count' or 'temperature'"
        )
    if sources.members is not None:
        raise ValueError("per='token' needs weights of datasets or ranges, got one weight per sample")
    parsed = _parse_sizes(sizes, length)
    return Amounts(samples, tuple(_total(parsed[part.begin : part.end]) for part in sources.parts))


def _parse_sizes(sizes: ArrayLike, length: int) -> NDArray[Any]:
    given = np.asarray(tensor_as_array("sizes", sizes))
    if given.shape != (length,) or given.dtype.kind not in "iuf":
        raise ValueError(
            f"sizes must be one number for each of the {length} samples, got dtype {given.dtype}, shape {given.shape}"
        )
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError("sizes must be finite and not negative")
    return given


def _total(sizes: NDArray[Any]) -> Fraction:
    if sizes.dtype.kind == "f":
        return Fraction(math.fsum(sizes))  # rounded once, so that it is the same everywhere
    return Fraction(int(sizes.sum(dtype=np.int64)))
