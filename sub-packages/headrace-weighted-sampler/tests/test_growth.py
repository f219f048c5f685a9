"""Mixtures whose data grow in a run: every source's passes continue, and other data are refused."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

GROW = {"accept": {"data"}}
TOKENS = np.random.default_rng(0).integers(1, 60, 10_000)


class Rows:
    """Samples with a fingerprint, which also stands for the first of them."""

    def __init__(self, count: int, name: str = "rows", *, prefixes: bool = True) -> None:
        self.count, self.name = count, name
        if prefixes:
            self.prefix_fingerprint = lambda count: f"{name} {count}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {self.count}"


def mixture(sizes: dict[str, int], weights: Mapping[str, float], **options: Any) -> WeightedDistributedSampler:
    data = NamedConcatDataset({name: range(size) for name, size in sizes.items()})
    if options.get("per") == "token":
        options["sizes"] = TOKENS[: len(data)]
    return WeightedDistributedSampler(data, weights, num_replicas=1, rank=0, **options)


def epoch_of(sampler: WeightedDistributedSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def passes_of(drawn: list[int], sizes: list[int], grew_at: list[int]) -> Iterator[list[int]]:
    """Cut the draws of one source into passes; a pass has as many as the source had samples when it began."""
    begin = 0
    while begin < len(drawn):
        size = sizes[sum(at <= begin for at in grew_at)]
        yield drawn[begin : begin + size]
        begin += size


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, dict[str, int], dict[str, float]]]:
    """Epochs, sizes and weights, each with more samples of the last source, and more sources."""
    sizes = {"a": draw(st.integers(1, 40)), "b": draw(st.integers(1, 30))}
    history = []
    for change in range(draw(st.integers(2, 3))):
        if change:
            last = list(sizes)[-1]
            sizes = sizes | {last: sizes[last] + draw(st.integers(1, 20))}
            if draw(st.booleans()):
                sizes = sizes | {f"new {change}": draw(st.integers(1, 30))}
        weights = {name: draw(st.sampled_from([1, 2, 0.5, 0.3])) for name in sizes}
        history.append((draw(st.integers(0, 2)), dict(sizes), weights))
    return history


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"semantics": "ratio"},
        {"semantics": "temperature", "temperature": 2},
        {"per": "token", "epoch_length": 53},
        {"stopping": "drop_exhausted"},
    ],
)
@given(history=histories(), at_end=st.booleans(), seed=st.integers(0, 99))
def test_every_pass_has_each_sample_once_that_the_source_had_when_it_began(
    options: dict[str, Any], history: list[tuple[int, dict[str, int], dict[str, float]]], at_end: bool, seed: int
) -> None:
    drawn, grew, epoch = list[int](), list[int](), 0
    sampler = mixture(*history[0][1:], seed=seed, **options)
    for number, (epochs, sizes, weights) in enumerate(history):
        if number:
            if at_end and epoch:
                sampler.set_epoch(epoch - 1)
                state = sampler.state_dict(position=sampler.epoch_length)
            else:
                sampler.set_epoch(epoch)
                state = sampler.state_dict()
            sampler = mixture(sizes, weights, seed=seed, **options)
            sampler.load_state_dict(state, **GROW)
            if at_end and epoch:
                assert list(sampler) == [], "the epoch of the state is over"
            grew.append(len(drawn))
        for _ in range(epochs if number < len(history) - 1 else 2):
            fresh = mixture(sizes, weights, seed=seed, **options)
            sampler.set_epoch(epoch)
            fresh.load_state_dict(sampler.state_dict())
            now = list(sampler)
            assert now == list(fresh), "a state of the grown mixture needs no accept"
            assert len(now) == sampler.epoch_length
            drawn += now
            epoch += 1
    begin = 0
    for name in history[-1][1]:
        sizes_of = [sizes.get(name, 0) for _, sizes, _ in history]
        own = [(place, index) for place, index in enumerate(drawn) if begin <= index < begin + sizes_of[-1]]
        at = [sum(place < change for place, _ in own) for change in grew]
        for one in passes_of([index for _, index in own], sizes_of, at):
            assert len(set(one)) == len(one)
        begin += sizes_of[-1]


def test_a_source_that_did_not_grow_and_the_shares_continue_as_if_nothing_had_happened() -> None:
    old = mixture({"a": 50, "b": 30}, {"a": 3, "b": 1}, epoch_length=44)
    before = [epoch_of(old, epoch) for epoch in range(6)]
    old.set_epoch(3)
    new = mixture({"a": 50, "b": 35, "c": 9}, {"a": 3, "b": 1, "c": 2}, epoch_length=66)
    new.load_state_dict(old.state_dict(), **GROW)
    after = [epoch_of(new, epoch) for epoch in range(3, 5)]
    of_a = [index for epoch in before for index in epoch if index < 50]
    assert [index for epoch in [*before[:3], *after] for index in epoch if index < 50] == of_a[: 5 * 33]
    counts = [[sum(index < 50 for index in epoch), sum(index >= 85 for index in epoch)] for epoch in after]
    assert counts == [[33, 22]] * 2


def test_the_pass_under_way_ends_with_the_old_samples() -> None:
    old = mixture({"a": 10}, {"a": 1}, epoch_length=6)
    first = epoch_of(old, 0)
    old.set_epoch(1)
    new = mixture({"a": 14}, {"a": 1}, epoch_length=18)
    new.load_state_dict(old.state_dict(), **GROW)
    then = list(new)
    assert sorted(first + then[:4]) == list(range(10))
    assert sorted(then[4:]) == list(range(14))


def test_caps_count_the_passes_before_too() -> None:
    weights, options = {"a": 1, "b": 1}, {"epoch_length": 14, "max_passes": {"b": 2}}
    old = mixture({"a": 50, "b": 8}, weights, **options)
    drawn = epoch_of(old, 0)
    old.set_epoch(1)
    new = mixture({"a": 50, "b": 12}, weights, **options)
    new.load_state_dict(old.state_dict(), **GROW)
    drawn += [index for epoch in (1, 2, 3) for index in epoch_of(new, epoch)]
    of_b = [index for index in drawn if index >= 50]
    assert sorted(of_b) == sorted([*range(50, 58), *range(50, 62)])  # a pass over 8, one over 12
    assert not [index for index in epoch_of(new, 4) if index >= 50]


def test_positions_of_a_schedule_count_epochs_of_the_present_length() -> None:
    old = mixture({"a": 40}, {"a": 1}, epoch_length=10)
    old.set_epoch(2)
    data = NamedConcatDataset({"a": range(40), "b": range(40)})
    later = [(3 * 20, {"a": 0, "b": 1})]
    new = WeightedDistributedSampler(data, {"a": 1, "b": 0}, epoch_length=20, num_replicas=1, rank=0, schedule=later)
    new.load_state_dict(old.state_dict(), **GROW)
    assert max(epoch_of(new, 2)) < 40 <= min(epoch_of(new, 3))


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_grown_too(twin: Any) -> None:
    old = mixture({"a": 10, "b": 5}, {"a": 1, "b": 1}, epoch_length=6)
    old.set_epoch(2)
    new = mixture({"a": 10, "b": 9}, {"a": 1, "b": 1}, epoch_length=8)
    new.load_state_dict(old.state_dict(), **GROW)
    other = twin(new)
    assert other.fingerprint == new.fingerprint
    assert [epoch_of(other, epoch) for epoch in (2, 5)] == [epoch_of(new, epoch) for epoch in (2, 5)]
    assert new.report().num_replicas == 1
    with pytest.raises(ValueError, match="epoch must be at least 2, where the data of this mixture grew, got 1"):
        epoch_of(new, 1)


def test_an_accepted_state_of_the_same_data_changes_nothing() -> None:
    old = mixture({"a": 10, "b": 5}, {"a": 1, "b": 1})
    same = mixture({"a": 10, "b": 5}, {"a": 1, "b": 1})
    same.load_state_dict(old.state_dict(position=4), **GROW)
    assert (same.position, same.fingerprint) == (4, old.fingerprint)


def refusal(old: WeightedDistributedSampler, new: WeightedDistributedSampler, **options: Any) -> str:
    before = new.state_dict()
    with pytest.raises(ValueError, match="state") as refused:
        new.load_state_dict(old.state_dict(), **options)
    assert new.state_dict() == before
    return str(refused.value)


def test_what_did_not_grow_at_its_end_is_refused() -> None:
    weights = {"a": 1, "b": 1}
    old = mixture({"a": 10, "b": 5}, weights)
    assert "a dataset of 15 samples, this one has 16" in refusal(old, mixture({"a": 10, "b": 6}, weights))
    for sizes in ({"a": 11, "b": 5}, {"a": 10, "b": 4}, {"a": 9, "b": 6}):
        cure = "give new samples of an earlier source as a source of their own after the others"
        assert cure in refusal(old, mixture(sizes, weights), **GROW)
    assert "other options" in refusal(old, mixture({"a": 10, "b": 5}, {"a": 1, "b": 2}), **GROW)
    with pytest.raises(ValueError, match=r"accept must hold the names of what may differ, here \{'data'\}, got 'data'"):
        old.load_state_dict(old.state_dict(), accept="data")


def test_inside_an_epoch_it_is_refused_with_the_cure() -> None:
    old, new = mixture({"a": 10}, {"a": 1}), mixture({"a": 12}, {"a": 1})
    rest = iter(old)
    next(rest)
    message = refusal(old, new, **GROW)
    assert "accept={'data'} needs a state of the beginning or the end of an epoch, got position=1 of 10" in message
    assert "let them grow at the end of its epoch" in message


@pytest.mark.parametrize("joined", [False, True])
def test_the_fingerprint_of_the_first_samples_is_compared(joined: bool) -> None:
    def make(*parts: Any) -> WeightedDistributedSampler:
        if joined:
            data: Any = NamedConcatDataset({str(number): part for number, part in enumerate(parts)})
            return WeightedDistributedSampler(data, [1] * len(parts), num_replicas=1, rank=0)
        ranges = {(0, 10): 1, **({(10, len(parts[0])): 1} if len(parts[0]) > 10 else {})}
        return WeightedDistributedSampler(parts[0], ranges, num_replicas=1, rank=0)

    old = make(Rows(10))
    make(Rows(10)).load_state_dict(old.state_dict(), **GROW)
    make(Rows(12)).load_state_dict(old.state_dict(), **GROW)
    if joined:
        make(Rows(10), Rows(4, "more")).load_state_dict(old.state_dict(), **GROW)
    others = "accept={'data'} needs data whose first 10 samples are those of the state, got others"
    assert others in refusal(old, make(Rows(12, "others")), **GROW)
    assert others in refusal(old, make(Rows(12, prefixes=False)), **GROW)


def test_sizes_of_the_old_samples_are_compared() -> None:
    old = mixture({"a": 10}, {"a": 1}, per="token")
    tokens = TOKENS[:12].copy()
    tokens[3] += 1
    data = NamedConcatDataset({"a": range(12)})
    new = WeightedDistributedSampler(data, {"a": 1}, per="token", sizes=tokens, num_replicas=1, rank=0)
    assert "other options: weights, semantics, sizes" in refusal(old, new, **GROW)


def test_one_weight_per_sample_cannot_grow() -> None:
    old = WeightedDistributedSampler(range(10), np.ones(10), num_replicas=1, rank=0)
    new = WeightedDistributedSampler(range(12), np.ones(12), num_replicas=1, rank=0)
    assert old.state_dict()["mixture"] is None
    message = refusal(old, new, **GROW)
    assert "a dataset of 10 samples, this one has 12" in message
    assert "a mixture with one weight for each sample cannot grow" in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"semantics": "temperature", "temperature": 3},
        {"per": "token", "epoch_length": 50, "schedule": [(70, {"a": 1, "empty": 0, "b": 0})]},
        {"max_passes": {"b": 3}, "drop_last": True},
        {"stopping": "drop_exhausted"},
    ],
)
def test_a_mixture_is_made_again_from_its_state(options: dict[str, Any]) -> None:
    made = mixture({"a": 40, "empty": 0, "b": 9}, {"a": 0.7, "empty": 0, "b": 3}, seed=3, **options)
    again = WeightedDistributedSampler.from_mixture(made.state_dict()["mixture"] or {}, TOKENS)
    assert again.fingerprint == made.fingerprint
    assert [epoch_of(again, epoch) for epoch in (0, 7)] == [epoch_of(made, epoch) for epoch in (0, 7)]


def test_a_growth_of_another_seed_is_refused_by_name() -> None:
    old, new = mixture({"a": 10}, {"a": 1}), mixture({"a": 12}, {"a": 1}, seed=9)
    recorded = old.mixture
    assert recorded is not None
    with pytest.raises(ValueError, match=r"mixture of seed=0, this WeightedDistributedSampler has seed=9") as refused:
        new.grown(recorded, 0)
    assert getattr(refused.value, "differences", None) == ("seed",)
    assert "has seed=9" in refusal(old, new, **GROW)


def test_an_epoch_that_ends_with_dropped_samples_is_over() -> None:
    def make(size: int, world: int = 4) -> WeightedDistributedSampler:
        data = NamedConcatDataset({"a": range(size)})
        return WeightedDistributedSampler(data, {"a": 1}, num_replicas=world, rank=0, drop_last=True)

    old, new = make(31), make(40)
    assert len(list(old)) == 7
    assert old.state_dict()["position"] == 28
    new.load_state_dict(old.state_dict(), **GROW)
    assert list(new) == []
    assert len(epoch_of(new, 1)) == 10
    assert "got position=28 of 31" in refusal(old, make(40, 1), **GROW)  # one rank would get the rest


def joined(*counts: Any) -> Any:
    parts: list[Any] = [
        joined(*count) if isinstance(count, tuple) else Rows(count, f"rows {place}")
        for place, count in enumerate(counts)
    ]
    return torch_data.ConcatDataset(parts)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((10, 10), 20), ((10, 10), 20)),
        (((10, 10), 20), ((10, 10), 25)),
        (((10, 10), 20), ((10, 10), 20, 5)),
        ((20, (10, 10)), (20, (10, 15))),
        ((20, (10, 10)), (20, (10, 10, 5))),
        ((20, ((5, 5), 10)), (20, ((5, 5), 12))),
    ],
)
@pytest.mark.parametrize("by_range", [False, True])
def test_nested_concatenations_grow_at_their_end(before: Any, after: Any, by_range: bool) -> None:
    def make(counts: Any, seed: int = 0) -> WeightedDistributedSampler:
        data = joined(*counts)
        weights: Any = [1] * len(counts)
        if by_range:
            weights = {(0, 20): 1, (20, len(data)): 2}
        return WeightedDistributedSampler(data, weights, num_replicas=1, rank=0)

    old, new = make(before), make(after)
    new.load_state_dict(old.state_dict(), **GROW)
    assert len(list(new)) == new.epoch_length


def test_another_inner_part_is_refused() -> None:
    old = WeightedDistributedSampler(joined((10, 10), 20), [1, 1], num_replicas=1, rank=0)
    new = WeightedDistributedSampler(joined((8, 12), 25), [1, 1], num_replicas=1, rank=0)
    assert "needs data whose first 40 samples are those of the state, got others" in refusal(old, new, **GROW)


@pytest.mark.parametrize("at_end", [False, True])
def test_the_report_after_a_growth_is_of_the_first_epoch_of_the_new_data(at_end: bool) -> None:
    old, new = mixture({"a": 10}, {"a": 1}), mixture({"a": 14}, {"a": 1})
    list(old)
    if not at_end:
        old.set_epoch(1)
    new.load_state_dict(old.state_dict(), **GROW)
    assert new.first_epoch == 1
    assert new.report().epoch == 1
    assert sum(line.delivered for line in new.report().sources) == 14


@pytest.mark.parametrize("options", [{}, {"per": "token"}, {"stopping": "drop_exhausted"}])
@pytest.mark.parametrize("epochs", [1, 3])
def test_coverage_and_repeats_count_the_draws_over_the_old_sizes(options: dict[str, Any], epochs: int) -> None:
    drawn, state, epoch = list[int](), None, 0
    if options != {"stopping": "drop_exhausted"}:
        options = options | {"epoch_length": 13}
    for length in (8, 17, 40):
        sampler = mixture({"a": length}, {"a": 1}, **options)
        if state is not None:
            sampler.load_state_dict(state, **GROW)
        for _ in range(epochs):
            drawn += epoch_of(sampler, epoch)
            [line] = sampler.report().sources
            assert (line.seen, line.repeats) == (len(set(drawn)), len(drawn) - len(set(drawn)))
            epoch += 1
        sampler.set_epoch(epoch)
        state = sampler.state_dict()


def test_a_cap_that_keeps_new_samples_out_warns() -> None:
    def make(size: int, passes: int) -> WeightedDistributedSampler:
        return mixture({"a": 100, "b": size}, {"a": 1, "b": 1}, max_passes={"b": passes}, epoch_length=30)

    old = make(10, 2)
    list(old)
    new = make(17, 2)
    with pytest.warns(UserWarning, match="max_passes lets 'b' leave before its new samples are drawn"):
        new.load_state_dict(old.state_dict(), **GROW)
    assert [line.coverage for line in new.report().sources if line.name == "b"] == [10 / 17]
    make(17, 3).load_state_dict(old.state_dict(), **GROW)
