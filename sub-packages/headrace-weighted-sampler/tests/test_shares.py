"""What weights mean, exactly."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.shares import (
    EXACT,
    Amounts,
    apportion,
    count,
    integer_weights,
    per_sample,
    proportion,
    ratio,
    tempered,
)

SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(0, 6))
def test_ratio_counts_are_exact_for_every_decimal(size: int, digits: int, places: int) -> None:
    shares = ratio([Fraction(digits, 10**places)], Amounts((size,)))
    assert shares.weights == (-(-size * digits // 10**places),)
    assert shares.epoch_length == sum(shares.weights)


@given(st.lists(st.fractions(0, 100, max_denominator=12), min_size=1, max_size=8).filter(any))
def test_small_proportions_are_kept_exactly(shares: list[Fraction]) -> None:
    weights = integer_weights(shares)
    assert [Fraction(weight, sum(weights)) for weight in weights] == [share / sum(shares) for share in shares]


@given(st.lists(st.fractions(0, 1), min_size=2, max_size=8).filter(any))
def test_other_proportions_are_off_by_one_in_two_to_the_31(shares: list[Fraction]) -> None:
    weights = integer_weights(shares)
    assert sum(weights) <= EXACT
    for share, weight in zip(shares, weights, strict=True):
        assert (weight > 0) == (share > 0)
        assert abs(Fraction(weight, sum(weights)) - share / sum(shares)) <= Fraction(len(shares), EXACT)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8).filter(any), st.integers(10**4, 10**6))
def test_what_is_shared_out_adds_up(weights: list[int], total: int) -> None:
    parts = apportion(weights, total)
    assert sum(parts) == total
    assert [part > 0 for part in parts] == [weight > 0 for weight in weights]
    for weight, part in zip(weights, parts, strict=True):
        # Off by less than one, and by what the smallest were lifted by.
        assert abs(part - Fraction(weight * total, sum(weights))) < 1 + len(weights)


@given(SIZES)
def test_temperature_1_is_the_sizes_and_a_high_one_is_even(sizes: list[int]) -> None:
    amounts, ones = Amounts(tuple(sizes)), [Fraction(1)] * len(sizes)
    warm = tempered(ones, amounts, Fraction(1)).asked
    assert warm == tuple(map(Fraction, sizes))
    hot = tempered(ones, amounts, Fraction(10**6)).asked
    assert max(hot) / min(hot) < 1 + 1e-4


def test_roots_are_exact_where_they_can_be() -> None:
    shares = tempered([Fraction(1)] * 3, Amounts((100, 400, 2500)), Fraction(2))
    assert shares.asked == tuple(map(Fraction, (10, 20, 50)))
    third = tempered([Fraction(1)] * 2, Amounts((27, 8)), Fraction(3))
    assert third.weights == (3, 2)


def test_by_tokens_a_source_of_long_samples_is_drawn_less() -> None:
    amounts = Amounts((100, 100), (Fraction(1000), Fraction(9000)))  # 10 and 90 tokens a sample
    assert proportion([Fraction(1), Fraction(1)], amounts).weights == (9, 1)
    assert count([Fraction(1000), Fraction(1000)], amounts).weights == (100, 12)
    # Square roots of 1000 and 9000 tokens: 1 to 3 in tokens, 3 to 1 in samples.
    warm = tempered([Fraction(1)] * 2, amounts, Fraction(2)).asked
    assert float(warm[0] / warm[1]) == pytest.approx(3, rel=1e-12)


def test_one_weight_a_sample_rounds_the_epoch_once() -> None:
    shares = per_sample([Fraction("0.1"), Fraction("0.3")], Amounts((7, 1)))
    assert (shares.weights, shares.epoch_length) == ((7, 3), 1)


@pytest.mark.parametrize("value", [Decimal("1e-9"), Decimal("1e9")])
def test_extreme_masses_have_roots(value: Decimal) -> None:
    [root] = tempered([Fraction(value)], Amounts((1,)), Fraction("0.01")).asked
    assert root == Fraction(value) ** 100
