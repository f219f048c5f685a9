"""The options of a mixture, checked, and turned into sources and stages."""

import hashlib
import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from headrace.weighted_sampler.checks import integer
from headrace.weighted_sampler.mixture import MOST, Mixture, Stage
from headrace.weighted_sampler.shares import MEANINGS, SEMANTICS, Amounts, Shares, per_sample, proportion, tempered
from headrace.weighted_sampler.sources import Sources, Weights, read_sources
from headrace.weighted_sampler.weights import Ratio, exact

MOST_SOURCES = 2**16  # sources are numbered in 16 bits
COLDEST = Fraction(1, 100)  # the least temperature; powers beyond 100 are no mixture any more
Schedule = Sequence[tuple[int, Weights]]


@dataclass(frozen=True)
class Options:
    """How the weights are meant; the arguments of ``WeightedDistributedSampler`` of the same names."""

    semantics: str = "ratio"
    epoch_length: int | None = None
    temperature: Ratio | None = None
    per: str = "sample"
    sizes: ArrayLike | None = None

    def __post_init__(self) -> None:
        if self.semantics not in SEMANTICS:
            raise ValueError(f"semantics must be one of {', '.join(SEMANTICS)}, got {self.semantics!r}")
        if self.per not in ("sample", "token"):
            raise ValueError(f"per must be 'sample' or 'token', got {self.per!r}")
        if (self.per == "token") != (self.sizes is not None):
            raise ValueError(
                f"per={self.per!r} with sizes={'given' if self.sizes is not None else None}: shares by tokens "
                "need per='token' and sizes, the number of tokens of each sample"
            )
        if self.per == "token" and self.semantics == "ratio":
            raise ValueError(
                "per='token' changes nothing with semantics='ratio', which multiplies a source's tokens and "
                "samples alike; use 'proportion', 'count' or 'temperature'"
            )
        if (self.semantics == "temperature") != (self.temperature is not None):
            raise ValueError(
                f"temperature={self.temperature} with semantics={self.semantics!r}: give temperature with "
                "semantics='temperature', and only then"
            )
        if self.temperature is not None and exact("temperature", self.temperature) < COLDEST:
            raise ValueError(
                f"temperature must be at least {float(COLDEST)}, got {self.temperature}: "
                "1 keeps the sizes' shares, and close to 0 only the largest source is left"
            )


@dataclass(frozen=True)
class Recipe:
    """What is drawn from, and by which weights from where on.

    Attributes:
        length: Samples in the dataset.
        sources: The sources, with the first stage's weights.
        stages: The stages of the endless sequence.
        asked: For each stage and source, the share of the draws that was asked for.
        weights: For each stage and source, the weight as given.
        means: For each source, tokens in a sample on average; None when shares are meant by samples.
        epoch_length: Draws in an epoch.
    """

    length: int
    sources: Sources
    stages: tuple[Stage, ...]
    asked: tuple[tuple[Fraction, ...], ...]
    weights: tuple[tuple[Fraction, ...], ...]
    means: tuple[Fraction, ...] | None
    epoch_length: int

    def fingerprint(self) -> str:
        """Name the data and the weights that an order depends on: ``"<dataset length>-<digest>"``."""
        places = [(part.begin, part.end) for part in self.sources.parts]
        stages = [(stage.start, stage.weights) for stage in self.stages]
        text = repr((places, stages, self.epoch_length, self.sources.digest))
        return f"{self.length}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def mixture(self, seed: int) -> Mixture:
        """Build the sequence of sources for a seed."""
        return Mixture(self.stages, self.epoch_length, seed, [part.size for part in self.sources.parts])


