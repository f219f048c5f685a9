"""Mixtures that grow in a run of loaders: nothing is lost or repeated, and the past is known."""

from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import islice
from typing import Any

import pytest
from growing import FIRST, KINDS, LENGTH, NEW, OLD, SIZES, THEN, drawn, epoch_of, loaders, mixture
from torch.utils.data import ConcatDataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, MapDataModule
from headrace.weighted_sampler import WeightedDistributedSampler


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(
    ("kind", "mixed"), [(kind, "samples") for kind in KINDS] + [("equal", "tokens"), ("stratified", "tokens")]
)
def test_a_run_grows_between_two_epochs_and_its_past_is_known(kind: str, mixed: str, at_end: bool) -> None:
    if kind == "optimizer steps" and at_end:
        pytest.skip("its epochs cannot change at their end")
    looks_up = kind != "optimizer steps"
    before = loaders(kind, OLD, FIRST, 2, mixed)
    log = epoch_of(before, 0, 20)
    if looks_up and kind != "one window":
        for rank in before:
            rank.reweight({"web": 1, "books": 1})
    state = before[0].state_dict()
    before = loaders(kind, OLD, FIRST, 3, mixed)
    for rank in before:
        rank.load_state_dict(state)
    log += epoch_of(before)
    log += epoch_of(before, 1)
    if not at_end:
        for rank in before:
            rank.set_epoch(2)
    state = before[0].state_dict()

    after = loaders(kind, NEW, THEN, 2, mixed)
    for rank in after:
        rank.load_state_dict(state, accept={"data"})
    if at_end:
        assert epoch_of(after) == [], "the epoch of the state is over"
    second = epoch_of(after, 2)
    state = after[1].state_dict()
    after = loaders(kind, NEW, THEN, 1, mixed)
    after[0].load_state_dict(state)  # no more accept
    third = epoch_of(after, 3)
    log += second + third
    order = mixture(NEW, THEN, mixed)
    order.mixture = [change["mixture"] for change in state["batch_sampler"]["run"] if "mixture" in change][-1]
    for epoch, steps in ((2, second), (3, third)):
        order.set_epoch(epoch)
        taken = order.take(0, LENGTH[len(NEW)]).tolist()
        longest = KINDS[kind].get("max_length", 10**9)
        pieces = [
            (sample, start) if SIZES[sample] > longest else sample
            for sample in taken
            for start in range(0, SIZES[sample], longest)
        ]
        assert drawn(steps) == Counter(pieces)
    if looks_up:
        [alone] = loaders(kind, NEW, THEN, 1, mixed)
        alone.load_state_dict(after[0].state_dict())
        for number in {*range(0, len(log), 9), 19, 20, len(log) - len(second) - len(third), len(log) - 1}:
            assert alone.step(number) == log[number], number


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_inside_an_epoch_the_error_names_the_cure(kind: str) -> None:
    [before], [after] = loaders(kind, OLD, FIRST, 1), loaders(kind, NEW, THEN, 1)
    epoch_of([before], 0, 5)
    with pytest.raises(ValueError, match="accept=") as refused:
        after.load_state_dict(before.state_dict(), accept={"data"})
    assert "accept={'data'} needs a state of the beginning or the end of an epoch" in str(refused.value)
    assert "append samples between two epochs" in str(refused.value)
    assert len(epoch_of([after], 0)) > 10, "what was refused changed nothing"


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_without_accept_the_error_names_it(kind: str) -> None:
    [before], [after] = loaders(kind, OLD, FIRST, 1), loaders(kind, NEW, THEN, 1)
    for one in (before.batch_sampler, before):
        other = after.batch_sampler if one is before.batch_sampler else after
        with pytest.raises(ValueError, match=r"go on with accept=[\[{]'data'[\]}]"):
            other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_going_back_before_the_growth_is_refused_by_name(kind: str) -> None:
    [before], [after] = loaders(kind, OLD, FIRST, 1), loaders(kind, NEW, THEN, 1)
    epoch_of([before], 0)
    before.set_epoch(1)
    after.load_state_dict(before.state_dict(), accept={"data"})
    epoch_of([after], 1, 3)
    with pytest.raises(ValueError, match="epoch must be at least 1, where the data of this mixture grew, got 0"):
        epoch_of([after], 0)


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_a_grown_mixture_is_reweighted_and_grows_again(kind: str) -> None:
    [before], [after] = loaders(kind, OLD, FIRST, 1), loaders(kind, NEW, THEN, 1)
    log = epoch_of([before], 0)
    after.load_state_dict(before.state_dict(), accept={"data"})
    after.set_epoch(1)
    for batch in after:
        log.append([batch])
        if after.steps == 10:
            draw, _ = after.reweight({"web": 1, "books": 0, "code": 1})
            assert draw == 3072
    larger = {**NEW, "code": 70}
    [again] = loaders(kind, larger, THEN, 1)
    again.load_state_dict(after.state_dict(), accept={"data"})
    log += epoch_of([again], 2)
    [alone] = loaders(kind, larger, THEN, 2)[:1]
    alone.load_state_dict(again.state_dict())
    assert [alone.step(number) for number in range(len(log))] == log
    assert max(key for batches in log[-20:] for key in batches[0]) >= 450


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_a_growth_of_another_seed_is_refused(kind: str) -> None:
    def make(count: int, seed: int) -> Any:
        mixture = WeightedDistributedSampler(range(count), {(0, count): 1}, num_replicas=1, rank=0, seed=seed)
        return loader_of(kind, count, mixture)

    before, after = make(100, 0), make(140, 9)
    with pytest.raises(ValueError, match="mixture of seed=0, this WeightedDistributedSampler has seed=9") as refused:
        after.load_state_dict(before.state_dict(), accept={"data"})
    assert getattr(refused.value, "differences", None) == ("seed",)
    after = make(140, 0)
    after.load_state_dict(before.state_dict(), accept={"data"})


