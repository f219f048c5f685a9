"""What weights mean: ratios, proportions, counts or a temperature, turned into integer weights exactly."""

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from headrace.weighted_sampler._mixture import MAX_SOURCES, Mixture, SampleOrder, Stage, integer_weights
from headrace.weighted_sampler._validation import MAX_POSITION, Weight, as_choice, as_fraction, as_int
from headrace.weighted_sampler.weights import Sources, Weights, parse_sources

Schedule: TypeAlias = Sequence[tuple[int, Weights]]

_DIGITS = 40  # of powers; decimal arithmetic gives the same digits on every platform
_MIN_TEMPERATURE = Fraction(1, 100)


@dataclass(frozen=True)
class Amounts:
    """How much each source holds."""

    samples: tuple[int, ...]
    tokens: tuple[Fraction, ...] | None = None  # when weights are meant by tokens

    def mass(self) -> tuple[Fraction, ...]:
        """What shares refer to: tokens or samples."""
        return self.tokens or tuple(map(Fraction, self.samples))

    def mean(self) -> tuple[Fraction, ...]:
        """Mass of one sample of each source; 1 by samples and for empty sources, which are never drawn from."""
        return tuple(
            mass / samples if mass else Fraction(1) for mass, samples in zip(self.mass(), self.samples, strict=True)
        )


@dataclass(frozen=True)
class NormalizedWeights:
    """What the weights ask for."""

    requested: tuple[Fraction, ...]  # the proportions asked for, exactly
    weights: tuple[int, ...]  # draws of each source in one period of the interleave
    epoch_length: int  # unless the user gives another one


def ratio(weights: Sequence[Fraction], amounts: Amounts) -> NormalizedWeights:
    """Multiply each source's size by its weight and round up.

    >>> ratio([Fraction("1.1"), Fraction(0)], Amounts((100, 50))).weights
    (110, 0)
    """
    return _rounded_up([weight * size for weight, size in zip(weights, amounts.samples, strict=True)])


def count(weights: Sequence[Fraction], amounts: Amounts) -> NormalizedWeights:
    """Take each weight as the number of samples, or of tokens, that an epoch draws; round up.

    >>> count([Fraction(30), Fraction(5)], Amounts((100, 50))).epoch_length
    35
    """
    return _rounded_up([weight / mean for weight, mean in zip(weights, amounts.mean(), strict=True)])


def _rounded_up(requested: Sequence[Fraction]) -> NormalizedWeights:
    draws = tuple(map(math.ceil, requested))
    return NormalizedWeights(tuple(requested), draws, sum(draws))


def proportion(weights: Sequence[Fraction], amounts: Amounts) -> NormalizedWeights:
    """Take each weight as a share of the epoch, which is as long as the sources that are drawn from.

    >>> normalized = proportion([Fraction(3), Fraction(1)], Amounts((100, 50)))
    >>> normalized.weights, normalized.epoch_length
    ((3, 1), 150)
    """
    requested = tuple(weight / mean for weight, mean in zip(weights, amounts.mean(), strict=True))
    length = sum(size for size, weight in zip(amounts.samples, weights, strict=True) if weight)
    return NormalizedWeights(requested, integer_weights(requested), length)


def tempered(weights: Sequence[Fraction], amounts: Amounts, temperature: Fraction) -> NormalizedWeights:
    """Raise weight times size to the power ``1 / temperature``, and take that as a share.

    Temperature 1 keeps the proportions of the sizes, a higher one evens them out (Arivazhagan et al., "Massively
    Multilingual Neural Machine Translation in the Wild", arXiv 1907.05019).

    >>> tempered([Fraction(1), Fraction(1)], Amounts((100, 400)), Fraction(2)).weights
    (1, 2)
    """
    masses = [weight * mass for weight, mass in zip(weights, amounts.mass(), strict=True)]
    return proportion([_root(mass, temperature) for mass in masses], amounts)


def _root(mass: Fraction, temperature: Fraction) -> Fraction:
    if not mass or temperature == 1:
        return mass
    with localcontext() as context:
        context.prec = _DIGITS
        power = Decimal(temperature.denominator) / Decimal(temperature.numerator)
        root = (Decimal(mass.numerator) / Decimal(mass.denominator)) ** power
        context.prec -= 4  # so that the square root of 100 is 10
        return Fraction(+root)


