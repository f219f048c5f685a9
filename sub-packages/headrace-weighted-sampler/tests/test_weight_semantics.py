"""What weights and options mean, exactly, and what is refused."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler
from headrace.weighted_sampler._interleave import MAX_PERIOD
from headrace.weighted_sampler._weight_semantics import Amounts, apportion, integer_weights, normalize

SIZE_LISTS = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(0, 6))
def test_ratio_counts_are_exact_for_every_decimal(size: int, digits: int, places: int) -> None:
    shares = normalize([Fraction(digits, 10**places)], Amounts((size,)), "ratio")
    assert shares.weights == (-(-size * digits // 10**places),)
    assert shares.epoch_length == sum(shares.weights)


@pytest.mark.slow
@given(st.lists(st.fractions(0, 100, max_denominator=12), min_size=1, max_size=8).filter(any))
def test_small_proportions_are_kept_exactly(shares: list[Fraction]) -> None:
    weights = integer_weights(shares)
    assert [Fraction(weight, sum(weights)) for weight in weights] == [share / sum(shares) for share in shares]


@pytest.mark.slow
@given(st.lists(st.fractions(0, 1), min_size=2, max_size=8).filter(any))
def test_other_proportions_are_off_by_one_in_two_to_the_31(shares: list[Fraction]) -> None:
    weights = integer_weights(shares)
    assert sum(weights) <= MAX_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        assert (weight > 0) == (share > 0)
        assert abs(Fraction(weight, sum(weights)) - share / sum(shares)) <= Fraction(len(shares), MAX_PERIOD)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8).filter(any), st.integers(10**4, 10**6))
def test_what_is_shared_out_adds_up(weights: list[int], total: int) -> None:
    parts = apportion(weights, total)
    assert sum(parts) == total
    assert [part > 0 for part in parts] == [weight > 0 for weight in weights]
    for weight, part in zip(weights, parts, strict=True):
        # Off by less than one, and by what the smallest were lifted by.
        assert abs(part - Fraction(weight * total, sum(weights))) < 1 + len(weights)


@given(SIZE_LISTS)
def test_temperature_1_is_the_sizes_and_a_high_one_is_even(sizes: list[int]) -> None:
    amounts, ones = Amounts(tuple(sizes)), [Fraction(1)] * len(sizes)
    warm = normalize(ones, amounts, "temperature", Fraction(1)).requested
    assert warm == tuple(map(Fraction, sizes))
    hot = normalize(ones, amounts, "temperature", Fraction(10**6)).requested
    assert max(hot) / min(hot) < 1 + 1e-4


def test_roots_are_exact_where_they_can_be() -> None:
    shares = normalize([Fraction(1)] * 3, Amounts((100, 400, 2500)), "temperature", Fraction(2))
    assert shares.requested == tuple(map(Fraction, (10, 20, 50)))
    third = normalize([Fraction(1)] * 2, Amounts((27, 8)), "temperature", Fraction(3))
    assert third.weights == (3, 2)


def test_by_tokens_a_source_of_long_samples_is_drawn_less() -> None:
    amounts = Amounts((100, 100), (Fraction(1000), Fraction(9000)))  # 10 and 90 tokens per sample
    assert normalize([Fraction(1), Fraction(1)], amounts, "proportion").weights == (9, 1)
    assert normalize([Fraction(1000), Fraction(1000)], amounts, "count").weights == (100, 12)
    # Square roots of 1000 and 9000 tokens: 1 to 3 in tokens, 3 to 1 in samples.
    warm = normalize([Fraction(1)] * 2, amounts, "temperature", Fraction(2)).requested
    assert float(warm[0] / warm[1]) == pytest.approx(3, rel=1e-12)


def test_one_weight_per_sample_rounds_the_epoch_once() -> None:
    shares = normalize([Fraction("0.1"), Fraction("0.3")], Amounts((7, 1)), "ratio", per_sample=True)
    assert (shares.weights, shares.epoch_length) == ((7, 3), 1)


@pytest.mark.parametrize("value", [Decimal("1e-9"), Decimal("1e9")])
def test_extreme_masses_have_roots(value: Decimal) -> None:
    [root] = normalize([Fraction(value)], Amounts((1,)), "temperature", Fraction("0.01")).requested
    assert root == Fraction(value) ** 100


DATA = NamedConcatDataset({"long": range(100), "short": range(300), "off": range(7)})
SIZES = np.repeat([90, 10, 5], [100, 300, 7])


def drawn(weights: Any = None, epochs: int = 1, **options: Any) -> list[int]:
    """Draws of each dataset over some epochs."""
    sampler = WeightedDistributedSampler(DATA, weights, **options)
    counts = np.zeros(3, np.int64)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        own = list(sampler)
        assert len(own) == len(sampler)
        counts += np.bincount(np.searchsorted([100, 400], own, side="right"), minlength=3)
    return [int(count) for count in counts]


@pytest.mark.parametrize(
    ("weights", "options", "want"),
    [
        ({"long": 0.5, "short": 1.5, "off": 0}, {"semantics": "ratio"}, [50, 450, 0]),
        ({"long": 3, "short": 1, "off": 0}, {}, [300, 100, 0]),
        ([3, 1, 0], {"epoch_length": 40}, [30, 10, 0]),
        ({(0, 100): 0.5, (100, 400): 1.5}, {}, [50, 450, 0]),
        ({"long": 3, "short": 1, "off": 0}, {"semantics": "proportion"}, [300, 100, 0]),
        ({"long": 3, "short": 1, "off": 0}, {"semantics": "proportion", "epoch_length": 40}, [30, 10, 0]),
        ([0.7, 0.2, 0.1], {"semantics": "proportion", "epoch_length": 100}, [70, 20, 10]),
        ([5, 6, 7], {"semantics": "count"}, [5, 6, 7]),
        (None, {"semantics": "temperature", "temperature": 1}, [100, 300, 7]),
        ([9, 12, 0], {"semantics": "temperature", "temperature": 2}, [133, 267, 0]),  # roots of 900 and 3600
        ([1, 1, 0], {"semantics": "proportion", "per": "token", "sizes": SIZES}, [40, 360, 0]),
        ([900, 100, 0], {"semantics": "count", "per": "token", "sizes": torch.tensor(SIZES)}, [10, 10, 0]),
        ([1, 1, 0], {"semantics": "proportion", "per": "token", "sizes": SIZES / 7}, [40, 360, 0]),
        ([1, 1, 0], {"per": "token", "sizes": torch.tensor(SIZES, dtype=torch.bfloat16)}, [40, 360, 0]),
        ({(0, 100): 1, (200, 300): 3}, {"semantics": "proportion"}, [50, 150, 0]),
    ],
)
def test_draws_of_an_epoch(weights: Any, options: dict[str, Any], want: list[int]) -> None:
    assert drawn(weights, **options) == want


def test_shares_that_do_not_divide_the_epoch_are_exact_over_epochs() -> None:
    options: dict[str, Any] = {"semantics": "proportion", "epoch_length": 10}
    assert drawn([1, 1, 1], epochs=3, **options) == [10, 10, 10]
    assert drawn([0.4999, 0.5, 0.0001], epochs=1000, **options) == [4999, 5000, 1]


def test_one_weight_per_sample() -> None:
    weights = np.where(np.arange(407) < 7, 10.0, 0.5)
    sampler = WeightedDistributedSampler(range(407), weights, semantics="ratio")
    counts = np.bincount(sampler.take(0, len(sampler)), minlength=407)
    assert len(sampler) == 270
    assert counts[:7].tolist() == [10] * 7
    assert counts[7:].sum() == 200
    assert counts[7:].max() == 1
    balanced = WeightedDistributedSampler(range(407), 1 / np.repeat([7, 400], [7, 400]), semantics="proportion")
    assert sorted(np.bincount(np.array(list(balanced)) < 7).tolist()) == [203, 204]


@pytest.mark.slow
def test_as_many_different_weights_as_samples() -> None:
    weights = np.random.default_rng(1).uniform(0.1, 10, 20_000)
    sampler = WeightedDistributedSampler(range(20_000), weights, semantics="proportion", epoch_length=400_000)
    counts = np.bincount(sampler.take(0, 400_000), minlength=20_000)
    expected = weights / weights.sum() * 400_000
    # A whole number of draws, one more or less where passes are cut, and the rounding of the weight.
    assert (np.abs(counts - expected) <= 2 + 0.004 * expected).all()


@pytest.mark.nightly
def test_more_than_two_to_the_24_samples() -> None:
    size = 2**24 + 5
    weights = np.ones(size, np.float32)
    weights[-3:] = 100
    sampler = WeightedDistributedSampler(range(size), weights, semantics="ratio")
    last = sampler.take(0, len(sampler))
    assert np.bincount(last, minlength=size)[-4:].tolist() == [1, 100, 100, 100]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"semantics": "share"}, "semantics must be one of 'ratio', 'proportion', 'count', 'temperature', got 'share'"),
        ({"per": "word"}, "per must be one of 'sample', 'token', got 'word'"),
        ({"per": "token", "semantics": "count"}, "per='token' needs sizes="),
        ({"sizes": SIZES}, "sizes are for shares by tokens"),
        ({"sizes": SIZES, "per": "token", "semantics": "ratio"}, "has no effect with semantics='ratio'"),
        (
            {"sizes": SIZES[1:], "per": "token", "semantics": "count"},
            r"one number for each of the 407 samples, .*\(406,\)",
        ),
        (
            {"sizes": "length", "per": "token", "semantics": "count"},
            "one number for each of the 407 samples, got 'length': give the numbers themselves, such as the column",
        ),
        ({"sizes": -SIZES, "per": "token", "semantics": "count"}, "sizes must be finite and not negative"),
        ({"sizes": 0 * SIZES, "per": "token", "semantics": "count"}, "sizes of 'long' are all 0"),
        ({"temperature": 2}, "temperature=2 with semantics=None"),
        ({"semantics": "temperature"}, "temperature=None with semantics='temperature'"),
        ({"semantics": "temperature", "temperature": 0}, "temperature must be at least 0.01, got 0"),
        ({"semantics": "temperature", "temperature": -1}, "temperature must not be negative"),
        ({"epoch_length": 0}, "epoch_length must be an int from 1 to 4611686018427387904, got 0"),
        ({"epoch_length": 2**63}, "epoch_length must be an int from 1 to"),
        ({"schedule": [(0, [1, 1, 1])]}, r"schedule\[0\] position must be an int from 1"),
        ({"schedule": [(5, [1, 1, 1]), (5, [1, 1, 1])]}, r"schedule\[1\] position must be an int from 6"),
        ({"schedule": [(5, [1, 1])]}, r"schedule\[0\] weights must hold one for each of the 3 datasets"),
        ({"schedule": [(5, [0, 0, 0])]}, r"schedule\[0\] weights must hold at least one weight above 0"),
        ({"schedule": [(5, {(0, 50): 1})]}, r"schedule\[0\] must have weights for the same ranges"),
        ({"schedule": [(5, [1] * 407)]}, r"schedule\[0\]: weights cannot change with one weight per sample"),
        (
            {"schedule": [(5, {"all": (1, {"long": 1, "short": 1}), "off": 0})], "semantics": "count"},
            r"nested schedule\[0\] weights need semantics='proportion', got 'count'",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        WeightedDistributedSampler(DATA, [1, 1, 1], **options)


def test_a_source_without_tokens_is_refused_in_every_stage() -> None:
    sizes = np.repeat([90, 10, 0], [100, 300, 7])
    options: dict[str, Any] = {"per": "token", "sizes": sizes}
    assert drawn([1, 9, 0], schedule=[(90, [1, 0, 0])], epoch_length=100, **options) == [11, 89, 0]
    with pytest.raises(ValueError, match=r"sizes of 'off' are all 0, .* in schedule\[0\]"):
        WeightedDistributedSampler(DATA, [1, 1, 0], schedule=[(90, [1, 0, 1])], **options)


@pytest.mark.parametrize("semantics", ["count", "temperature"])
def test_one_weight_per_sample_has_two_meanings_only(semantics: Any) -> None:
    temperature = 2 if semantics == "temperature" else None
    with pytest.raises(ValueError, match="needs semantics 'ratio' or 'proportion', got"):
        WeightedDistributedSampler(range(9), [1.0] * 9, semantics=semantics, temperature=temperature)


def test_one_weight_per_sample_cannot_be_by_tokens() -> None:
    with pytest.raises(ValueError, match="per='token' needs weights of datasets or ranges"):
        WeightedDistributedSampler(range(9), [1.0] * 9, semantics="proportion", per="token", sizes=range(9))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "weights must be given unless semantics='temperature', got None"),
        ({"weights": [1, 1, 1], "weight_dict": {(0, 9): 1}}, "weights and weight_dict were both given"),
        ({"weight_dict": 3}, r"weight_dict must be a mapping {\(begin, end\): ratio}, got 3"),
        ({"weights": [1, 1, 1], "schedule": {5: [1, 1, 1]}}, r"schedule must be a list of tuples"),
        ({"weights": [1, 1, 1], "schedule": [5]}, r"schedule must be a list of tuples"),
        ({"weights": [1, 1, 1], "schedule": [(5.0, [1, 1, 1])]}, r"schedule\[0\] position must be an int from 1"),
        ({"weights": [1, 1, 1], "epoch_length": 5.0}, "epoch_length must be an int from 1"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(TypeError, match=fault):
        WeightedDistributedSampler(DATA, **arguments)


def test_a_temperature_without_weights_needs_a_concatenation() -> None:
    with pytest.raises(TypeError, match="weights must be given: range is not a concatenation"):
        WeightedDistributedSampler(range(9), semantics="temperature", temperature=2)


@pytest.mark.slow
def test_too_many_draws_and_too_many_sources_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights asks for more than 2\*\*62 draws"):
        WeightedDistributedSampler(range(9), {(0, 9): 10**5000})
    with pytest.raises(ValueError, match="names 65537 sources, at most 65536 are allowed"):
        WeightedDistributedSampler(range(70_000), {(place, place + 1): 1 for place in range(65_537)})


def test_the_fingerprint_knows_what_the_order_depends_on() -> None:
    made = [
        WeightedDistributedSampler(DATA, [1, 1, 1]),
        WeightedDistributedSampler(DATA, [1, 1, 2]),
        WeightedDistributedSampler(DATA, [1, 1, 1], epoch_length=9),
        WeightedDistributedSampler(DATA, [1, 1, 1], schedule=[(5, [1, 1, 0])]),
        WeightedDistributedSampler(range(407), {(0, 100): 1, (100, 400): 1}),
        WeightedDistributedSampler(range(407), [1.0] * 407),
        WeightedDistributedSampler(range(407), [1.0] * 406 + [2.0]),
        WeightedDistributedSampler(range(408), [1.0] * 408),
    ]
    assert len({sampler.fingerprint for sampler in made}) == len(made)
    same = WeightedDistributedSampler(DATA, {"off": 1, "long": 1, "short": 1})
    assert same.fingerprint == made[0].fingerprint
