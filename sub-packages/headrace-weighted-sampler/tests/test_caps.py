"""Caps: a source that was drawn so often leaves the mixture, and the others share its weight."""

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import examples, in_steps

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

PARTS = {"web": 3000, "books": 100, "code": 400}
DATA = NamedConcatDataset({name: range(size) for name, size in PARTS.items()})
SIZES = np.clip(np.random.default_rng(0).lognormal(4, 1, 3500), 1, 2000).astype(np.int64)
Per = Literal["sample", "token"]


def capped(per: Per, max_passes: Any, weights: Any = None, **options: Any) -> WeightedDistributedSampler:
    weights = {"web": 5, "books": 3, "code": 2} if weights is None else weights
    sizes = {"sizes": SIZES} if per == "token" else {}
    return WeightedDistributedSampler(
        DATA, weights, per=per, max_passes=max_passes, **{"epoch_length": 1000} | sizes | options
    )


def order_of(sampler: WeightedDistributedSampler, epochs: int) -> Any:
    parts = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        parts.append(sampler.take(0, sampler.epoch_length))
    return np.concatenate(parts)


@examples(30)
@given(st.sampled_from(["sample", "token"]), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**64 - 1))
def test_a_capped_source_gives_every_sample_so_often_and_leaves(per: Per, books: int, code: int, seed: int) -> None:
    sampler = capped(per, {"books": books, "code": code}, seed=seed)
    order = order_of(sampler, 9)
    kinds = np.searchsorted([3000, 3100], order, side="right")
    leaving = dict(sampler.report().leaving)
    counts = np.bincount(order, minlength=3500)
    for name, kind, passes in (("books", 1, books), ("code", 2, code)):
        begin, end = ([0, 3000, 3100, 3500][kind + step] for step in (0, 1))
        if leaving[name] <= len(order):
            assert set(counts[begin:end]) == {passes}
            last = np.flatnonzero(kinds == kind)[-1] + 1
            assert last == leaving[name]
        else:
            assert counts[begin:end].max() <= passes
    # Between the changes, those that are left keep their proportions.
    amounts = np.ones(len(order)) if per == "sample" else SIZES[order].astype(float)
    cuts = [0, *sorted(position for position in leaving.values() if position < len(order)), len(order)]
    left = {0: 5, 1: 3, 2: 2}
    for low, high in pairwise(cuts):
        own = np.bincount(kinds[low:high], amounts[low:high], minlength=3)
        for kind, weight in left.items():
            share = weight / sum(left.values())
            assert abs(own[kind] - share * own.sum()) <= (6 if per == "sample" else 3 * 2000)
        left = {kind: weight for kind, weight in left.items() if leaving.get(["web", "books", "code"][kind]) != high}


@pytest.mark.parametrize("per", ["sample", "token"])
def test_ranks_and_resumed_runs_of_capped_sources_deliver_the_sequence(per: Per) -> None:
    caps = {"books": 2}
    ranks = [capped(per, caps, num_replicas=3, rank=rank) for rank in range(3)]
    whole = capped(per, caps)
    for epoch in range(3):
        for sampler in (*ranks, whole):
            sampler.set_epoch(epoch)
        order = whole.take(0, 1000).tolist()
        dealt = (index for step in zip(*ranks, strict=True) for index in step)
        assert in_steps(dealt, 3) == in_steps(order + order[:2], 3)
        resumed = capped(per, caps)
        resumed.load_state_dict(whole.state_dict(position=321))
        assert list(resumed) == order[321:]


@pytest.mark.parametrize("per", ["sample", "token"])
def test_caps_and_schedules_work_together(per: Per) -> None:
    schedule = [(500, {"web": 1, "books": 0, "code": 1}), (1500, {"web": 1, "books": 8, "code": 1})]
    sampler = capped(per, {"books": 3}, schedule=schedule)
    order = order_of(sampler, 6)
    books = np.flatnonzero((order >= 3000) & (order < 3100))
    [(name, position)] = sampler.report().leaving
    assert (name, len(books)) == ("books", 300)
    assert position == books[-1] + 1
    assert not ((books >= 500) & (books < 1500)).any()
    assert "books leaves after its last pass, at position" in str(sampler.report())