def per_sample(weights: Sequence[Fraction], amounts: Amounts) -> NormalizedWeights:
    """Multiply each source's size by its weight, and round the epoch's length up, not each source's draws.

    For sources that are samples of equal weight: there may be thousands, and rounding each up would add up.

    >>> per_sample([Fraction("0.1")] * 3, Amounts((1, 1, 1))).epoch_length
    1
    """
    requested = tuple(weight * size for weight, size in zip(weights, amounts.samples, strict=True))
    return NormalizedWeights(requested, integer_weights(requested), math.ceil(sum(requested)))


_MEANINGS: dict[str, Callable[[Sequence[Fraction], Amounts], NormalizedWeights]] = {
    "ratio": ratio,
    "proportion": proportion,
    "count": count,
}
SEMANTICS = (*_MEANINGS, "temperature")


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


def normalize(
    weights: Sequence[Fraction], amounts: Amounts, semantics: str, temperature: Fraction | None
) -> NormalizedWeights:
    """Apply the semantics to the weights of sources."""
    if temperature is not None:
        return tempered(weights, amounts, temperature)
    return _MEANINGS[semantics](weights, amounts)


# -- The specification of a mixture --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixtureOptions:
    """The arguments of ``WeightedDistributedSampler`` of the same names."""

    semantics: str | None = None
    epoch_length: int | None = None
    temperature: Weight | None = None
    per: str = "sample"
    sizes: ArrayLike | None = None
    schedule: Schedule = ()


@dataclass(frozen=True)
class MixtureSpec:
    """The sources of a mixture, and their weights by position.

    Attributes:
        length: Samples in the dataset.
        sources: The sources, with the first stage's weights.
        stages: The stages of the endless sequence.
        requested: For each stage and source, the share of the draws that was asked for.
        weights: For each stage and source, the weight as given.
        means: For each source, tokens in a sample on average; None when shares are meant by samples.
        epoch_length: Draws in an epoch.
    """

    length: int
    sources: Sources
    stages: tuple[Stage, ...]
    requested: tuple[tuple[Fraction, ...], ...]
    weights: tuple[tuple[Fraction, ...], ...]
    means: tuple[Fraction, ...] | None
    epoch_length: int

    def order(self, seed: int) -> SampleOrder:
        """Build the sequence of samples for a seed."""
        parts = self.sources.parts
        mixture = Mixture(self.stages, self.epoch_length, seed, [part.size for part in parts])
        return SampleOrder(mixture, [(part.begin, part.end) for part in parts], self.sources.members)


