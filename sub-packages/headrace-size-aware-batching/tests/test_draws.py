"""The draws that the samples of a batch are, where a sampler repeats samples."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from hypothesis import given
from hypothesis import strategies as st
from strategies_of_sizes import examples

pytestmark = pytest.mark.filterwarnings("ignore:tail='split'.*:UserWarning")
SIZES = np.random.default_rng(0).integers(1, 30, 40)
ORDERED: dict[str, Any] = {"balanced_ranks": 6}  # the same order for runs that begin with other ranks
WAYS: dict[str, dict[str, Any]] = {
    "stratified": ORDERED,
    "packed": ORDERED | {"strategy": "packed"},
    "sequential": {"strategy": "sequential"},
    "padded": ORDERED | {"cost": "padded"},
    "in windows": ORDERED | {"window": 17},
    "tokens": {"tokens_per_step": 500},
    "padded tokens": {"strategy": "bucketed", "cost": "padded", "tokens_per_step": 500},
    "repeated": ORDERED | {"tail": "pad"},
}


class Mixture:
    """An order in which samples come once to several times."""

    fingerprint, epoch_length = "mixture", 97

    def take(self, start: int, stop: int) -> Any:
        return (np.arange(start, stop) ** 2 * 7 + 3) % 40

    def __iter__(self) -> Iterator[int]:
        return iter(self.take(0, self.epoch_length).tolist())


def make(way: str, world: int, rank: Any, **options: Any) -> Any:
    given = {"sampler": Mixture(), **WAYS[way], **options}
    return sampler_with(SIZES, 90, num_replicas=world, rank=rank, seed=4, **given)


def drawn(sampler: Any, stop: int | None = None) -> set[tuple[int, int]]:
    """Pairs of a sample and its draw."""
    found = set()
    for batch in islice(sampler, stop):
        assert sampler.draws is not None
        found |= set(zip(batch, sampler.draws, strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@examples(12)
@given(world=st.integers(1, 6), after=st.integers(1, 6), cut=st.integers(0, 20))
def test_draws_are_the_same_at_any_world_size_and_after_a_resume(way: str, world: int, after: int, cut: int) -> None:
    whole = drawn(make(way, 1, 0))
    assert Counter(index for index, _ in whole) == Counter(Mixture())  # each has its own
    before, states = set(), []
    for rank in range(world):
        sampler = make(way, world, rank)
        before |= drawn(sampler, min(cut, len(sampler)))
        states.append(sampler.state_dict())
    rest = set()
    for rank in range(after):
        sampler = make(way, after, rank)
        sampler.load_state_dict(states[0])
        rest |= drawn(sampler)
    assert before | rest == whole
    assert WAYS[way].get("tail") == "pad" or not before & rest


@pytest.mark.parametrize("way", WAYS)
def test_draws_of_all_ranks_together(way: str) -> None:
    assert drawn(make(way, 3, "all")) == drawn(make(way, 1, 0))


def test_draws_of_what_is_not_dropped() -> None:
    whole, kept = (
        drawn(make("stratified", 1, 0)),
        [drawn(make("stratified", 3, rank, tail="drop")) for rank in range(3)],
    )
    assert set.union(*kept) <= whole
    assert sum(map(len, kept)) == len(set.union(*kept))


def test_without_a_sampler_there_are_none_as_no_sample_repeats() -> None:
    sampler = make("stratified", 1, 0, sampler=None)
    assert list(sampler)
    assert sampler.draws is None