@pytest.mark.timeout(30)  # the windows up to there would take minutes
@pytest.mark.parametrize(
    "weights",
    [
        {"web": 1, "books": 1e-9, "code": 0},
        {"web": 1, "books": 1e-9, "code": 3e-9},
        {"web": 1, "books": 3e-5, "code": 1e-9},
    ],
)
def test_a_source_of_tiny_weight_is_found_leaving_at_once(weights: Any) -> None:
    last = min((name for name in ("books", "code") if weights[name]), key=weights.__getitem__)
    sampler = capped("token", {last: 1}, weights)
    [(name, position)] = sampler.report().leaving
    assert name == last
    assert position > 10**9
    epoch, place = divmod(position - 1, 1000)
    sampler.set_epoch(epoch)
    begin, end = {"books": (3000, 3100), "code": (3100, 3500)}[last]
    assert begin <= sampler.take(place, place + 1)[0] < end
    uncapped = capped("token", None, weights)
    draws = uncapped._order.mixture.counts_at(0, position)
    assert draws[["web", "books", "code"].index(last)] == end - begin


def test_a_cap_by_range_and_by_position() -> None:
    by_range = WeightedDistributedSampler(
        DATA, {(0, 3000): 1, (3000, 3100): 2}, semantics="proportion", max_passes={(3000, 3100): 2}
    )
    assert by_range.report().leaving == (("3000-3100", 300),)
    by_position = WeightedDistributedSampler(DATA, [1, 2, 0], max_passes={1: 2})
    assert by_position.report().leaving == (("books", 300),)


def test_a_cap_that_is_not_reached_yet_may_change_in_a_resumed_run() -> None:
    state = capped("sample", {"books": 5}).state_dict(position=100)
    capped("sample", {"books": 6}).load_state_dict(state)
    late = capped("sample", {"books": 5})
    late.set_epoch(3)
    with pytest.raises(ValueError, match="an earlier part of the schedule"):
        capped("sample", {"books": 6}).load_state_dict(late.state_dict(position=1))


@pytest.mark.parametrize(
    ("max_passes", "options", "error", "says"),
    [
        ({"news": 1}, {}, ValueError, r"max_passes names 'news' \(str\), which is no source; the sources are 'web'"),
        ({"books": 0}, {}, ValueError, r"max_passes\['books'\] must be an int >= 1, got 0"),
        ({"books": 1.5}, {}, TypeError, r"max_passes\['books'\] must be an int >= 1"),
        (["books"], {}, TypeError, r"max_passes must be a mapping {source: passes}, got \['books'\]"),
        ({"web": 1, "books": 1, "code": 1}, {}, ValueError, "max_passes ends the mixture at position 3500"),
        (
            {"web": 1},
            {"stopping": "drop_exhausted", "epoch_length": None},
            ValueError,
            "max_passes is not for stopping",
        ),
    ],
)
def test_caps_that_cannot_be_are_refused(max_passes: Any, options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        capped("sample", max_passes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("per", ["sample", "token"])
def test_the_shares_of_the_whole_run_can_be_plotted(per: Per, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = capped(per, {"books": 2, "code": 1}).plot()
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    [axes] = figure.axes
    assert {text.get_text() for text in axes.texts} == {"books leaves", "code leaves"}
    legend: Any = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["web", "books", "code"]
    assert axes.get_ylabel() == f"share of the {per}s"
    dropped = WeightedDistributedSampler(DATA, [1, 1, 1], stopping="drop_exhausted").plot(epochs=2)
    assert dropped.axes[0].get_xlim() == (0, 2)
