"""A data module makes its batches anew, for other ranks or a second iteration: the run of its loader goes on."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from reweight_worker import BATCHES, DATA, FIRST, LENGTH, SEED, SIZES, WEIGHTS, Indices, N, mixture

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader
from headrace.weighted_sampler import WeightedDistributedSampler

KINDS = ["equal", "stratified", "packed"]
OUT = [3, 5, 401]


class Sources(Indices):
    """Samples of named sources that are their own indices."""

    names, cumulative_sizes = DATA.names, DATA.cumulative_sizes


def module(kind: str, *, mixed: bool = False, **options: Any) -> MapDataModule:
    given: dict[str, Any] = dict(BATCHES[kind])
    if "batch_size" not in given:
        given = {"batch_sampler": partial(DistributedSizeAwareBatchSampler, **given), "sizes": SIZES}
    if mixed:
        given["sampler"] = partial(WeightedDistributedSampler, weights=FIRST, epoch_length=LENGTH)
    return MapDataModule({"train": Sources()}, collate_fn=list, **{"seed": SEED} | given | options)


def made(kind: str, **options: Any) -> ResumableLoader:
    one = module(kind, **options)
    one.setup("fit")
    loader: ResumableLoader = one.train_dataloader()
    return loader


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch]


def set_ranks(monkeypatch: pytest.MonkeyPatch, world: int, rank: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", str(rank))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_what_changed_holds_for_the_ranks_of_the_next_epoch(
    kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, log = [], list[list[list[int]]]()
    for rank in range(2):
        set_ranks(monkeypatch, 2, rank)
        ranks.append(made(kind, num_workers=workers if rank == 0 else 0))
    came = []
    for rank, loader in enumerate(ranks):
        set_ranks(monkeypatch, 2, rank)
        own = []
        for batch in loader:
            own.append(batch)
            if loader.steps == 2:
                loader.exclude(OUT)
                loader.skip(1)
        came.append(own)
    log += [list(step) for step in zip(*came, strict=True)]
    set_ranks(monkeypatch, 1, 0)
    one = ranks[0]
    one.set_epoch(1)
    assert one.excluded_indices.tolist() == OUT
    assert one.run_steps == len(log)
    log += [[batch] for batch in one]
    assert sorted(flat(step[0] for step in log[len(came[0]) :])) == sorted(set(range(N)) - set(OUT))
    assert [one.step(number) for number in range(len(log))] == log
    resumed = made(kind)
    resumed.load_state_dict(one.state_dict())
    assert [resumed.step(number) for number in range(0, len(log), 5)] == log[::5]
    one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_hold_for_the_ranks_of_the_next_epoch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 2, 0)
    one = made(kind, mixed=True)
    for _ in one:
        if one.steps == 10:
            draw, _ = one.reweight(WEIGHTS[0])
    assert draw < LENGTH
    set_ranks(monkeypatch, 1, 0)
    one.set_epoch(1)
    planned = mixture(schedule=[(draw, WEIGHTS[0])])
    planned.set_epoch(1)
    assert Counter(flat(one)) == Counter(planned.take(0, LENGTH).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_accepted_is_recorded_where_the_next_epoch_has_other_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = ("batch_size", 15) if kind == "equal" else ("max_total_size", 450)
    set_ranks(monkeypatch, 2, 0)
    first, log = made(kind), list[list[int]]()
    for batch in first:
        log.append(batch)
        if len(log) == 3:
            break
    changed: dict[str, Any] = {name: value}
    if kind != "equal":
        changed = {"batch_sampler": partial(DistributedSizeAwareBatchSampler, **{**BATCHES[kind], name: value})}
    other = module(kind, accept={name}, **changed)
    other.load_state_dict({"version": 1, "options": {}, "train": first.state_dict()})
    other.setup("fit")
    one = other.train_dataloader()
    log += list(one)
    set_ranks(monkeypatch, 1, 0)
    one.set_epoch(1)
    log += list(one)
    assert [one.step(number)[0] for number in range(len(log))] == log


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_iteration_leaves_the_same_samples_out(kind: str, workers: int) -> None:
    one = made(kind, num_workers=workers)
    running = iter(one)
    next(running)
    one.exclude(OUT)
    next(running)
    look = next(iter(one))
    assert set(OUT).isdisjoint(look)
    assert one.steps == 2
    assert set(flat(one)) == set(range(N)) - set(OUT)  # the epoch once more
    assert one.excluded_indices.tolist() == OUT
    one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_alone_finds_the_coming_steps_of_a_run_on_several_ranks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, log, state = [], list[list[list[int]]](), dict[str, Any]()
    for rank in range(2):
        set_ranks(monkeypatch, 2, rank)
        ranks.append(made(kind, num_replicas=2, rank=rank))
    for _ in range(2):
        for step in zip(*ranks, strict=True):
            log.append(list(step))
            state = state or ranks[0].state_dict()
    set_ranks(monkeypatch, 1, 0)
    alone = made(kind)
    alone.load_state_dict(state)
    assert [alone.step(number) for number in range(len(log))] == log


def test_a_batch_size_may_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(num_replicas: int, rank: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(N, 40 // num_replicas, num_replicas=num_replicas, rank=rank)

    set_ranks(monkeypatch, 4, 0)
    one = ResumableLoader(Indices(), batches, collate_fn=list)
    log = [*one]
    one.exclude(OUT)
    set_ranks(monkeypatch, 2, 0)
    log += one
    assert [len(log[0]), len(log[-2])] == [10, 20]
    assert [one.step(number)[0] for number in range(len(log))] == log
    set_ranks(monkeypatch, 1, 0)
    assert sorted(flat(one)) == sorted(set(range(N)) - set(OUT))
