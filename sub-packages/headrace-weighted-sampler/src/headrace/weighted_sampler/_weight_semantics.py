"""Weight semantics: ratios, proportions, counts or a temperature, converted exactly to integer weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.weighted_sampler._arguments import MAX_POSITION, as_choice, shown
from headrace.weighted_sampler._interleave import MAX_PERIOD
from headrace.weighted_sampler._permutation import Indices
from headrace.weighted_sampler._token_mixture import MAX_SIZE
from headrace.weighted_sampler.weights import Weight, WeightedSources, as_fraction, plain_array

SEMANTICS = ("ratio", "proportion", "count", "temperature")
PER = ("sample", "token")
_FRACTION_BITS = 30  # of the longest sample, where sizes are not whole tokens
_DIGITS = 40  # of powers; decimal arithmetic gives the same digits on every platform
_MIN_TEMPERATURE = Fraction(1, 100)


@dataclass(frozen=True)
class Amounts:
    """Samples and tokens of each source."""

    samples: tuple[int, ...]
    tokens: tuple[Fraction, ...] | None = None  # if weights refer to tokens
    sizes: Indices | None = None  # tokens of each sample of the dataset, in equal parts of a token

    def means(self) -> list[Fraction]:
        """Mean tokens per sample of each source; 1 if weights refer to samples, and for sources without tokens."""
        tokens: Sequence[Fraction | int] = self.tokens or self.samples
        return [Fraction(part, size) if part else Fraction(1) for part, size in zip(tokens, self.samples, strict=True)]


@dataclass(frozen=True)
class NormalizedWeights:
    """Weights in a common form."""

    requested: tuple[Fraction, ...]  # the exact requested proportions
    weights: tuple[int, ...]  # draws of each source in one period of the interleaving
    epoch_length: int  # the default

    def by_tokens(self, amounts: Amounts) -> "NormalizedWeights":
        """The same with weights that are tokens of each source, not draws."""
        tokens = [share * mean for share, mean in zip(self.requested, amounts.means(), strict=True)]
        return replace(self, weights=integer_weights(tokens))


def normalize(
    weights: Sequence[Fraction],
    amounts: Amounts,
    semantics: str,
    temperature: Fraction | None = None,
    *,
    per_sample: bool = False,
) -> NormalizedWeights:
    """Convert the weights of sources to draws; ``per_sample`` if a source is a group of samples of equal weight.

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
        length = math.ceil(sum(by_size))  # rounded once: there may be thousands of groups of samples
    return NormalizedWeights(tuple(requested), integer_weights(requested), length)


def _root(mass: Fraction, temperature: Fraction) -> Fraction:
    """The power ``1 / temperature``: 1 keeps the shares by size, larger values flatten them (arXiv 1907.05019)."""
    if not mass or temperature == 1:
        return mass
    with localcontext() as context:
        context.prec = _DIGITS
        power = Decimal(temperature.denominator) / Decimal(temperature.numerator)
        root = (Decimal(mass.numerator) / Decimal(mass.denominator)) ** power
        context.prec -= 4  # so that the square root of 100 is 10
        return Fraction(+root)


def parse_temperature(semantics: str | None, temperature: Weight | None) -> Fraction | None:
    """Validate the temperature, which belongs to ``semantics="temperature"``."""
    if (semantics == "temperature") != (temperature is not None):
        raise ValueError(
            f"temperature={temperature} with semantics={semantics!r}: semantics='temperature' needs temperature, "
            "and other semantics do not allow it"
        )
    if temperature is None:
        return None
    if (exact := as_fraction("temperature", temperature)) < _MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be at least {float(_MIN_TEMPERATURE)}, got {temperature}: "
            "1 keeps the proportions of the sizes, and near 0 only the largest source is left"
        )
    return exact


def integer_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of some weights, rounded if they add up to more than 2**31.

    >>> integer_weights([Fraction("0.75"), Fraction("0.25"), Fraction(0)])
    (3, 1, 0)
    """
    common = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= MAX_PERIOD:
        return tuple(number // divisor for number in whole)
    return apportion(whole, MAX_PERIOD)


def apportion(weights: Sequence[int], total: int) -> tuple[int, ...]:
    """Split ``total`` by the largest remainders (Hamilton's method), after giving 1 to each weight above 0.

    >>> apportion([1, 1, 1, 0], 10), apportion([10**9, 1], 10)
    ((4, 3, 3, 0), (9, 1))
    """
    whole, left = sum(weights), total - sum(weight > 0 for weight in weights)
    parts = [int(weight > 0) + weight * left // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: -(weights[place] * left % whole))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return tuple(parts)


def amounts_of(sources: WeightedSources, per: str, sizes: ArrayLike | None, semantics: str, length: int) -> Amounts:
    if (as_choice("per", per, PER) == "token") != (sizes is not None):
        if sizes is not None:
            raise ValueError("sizes are for shares by tokens: give per='token'")
        raise ValueError(
            "per='token' needs sizes=, the tokens of each sample; a data module does not pass its sizes to the sampler"
        )
    samples = tuple(part.size for part in sources.parts)
    if sizes is None:
        return Amounts(samples)
    if semantics == "ratio":
        raise ValueError(
            "per='token' has no effect with semantics='ratio', which multiplies a source's tokens and "
            "samples equally; use 'proportion', 'count' or 'temperature'"
        )
    if sources.members is not None:
        raise ValueError("per='token' needs weights of datasets or ranges, got one weight per sample")
    parsed = parse_sizes(sizes, length)
    tokens = tuple(_total(parsed[part.begin : part.end]) for part in sources.parts)
    return Amounts(samples, tokens, _whole(parsed))


def parse_sizes(sizes: ArrayLike, length: int) -> NDArray[Any]:
    """Return the number of tokens of each of so many samples as an array; refuse what is none."""
    if isinstance(sizes, str):
        raise ValueError(
            f"sizes must be one number for each of the {length} samples, got {sizes!r}: give the numbers themselves, "
            "such as the column of that name of every source, joined in their order by np.concatenate"
        )
    given = np.asarray(plain_array("sizes", sizes))
    if given.shape != (length,) or given.dtype.kind not in "iuf":
        raise ValueError(
            f"sizes must be one number for each of the {length} samples, got dtype {given.dtype}, shape {given.shape}"
        )
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError("sizes must be finite and not negative")
    return given


def _whole(sizes: NDArray[Any]) -> Indices:
    """Sizes as integers, in proportion: fractions of a token are kept to about a billionth of the longest sample."""
    if sizes.dtype.kind == "f" and (sizes != np.rint(sizes)).any():
        bits = _FRACTION_BITS - int(np.frexp(np.float64(sizes.max()))[1])
        sizes = np.rint(np.ldexp(sizes.astype(np.float64), bits))
    if sizes.max(initial=0) > MAX_SIZE or sizes.sum(dtype=np.float64) > MAX_POSITION:
        raise ValueError(f"sizes must be at most 2**32, and 2**62 together, got {shown(sizes.max())}")
    return np.ascontiguousarray(sizes, np.int64)


def _total(sizes: NDArray[Any]) -> Fraction:
    if sizes.dtype.kind == "f":
        return Fraction(math.fsum(sizes))  # rounded once, so the result is the same on every platform
    return Fraction(int(sizes.sum(dtype=np.int64)))