@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_a_source_grows_into_samples_that_the_dataset_had(kind: str) -> None:
    def make(end: int) -> Any:
        ranges = {(0, 50): 1, (50, end): 2}
        return loader_of(kind, 140, WeightedDistributedSampler(range(140), ranges, num_replicas=1, rank=0))

    before, after = make(100), make(140)
    steps = list(before)
    before.set_epoch(1)
    with pytest.raises(ValueError, match="data") as refused:
        after.load_state_dict(before.state_dict())
    assert getattr(refused.value, "acceptable", None) == {"data"}
    after.load_state_dict(before.state_dict(), accept={"data"})
    keys = [key for batch in after for key in batch]
    assert len(keys) == 50 + 2 * 90
    assert max(keys) >= 100
    assert [after.step(number)[0] for number in range(len(steps))] == steps
    again = make(140)
    again.load_state_dict(after.state_dict())


def test_optimizer_steps_of_epochs_before_and_after_a_growth() -> None:
    def make(count: int) -> Any:
        ranges = {(0, 50): 1, (50, count): 2}
        mixture = WeightedDistributedSampler(range(count), ranges, num_replicas=1, rank=0)
        return OptimizerStepBatchSampler(
            SIZES[:count], 200, tokens_per_step=900, sampler=mixture, num_replicas=1, rank=0
        )

    before, after = make(100), make(140)
    steps = before.num_optimizer_steps()
    list(before)
    before.set_epoch(1)
    after.load_state_dict(before.state_dict(), accept={"data"})
    assert after.report().steps > 0
    assert after.num_optimizer_steps(0) == steps
    assert after.num_optimizer_steps() > 0


@pytest.mark.parametrize("at_end", [False, True])
def test_reports_after_a_growth(at_end: bool) -> None:
    def make(count: int) -> Any:
        ranges = {(0, 50): 1, (50, count): 2}
        return loader_of("stratified", count, WeightedDistributedSampler(range(count), ranges, num_replicas=1, rank=0))

    before, after = make(100), make(140)
    list(before)
    if not at_end:
        before.set_epoch(1)
    after.load_state_dict(before.state_dict(), accept={"data"})
    assert after.report().steps > 0
    if not at_end:
        with pytest.raises(ValueError, match="epoch must be at least 1, where the data of this mixture grew, got 0"):
            after.report(0)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_mixture_on_one_side_only_is_said(reverse: bool) -> None:
    plain = DistributedBatchSampler(140 - 40 * reverse, 7, num_replicas=1, rank=0)
    count = 100 + 40 * reverse
    mixed = loader_of("equal", count, WeightedDistributedSampler(range(count), {(0, count): 1}, num_replicas=1, rank=0))
    before, after = (plain, mixed) if reverse else (mixed, plain)
    with pytest.raises(ValueError, match="only one of checkpoint and sampler is of a mixture") as refused:
        after.load_state_dict(before.state_dict(), accept={"data"})
    assert "go on with" not in str(refused.value)


def loader_of(kind: str, count: int, mixture: Any) -> Any:
    if kind == "equal":
        return DistributedBatchSampler(count, 7, sampler=mixture, num_replicas=1, rank=0)
    return DistributedSizeAwareBatchSampler(SIZES[:count], 200, sampler=mixture, num_replicas=1, rank=0)


@pytest.mark.parametrize("accept", [{"max_total_size": 90}, {"extra_per_sample": 2}, {"window": 16}])
def test_a_data_module_accepts_other_options_of_batches_over_a_mixture(accept: dict[str, Any]) -> None:
    """Also where the batch sampler shows no `sampler`, as one by size does."""
    sizes = [1 + number * 7 % 29 for number in range(400)]

    def module(names: Collection[str] = (), **options: Any) -> MapDataModule:
        parts: list[Any] = [list(range(300)), list(range(300, 400))]
        chosen: dict[str, Any] = {"max_total_size": 120, "window": 8, **options}
        return MapDataModule(
            {"train": ConcatDataset(parts)},
            batch_sampler=partial(DistributedSizeAwareBatchSampler, **chosen),
            sizes={"train": sizes},
            sampler=partial(WeightedDistributedSampler, weights=[3, 1]),
            collate_fn=list,
            accept=names,
        )

    first = module()
    first.setup("fit")
    taken = [sample for batch in islice(first.train_dataloader(), 5) for sample in batch]
    other = module(accept, **accept)
    other.load_state_dict(first.state_dict())
    other.setup("fit")
    rest = [sample for batch in other.train_dataloader() for sample in batch]
    unbroken = module()
    unbroken.setup("fit")
    whole = [sample for batch in unbroken.train_dataloader() for sample in batch]
    assert Counter(taken + rest) == Counter(whole)
    refused = module(**accept)
    refused.load_state_dict(first.state_dict())
    refused.setup("fit")
    with pytest.raises(ValueError, match=r"the checkpoint does not fit: .*accept"):
        refused.train_dataloader()
