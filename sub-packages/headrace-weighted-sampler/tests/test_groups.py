"""One weight a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler.groups import MOST, group_by_weight


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 7.5]), min_size=1, max_size=60).filter(any))
def test_each_sample_is_in_the_group_of_its_weight(weights: list[float]) -> None:
    groups = group_by_weight(np.array(weights))
    assert groups.rounding == 0.0
    assert sorted(groups.members.tolist()) == [place for place, weight in enumerate(weights) if weight]
    begins = (0, *groups.ends)
    for begin, end, weight in zip(begins, groups.ends, groups.weights, strict=False):
        members = groups.members[begin:end].tolist()
        assert members == sorted(members)
        assert {weights[member] for member in members} == {weight}
    assert len(set(groups.weights.tolist())) == len(groups.weights)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 14.0])
def test_too_many_weights_are_rounded_a_little(spread: float) -> None:
    weights = np.exp(np.random.default_rng(0).uniform(0, spread, 50_000))
    groups = group_by_weight(weights)
    assert 1 < len(groups.weights) <= MOST
    assert 0 < groups.rounding <= 0.004
    ends = np.array(groups.ends)
    given = np.repeat(groups.weights, np.diff(ends, prepend=0))
    assert np.abs(given / weights[groups.members] - 1).max() == pytest.approx(groups.rounding)


def test_the_digest_knows_the_weights() -> None:
    digests = {group_by_weight(np.array(weights)).digest for weights in ([1.0, 2.0], [2.0, 1.0], [1.0, 2.0, 0.0])}
    assert len(digests) == 3
