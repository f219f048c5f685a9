"""Sources that are dropped when they have run out: each sample once an epoch."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import in_steps

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

DATA = NamedConcatDataset({"long": range(100), "short": range(300), "off": range(7)})


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 9))
def test_dropped_sources_give_each_sample_once_an_epoch(parts: list[tuple[int, int]], epoch: int) -> None:
    sizes = [size for size, _ in parts] + [5]
    weights = [weight * (size > 0) for size, weight in parts] + [1]
    data = NamedConcatDataset({str(place): range(size) for place, size in enumerate(sizes)})
    options: dict[str, Any] = {"stopping": "drop_exhausted", "seed": 3}
    sampler = WeightedDistributedSampler(data, weights, **options)
    sampler.set_epoch(epoch)
    order = sampler.take(0, sampler.epoch_length)
    ends = np.cumsum(sizes)
    wanted = [
        index
        for end, size, weight in zip(ends, sizes, weights, strict=True)
        if weight
        for index in range(end - size, end)
    ]
    assert sorted(order.tolist()) == wanted
    report = sampler.report()
    assert [line.draws for line in report.sources] == [size * bool(w) for size, w in zip(sizes, weights, strict=True)]
    assert [line.asked for line in report.sources] == pytest.approx(
        [line.share for line in report.sources], abs=0.02 + 2 / len(order)
    )
    # Between drops, the sources that are left keep their proportions.
    kinds = np.searchsorted(ends, order, side="right")
    cuts = [0, *report.changes, len(order)]
    left = np.array(sizes) * np.array(weights, bool)
    for low, high in pairwise(cuts):
        counts = np.bincount(kinds[low:high], minlength=len(sizes))
        share = np.array(weights) * (left > 0)
        assert (np.abs(counts - (high - low) * share / share.sum()) < 2).all()
        left = left - counts
        assert (left[counts > 0] == 0).any()


def test_ranks_and_resumed_runs_of_dropped_sources_deliver_each_sample_once() -> None:
    options: dict[str, Any] = {"stopping": "drop_exhausted", "seed": 5}
    ranks = [
        WeightedDistributedSampler(DATA, {"long": 1, "short": 1, "off": 1}, 3, rank, **options) for rank in range(3)
    ]
    orders = []

    def whole(epoch: int) -> list[int]:
        alone = WeightedDistributedSampler(DATA, [1, 1, 1], **options)
        alone.set_epoch(epoch)
        return list(alone)

    for epoch in range(2):
        shares = []
        for rank in ranks:
            rank.set_epoch(epoch)
            shares.append(list(rank))
        orders.append([index for step in zip(*shares, strict=True) for index in step])
        assert sorted(orders[-1][:407]) == list(range(407))
        assert in_steps(orders[-1], 3) == in_steps([*whole(epoch), *whole(epoch)[:1]], 3)
    assert orders[0] != orders[1]
    again = WeightedDistributedSampler(DATA, [1, 1, 1], **options)
    again.load_state_dict(ranks[0].state_dict(position=200))
    assert list(again) == whole(1)[200:407]
    others: list[dict[str, Any]] = [{"seed": 5}, {**options, "drop_last": True}]
    for other in others:
        with pytest.raises(ValueError, match="state was saved with"):
            WeightedDistributedSampler(DATA, [1, 1, 1], **other).load_state_dict(ranks[0].state_dict())


def test_nested_sources_are_dropped_too_and_the_others_keep_their_proportions() -> None:
    nested: dict[str, Any] = {"web": (0.5, {"long": 1, "off": 1}), "short": 0.5}
    report = WeightedDistributedSampler(DATA, nested, stopping="drop_exhausted").report()
    assert [(line.name, line.draws) for line in report.tree] == [
        ("web", 107),
        ("long", 100),
        ("off", 7),
        ("short", 300),
    ]
    # "off" lasts for 28 draws; "long" and "short" go on at 1 to 2, and "long" lasts for 279 more.
    assert report.changes == pytest.approx((28, 307), abs=6)
    assert "the weights change at positions" in str(report)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"epoch_length": 9}, "it takes no epoch_length, got 9: leave it out"),
        ({"schedule": [(5, [1, 1, 1])]}, "it takes no schedule, got 1 later stage: leave it out"),
        ({"weights": [1] * len(DATA)}, "it takes no weights of single samples: give weights of datasets or ranges"),
        ({"weights": {(at, at + 1): 1 for at in range(257)}}, "it takes up to 256 sources, got 257: concatenate some"),
    ],
)
def test_an_epoch_of_dropped_sources_is_one_pass(options: dict[str, Any], given: str) -> None:
    with pytest.raises(ValueError, match=f"stopping='drop_exhausted' draws each sample once per epoch: {given}"):
        WeightedDistributedSampler(DATA, **({"weights": [1, 1, 1], "stopping": "drop_exhausted"} | options))


def test_a_schedule_that_looks_like_the_drops_of_one_epoch_has_another_fingerprint() -> None:
    data = NamedConcatDataset({"a": range(2), "b": range(4)})
    dropped = WeightedDistributedSampler(data, [1, 1], stopping="drop_exhausted")
    [change] = dropped.report().changes
    scheduled = WeightedDistributedSampler(data, [1, 1], epoch_length=6, schedule=[(change, [0, 1])])
    assert scheduled.take(0, 6).tolist() == dropped.take(0, 6).tolist()
    assert scheduled.fingerprint != dropped.fingerprint


def test_what_cannot_be_dropped_is_refused() -> None:
    with pytest.raises(ValueError, match="it takes no weights of single samples: give weights of"):
        WeightedDistributedSampler(range(9), [1.0] * 9, stopping="drop_exhausted")
    with pytest.raises(ValueError, match="stopping must be one of 'endless', 'drop_exhausted', got 'all_exhausted'"):
        WeightedDistributedSampler(DATA, [1, 1, 1], stopping="all_exhausted")  # type: ignore[arg-type]
