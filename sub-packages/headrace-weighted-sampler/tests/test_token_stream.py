"""Streams whose shares are in tokens."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import InterleavedDataset

Item = tuple[int, int]  # source and tokens
pytestmark = pytest.mark.filterwarnings("ignore:.*has no state of its own:UserWarning")  # sources are read again


class Source:
    """An endless source of items of random sizes."""

    def __init__(self, number: int, largest: int) -> None:
        self.number, self.largest = number, largest

    def __iter__(self) -> Iterator[Item]:
        generator = np.random.default_rng(self.number)
        while True:
            yield self.number, int(generator.lognormal(0, 1) * self.largest / 10) % (self.largest + 1)


def tokens_of(item: Item) -> int:
    return item[1]


def stream(weights: list[int], largest: list[int], **options: Any) -> InterleavedDataset[Item]:
    sources = {f"s{number:03d}": Source(number, most) for number, most in enumerate(largest)}
    named = {f"s{number:03d}": weight for number, weight in enumerate(weights)}
    chosen: dict[str, Any] = {"stopping": "endless", "per": "token", "sizeof": tokens_of} | options
    return InterleavedDataset(sources, named, **chosen)


def off_by(items: list[Item], weights: list[int]) -> float:
    """The largest deviation from a share of the tokens after any item, in longest items."""
    owners, sizes = np.array(items).T
    total, worst = np.cumsum(sizes), 0.0
    for source, weight in enumerate(weights):
        own = np.cumsum(np.where(owners == source, sizes, 0))
        worst = max(worst, float(np.abs(own - total * weight / sum(weights)).max()))
    return worst / max(1, int(sizes.max()))


MIXTURES = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**5)), min_size=1, max_size=12)


@pytest.mark.slow
@given(MIXTURES, st.integers(0, 2**64 - 1))
def test_after_any_item_each_source_has_its_share(mixture: list[tuple[int, int]], seed: int) -> None:
    weights, largest = map(list, zip(*mixture, strict=True))
    items = list(islice(stream(weights, largest, seed=seed), 500))
    assert off_by(items, weights) <= 2


@pytest.mark.parametrize("weights", [[1000] + [1] * 300, list(range(1, 200)), [10**6, 1]])
def test_many_sources_and_rare_ones(weights: list[int]) -> None:
    items = list(islice(stream(weights, [100] * len(weights)), 3000))
    assert off_by(items, weights) <= 2


@pytest.mark.slow
@given(MIXTURES, st.integers(0, 200))
def test_a_state_goes_on_exactly(mixture: list[tuple[int, int]], cut: int) -> None:
    weights, largest = map(list, zip(*mixture, strict=True))
    whole = list(islice(stream(weights, largest), 300))
    first = stream(weights, largest)
    assert list(islice(first, cut)) == whole[:cut]
    resumed = stream(weights, largest)
    resumed.load_state_dict(first.state_dict())
    assert list(islice(resumed, 300 - cut)) == whole[cut:]


def test_a_schedule_keeps_what_is_owed_and_may_change_later() -> None:
    schedule = [(100, {"s000": 1, "s001": 3}), (200, {"s000": 2, "s001": 5})]
    scheduled = stream([5, 1], [50, 400], schedule=schedule)
    items = list(islice(scheduled, 300))
    owed, longest = np.zeros(2), max(size for _, size in items)
    for place, (source, size) in enumerate(items):
        weights = np.array([(5, 1), (1, 3), (2, 5)][(place >= 100) + (place >= 200)])
        owed += size * weights / weights.sum()
        owed[source] -= size
        assert np.abs(owed).max() <= 2 * longest

    saved = stream([5, 1], [50, 400], schedule=schedule)
    list(islice(saved, 150))
    other = stream([5, 1], [50, 400], schedule=[schedule[0], (150, {"s000": 7, "s001": 4})])
    other.load_state_dict(saved.state_dict())
    assert off_by(list(islice(other, 2000)), [7, 4]) <= 3


def test_streams_do_not_begin_with_the_same_source() -> None:
    first = {next(iter(stream([1] * 8, [9] * 8, num_replicas=64, rank=rank)))[0] for rank in range(64)}
    assert len(first) == 8


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sizeof": None}, ValueError, "per='token' needs sizeof=, a function that returns the tokens of an item"),
        ({"per": "sample"}, ValueError, "sizeof is for shares by tokens: give per='token'"),
        ({"sizeof": 3}, TypeError, "sizeof must be a function of an item, got 3"),
        ({"semantics": "ratio"}, ValueError, "per='token' needs semantics='proportion' for streams"),
        ({"per": "tokens"}, ValueError, "per must be one of 'sample', 'token', got 'tokens'"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        stream([1, 1], [5, 5], **options)


@pytest.mark.parametrize(("size", "error"), [(-1, ValueError), (0.5, TypeError), ("3", TypeError)])
def test_sizes_are_whole_numbers(size: Any, error: Any) -> None:
    with pytest.raises(error, match=r"sizeof\(item\) must be an int") as raised:
        next(iter(stream([1, 1], [5, 5], sizeof=lambda _: size)))
    assert "at position 0 of epoch 0" in str(raised.value.__notes__)


def test_an_edited_state_is_refused() -> None:
    saved = stream([1, 2], [5, 5])
    list(islice(saved, 7))
    for behind in ({"s000": "1/0", "s001": "1"}, {"s000": 3, "s001": "1"}, {"s000": "1"}, "none"):
        with pytest.raises((TypeError, ValueError), match=r"state\['behind'\]"):
            stream([1, 2], [5, 5]).load_state_dict({**saved.state_dict(), "behind": behind})
