"""What weights mean: from the numbers a user writes to integer weights, exactly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

EXACT = 2**31  # the largest period that is kept exactly; above it products no longer fit into 64 bits
DIGITS = 40  # of powers; decimal arithmetic gives the same digits on every platform


@dataclass(frozen=True)
class Amounts:
    """How much there is of each source.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens, when shares are meant by tokens; otherwise None.
    """

    samples: tuple[int, ...]
    tokens: tuple[Fraction, ...] | None = None

    def mass(self) -> tuple[Fraction, ...]:
        """What a share is a share of: tokens or samples."""
        return self.tokens or tuple(map(Fraction, self.samples))

    def mean(self) -> tuple[Fraction, ...]:
        """Mass of one sample of each source; 1 by samples."""
        # An empty source is drawn from with weight 0 only, so that its mean never matters.
        return tuple(
            mass / samples if mass else Fraction(1) for mass, samples in zip(self.mass(), self.samples, strict=True)
        )


@dataclass(frozen=True)
class Shares:
    """What the mixture draws from.

    Attributes:
        asked: What was asked for, in samples: only the proportions matter.
        weights: Draws of each source in one period of the interleave.
        epoch_length: Draws in an epoch, unless another length is asked for.
    """

    asked: tuple[Fraction, ...]
    weights: tuple[int, ...]
    epoch_length: int


def ratio(weights: Sequence[Fraction], amounts: Amounts) -> Shares:
    """Multiply each source's size by its weight and round up.

    >>> ratio([Fraction("1.1"), Fraction(0)], Amounts((100, 50))).weights
    (110, 0)
    """
    return _draws([weight * size for weight, size in zip(weights, amounts.samples, strict=True)])


def count(weights: Sequence[Fraction], amounts: Amounts) -> Shares:
    """Take each weight as the number of samples, or of tokens, that an epoch draws; round up.

    >>> count([Fraction(30), Fraction(5)], Amounts((100, 50))).epoch_length
    35
    """
    return _draws([weight / mean for weight, mean in zip(weights, amounts.mean(), strict=True)])


def _draws(asked: Sequence[Fraction]) -> Shares:
    draws = tuple(map(math.ceil, asked))
    return Shares(tuple(asked), draws, sum(draws))


def proportion(weights: Sequence[Fraction], amounts: Amounts) -> Shares:
    """Take each weight as a share of the epoch; the shares need not add up to 1.

    An epoch is as long as the sources that are drawn from.

    >>> shares = proportion([Fraction(3), Fraction(1)], Amounts((100, 50)))
    >>> shares.weights, shares.epoch_length
    ((3, 1), 150)
    """
    asked = tuple(weight / mean for weight, mean in zip(weights, amounts.mean(), strict=True))
    length = sum(size for size, weight in zip(amounts.samples, weights, strict=True) if weight)
    return Shares(asked, integer_weights(asked), length)


def tempered(weights: Sequence[Fraction], amounts: Amounts, temperature: Fraction) -> Shares:
    """Raise weight times size to the power ``1 / temperature``, and take that as a share.

    Temperature 1 keeps the sizes' shares, a higher one evens them out (Arivazhagan et al., "Massively
    Multilingual Neural Machine Translation in the Wild", arXiv 1907.05019).

    >>> tempered([Fraction(1), Fraction(1)], Amounts((100, 400)), Fraction(2)).weights
    (1, 2)
    """
    masses = [weight * mass for weight, mass in zip(weights, amounts.mass(), strict=True)]
    return proportion([_root(mass, temperature) for mass in masses], amounts)


def per_sample(weights: Sequence[Fraction], amounts: Amounts) -> Shares:
    """Multiply each source's size by its weight, and round the epoch's length up, not each source's.

    For sources that are samples of equal weight: there may be thousands, and rounding each up would add up.

    >>> per_sample([Fraction("0.1")] * 3, Amounts((1, 1, 1))).epoch_length
    1
    """
    asked = tuple(weight * size for weight, size in zip(weights, amounts.samples, strict=True))
    return Shares(asked, integer_weights(asked), math.ceil(sum(asked)))


def _root(mass: Fraction, temperature: Fraction) -> Fraction:
    if not mass or temperature == 1:
        return mass
    with localcontext() as context:
        context.prec = DIGITS
        power = Decimal(temperature.denominator) / Decimal(temperature.numerator)
        root = (Decimal(mass.numerator) / Decimal(mass.denominator)) ** power
        context.prec -= 4  # so that the square root of 100 is 10
        return Fraction(+root)


Meaning = Callable[[Sequence[Fraction], Amounts], Shares]
MEANINGS: dict[str, Meaning] = {"ratio": ratio, "proportion": proportion, "count": count}
SEMANTICS = (*MEANINGS, "temperature")


def integer_weights(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Find integers in the same proportions.

    Args:
        shares: Not negative, not all zero.

    Returns:
        The smallest such integers, when their sum is at most 2**31. Otherwise integers with that sum, at least 1
        where the share is above 0: for a handful of sources off by one or two draws in 2e9.

    >>> integer_weights([Fraction("0.75"), Fraction("0.25"), Fraction(0)])
    (3, 1, 0)
    """
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= EXACT:
        return tuple(number // divisor for number in whole)
    return apportion(whole, EXACT)


def apportion(weights: Sequence[int], total: int) -> tuple[int, ...]:
    """Share out ``total`` by the largest remainders (Hamilton's method), after 1 to each that is above 0.

    >>> apportion([1, 1, 1, 0], 10), apportion([10**9, 1], 10)
    ((4, 3, 3, 0), (9, 1))
    """
    whole, left = sum(weights), total - sum(weight > 0 for weight in weights)
    parts = [int(weight > 0) + weight * left // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: -(weights[place] * left % whole))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return tuple(parts)