def read_recipe(argument: str, dataset: Sized, weights: Weights | None, options: Options, schedule: Schedule) -> Recipe:
    """Check the weights of all stages and work out what is drawn.

    Args:
        argument: What to call the weights in an error.
        dataset: What is drawn from.
        weights: Of the first stage; None with a temperature gives every dataset the weight 1.
        options: What the weights mean.
        schedule: Further stages: positions in the endless sequence, rising, and the weights from there on.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is not allowed.
    """
    sources = read_sources(argument, _or_ones(argument, weights, dataset, options), dataset)
    if len(sources.parts) > MOST_SOURCES:
        raise ValueError(
            f"{argument} names {len(sources.parts)} sources, at most {MOST_SOURCES} are allowed; "
            "join the smallest, or give one weight a sample"
        )
    amounts = _amounts(sources, options, len(dataset))
    starts, all_sources = [0], [sources]
    for place, (start, later) in enumerate(_stages(schedule)):
        name = f"schedule[{place}]"
        starts.append(integer(f"{name} position", start, starts[-1] + 1, MOST))
        all_sources.append(_same_sources(name, read_sources(f"{name} weights", later, dataset), sources))
    shares = [_shares(stage, amounts, options) for stage in all_sources]
    length = shares[0].epoch_length if options.epoch_length is None else options.epoch_length
    if max(share.epoch_length for share in shares) > MOST:
        raise ValueError(f"{argument} asks for more than 2**62 draws an epoch; use smaller weights")
    return Recipe(
        length=len(dataset),
        sources=sources,
        stages=tuple(Stage(start, share.weights) for start, share in zip(starts, shares, strict=True)),
        asked=tuple(_normalised(share.asked) for share in shares),
        weights=tuple(tuple(stage.weights) for stage in all_sources),
        means=amounts.mean() if amounts.tokens else None,
        epoch_length=integer("epoch_length", length, 1, MOST),
    )


def _normalised(parts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    whole = sum(parts)
    return tuple(part / whole for part in parts)


def _or_ones(argument: str, weights: Weights | None, dataset: Sized, options: Options) -> Weights:
    if weights is not None:
        return weights
    if options.semantics != "temperature":
        raise TypeError(f"{argument} must be given with semantics={options.semantics!r}")
    if not hasattr(dataset, "cumulative_sizes"):
        raise TypeError(f"{argument} must be given: {type(dataset).__name__} is not a concatenation of datasets")
    return [int(size > 0) for size in np.diff(dataset.cumulative_sizes, prepend=0)]


def _stages(schedule: object) -> Schedule:
    if isinstance(schedule, Sequence) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in schedule):
        return schedule
    raise TypeError(f"schedule must be a list of tuples (position, weights), got {schedule!r}")


def _same_sources(name: str, later: Sources, first: Sources) -> Sources:
    if first.members is not None or later.members is not None:
        raise ValueError(f"{name}: one weight a sample makes sources of equal weight, which cannot change on the way")
    if [(part.begin, part.end) for part in later.parts] != [(part.begin, part.end) for part in first.parts]:
        raise ValueError(f"{name} must weigh the same ranges as the first weights; 0 leaves a range out")
    return later


def _shares(sources: Sources, amounts: Amounts, options: Options) -> Shares:
    if sources.members is not None:
        if options.semantics not in ("ratio", "proportion"):
            raise ValueError(f"one weight a sample needs semantics 'ratio' or 'proportion', got {options.semantics!r}")
        if options.semantics == "ratio":
            return per_sample(sources.weights, amounts)
        # Each sample has its weight, so that a group has its weight times its size.
        masses = [weight * size for weight, size in zip(sources.weights, amounts.samples, strict=True)]
        return proportion(masses, amounts)
    if options.temperature is not None:
        return tempered(sources.weights, amounts, exact("temperature", options.temperature))
    return MEANINGS[options.semantics](sources.weights, amounts)


def _amounts(sources: Sources, options: Options, length: int) -> Amounts:
    samples = tuple(part.size for part in sources.parts)
    if options.sizes is None:
        return Amounts(samples)
    sizes = _sizes(options.sizes, length)
    if sources.members is not None:
        raise ValueError("per='token' needs weights of datasets or ranges, got one weight a sample")
    tokens = tuple(_total(sizes[part.begin : part.end]) for part in sources.parts)
    for part, total in zip(sources.parts, tokens, strict=True):
        if part.weight and not total:
            raise ValueError(f"sizes of {part.name!r} are all 0, so that no share of tokens can come from it")
    return Amounts(samples, tokens)


def _sizes(sizes: ArrayLike, length: int) -> NDArray[Any]:
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