def parse_mixture(argument: str, dataset: Sized, weights: Weights | None, options: MixtureOptions) -> MixtureSpec:
    """Check the weights of all stages and their options; ``argument`` is the name of the weights in messages."""
    _check_dataset(dataset)
    if options.semantics is not None:
        as_choice("semantics", options.semantics, SEMANTICS)
    temperature = parse_temperature(options.semantics, options.temperature)
    if weights is None:
        weights = _ones(argument, dataset, options)
    sources = parse_sources(argument, weights, dataset)
    if len(sources.parts) > MAX_SOURCES:
        raise ValueError(
            f"{argument} names {len(sources.parts)} sources, at most {MAX_SOURCES} are allowed; "
            "merge the smallest, or give one weight per sample"
        )
    semantics = options.semantics or ("ratio" if sources.by_range else "proportion")
    amounts = _amounts(sources, options, semantics, len(dataset))
    starts, stages = _parse_stages(options.schedule, sources, dataset)
    _check_stage(argument, sources, amounts, semantics)
    for place, stage in enumerate(stages[1:]):
        _check_stage(f"schedule[{place}] weights", stage, amounts, semantics)
    normalized = [_normalize_sources(stage, amounts, semantics, temperature) for stage in stages]
    if max(stage.epoch_length for stage in normalized) > MAX_POSITION:
        raise ValueError(f"{argument} asks for more than 2**62 draws an epoch; use smaller weights")
    length = normalized[0].epoch_length if options.epoch_length is None else options.epoch_length
    return MixtureSpec(
        length=len(dataset),
        sources=sources,
        stages=tuple(Stage(start, stage.weights) for start, stage in zip(starts, normalized, strict=True)),
        requested=tuple(_shares(stage.requested) for stage in normalized),
        weights=tuple(tuple(stage.weights) for stage in stages),
        means=amounts.mean() if amounts.tokens else None,
        epoch_length=as_int("epoch_length", length, 1, MAX_POSITION),
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


def _ones(argument: str, dataset: Sized, options: MixtureOptions) -> Weights:
    if options.semantics != "temperature":
        raise TypeError(f"{argument} must be given unless semantics='temperature', got None")
    if not hasattr(dataset, "cumulative_sizes"):
        raise TypeError(f"{argument} must be given: {type(dataset).__name__} is not a concatenation of datasets")
    return [int(size > 0) for size in np.diff(dataset.cumulative_sizes, prepend=0)]


def _parse_stages(schedule: object, first: Sources, dataset: Sized) -> tuple[list[int], list[Sources]]:
    if not isinstance(schedule, Sequence) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in schedule):
        raise TypeError(f"schedule must be a list of tuples (position, weights), got {schedule!r}")
    starts, stages = [0], [first]
    for place, (start, weights) in enumerate(schedule):
        name = f"schedule[{place}]"
        starts.append(as_int(f"{name} position", start, starts[-1] + 1, MAX_POSITION))
        later = parse_sources(f"{name} weights", weights, dataset)
        if first.members is not None or later.members is not None:
            raise ValueError(
                f"{name}: schedule is not supported with one weight per sample; give weights of datasets or ranges"
            )
        if [(part.begin, part.end) for part in later.parts] != [(part.begin, part.end) for part in first.parts]:
            raise ValueError(f"{name} must weigh the same ranges as the first weights; 0 leaves a range out")
        stages.append(later)
    return starts, stages


def _check_stage(argument: str, sources: Sources, amounts: Amounts, semantics: str) -> None:
    if semantics != "proportion" and any(part.groups for part in sources.parts):
        raise ValueError(f"nested {argument} need semantics='proportion', got {semantics!r}")
    for part, tokens in zip(sources.parts, amounts.tokens or (), strict=amounts.tokens is not None):
        if part.weight and not tokens:
            raise ValueError(
                f"sizes of {part.name!r} are all 0, so that no share of tokens can come from it; "
                f"give it weight 0 in {argument}"
            )


def _normalize_sources(
    sources: Sources, amounts: Amounts, semantics: str, temperature: Fraction | None
) -> NormalizedWeights:
    if sources.members is None:
        return normalize(sources.weights, amounts, semantics, temperature)
    if semantics == "ratio":
        return per_sample(sources.weights, amounts)
    if semantics != "proportion":
        raise ValueError(f"one weight per sample needs semantics 'ratio' or 'proportion', got {semantics!r}")
    # Each sample has its weight, so that a group has its weight times its size.
    masses = [weight * size for weight, size in zip(sources.weights, amounts.samples, strict=True)]
    return proportion(masses, amounts)


def _amounts(sources: Sources, options: MixtureOptions, semantics: str, length: int) -> Amounts:
    per = as_choice("per", options.per, ("sample", "token"))
    if (per == "token") != (options.sizes is not None):
        raise ValueError(
            f"per={per!r} with sizes={'given' if options.sizes is not None else None}: shares by tokens "
            "need per='token' and sizes, the number of tokens of each sample"
        )
    samples = tuple(part.size for part in sources.parts)
    if options.sizes is None:
        return Amounts(samples)
    if semantics == "ratio":
        raise ValueError(
            "per='token' changes nothing with semantics='ratio', which multiplies a source's tokens and "
            "samples alike; use 'proportion', 'count' or 'temperature'"
        )
    if sources.members is not None:
        raise ValueError("per='token' needs weights of datasets or ranges, got one weight per sample")
    sizes = _parse_sizes(options.sizes, length)
    tokens = tuple(_total(sizes[part.begin : part.end]) for part in sources.parts)
    return Amounts(samples, tokens)


def _parse_sizes(sizes: ArrayLike, length: int) -> NDArray[Any]:
    given = sizes.numpy(force=True) if isinstance(sizes, torch.Tensor) else np.asarray(sizes)
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
