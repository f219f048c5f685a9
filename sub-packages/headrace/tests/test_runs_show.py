"""`headrace-runs show`: what it prints is what the loaders delivered, and all else is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import growing
import numpy as np
import pytest
import torch
from runs import run_script
from runs_command import SIZES, Command, N, batches_by_size, delivered, equal_batches, shards
from runs_command import command as command

from headrace.runs.cli import main
from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    ResumableLoader,
    add_column,
    index_shards,
    write_shards,
)
from headrace.weighted_sampler import WeightedDistributedSampler


def saved(path: Path, **states: Any) -> Path:
    torch.save({name: one.state_dict() for name, one in states.items()}, path)
    return path


def sizes_file(folder: Path) -> Path:
    np.save(folder / "lengths.npy", SIZES)
    return folder / "lengths.npy"


@pytest.mark.parametrize("save_at", [0, 3, 5, 8, 9, 12, 30, 55])
@pytest.mark.parametrize("make", [equal_batches, pytest.param(batches_by_size, marks=pytest.mark.slow)])
def test_every_step_is_the_one_that_was_delivered_before_or_will_be(
    tmp_path: Path, command: Command, make: Any, save_at: int
) -> None:
    """Also after a change of the world size and an exclusion; what comes behind a later change is not known before."""
    path = tmp_path / "last.pt"
    steps = delivered(make, list(range(N)), save_at, path)
    words: list[object] = ["--sizes", sizes_file(tmp_path)] if make is batches_by_size else []
    if save_at in (0, 5):  # the state does not know of the ranks that begin there
        words += ["--num-replicas", 3 if save_at == 0 else 2]
    assert path.exists()
    last = 5 if save_at < 5 else 9 if save_at < 9 else max(steps)
    numbers = sorted({0, 1, save_at - 1, save_at, last - 1, *range(4, last, 7)} & set(range(last)))
    for number in numbers:
        assert command.step(path, number, *words) == steps[number], number
        found = command.document(path, "--step", number, "--rank", 1, *words)
        assert [row["index"] for row in found["samples"]] == steps[number][1]
        assert found["past"] == (number < save_at)


@pytest.mark.parametrize("make", [equal_batches, batches_by_size])
def test_the_summary_has_the_changes_of_the_run(tmp_path: Path, command: Command, make: Any) -> None:
    path = tmp_path / "last.pt"
    delivered(make, list(range(N)), 12, path)
    found = command.document(path)
    assert (found["step"], found["world"], found["n"], found["exclude"]) == (12, 2, N, [3, 50, 77])
    assert [change["step"] for change in found["run"]] == [0, 5, 9]
    assert found["state"] == "loader"
    text = command("show", path)
    assert "next step 12" in text
    assert f"position {found['position']:,} samples, " in text
    assert "left out: 3 50 77" in text
    start, changes, *rest = text.splitlines()[-4:]
    assert start.startswith("start: step 0, epoch 0")
    assert changes == "changes:"
    assert [line[:17] for line in rest] == ["  step 5, epoch 0", "  step 9, epoch 0"]


def test_a_run_without_changes_says_so(tmp_path: Path, command: Command) -> None:
    batches = equal_batches()
    loader = ResumableLoader(list(range(N)), batches, collate_fn=list, check_ranks=False)
    iterator = iter(loader)
    next(iterator)
    *_, start, changes = command("show", saved(tmp_path / "x.pt", loader=loader)).splitlines()
    assert (start[:13], changes) == ("start: step 0", "changes: none")


def test_the_epoch_of_a_step_is_named(tmp_path: Path, command: Command) -> None:
    batches = DistributedBatchSampler(10, 2, num_replicas=2, rank=0)
    loader = ResumableLoader(list(range(10)), batches, collate_fn=list, check_ranks=False)
    list(loader)
    next(iter(loader))
    path = saved(tmp_path / "x.pt", loader=loader)
    assert [command.document(path, "--step", number)["epoch"] for number in (0, 2, 3, 4, 5, 6, 9)] == [
        0, 0, 1, 1, 1, 2, 3,
    ]  # fmt: skip


def test_a_coming_step_on_other_ranks(tmp_path: Path, command: Command) -> None:
    batches = equal_batches(num_replicas=2, rank=0)
    next(iter(batches))
    path = saved(tmp_path / "x.pt", batches=batches)
    assert command.step(path, 7, "--num-replicas", 5) == batches.step(7, num_replicas=5)
    assert command.step(path, 0, "--num-replicas", 5) == batches.step(0)


def test_a_run_that_has_not_begun_asks_for_its_ranks(tmp_path: Path, command: Command) -> None:
    batches = equal_batches()
    path = saved(tmp_path / "x.pt", batches=batches)
    command("show", path, "--step", 0, code=2)
    assert "--num-replicas" in command.error
    assert command.step(path, 0, "--num-replicas", 3) == batches.step(0, num_replicas=3)


@pytest.mark.parametrize(("names", "module"), [(("train",), False), (("train",), True), (("web", "books"), True)])
def test_samples_are_named_as_the_loader_names_them(
    tmp_path: Path, command: Command, names: tuple[str, ...], module: bool
) -> None:
    places = shards(tmp_path, names)
    sources = dict(zip(names, map(str, places), strict=True))
    if module:
        split = str(places[0]) if len(names) == 1 else sources
        data = IndexedWebDataModule({"train": split}, batch_size=4, collate_fn=list, seed=3)
        data.setup("fit")
        loader = data.train_dataloader()
    else:
        loader = ResumableLoader(IndexedShards(places[0]), equal_batches(), collate_fn=list)
    next(iter(loader))
    path = saved(tmp_path / "x.pt", loader=loader)
    words = (
        [f"--data={places[0]}"] if len(names) == 1 else [f"--data={name}={place}" for name, place in sources.items()]
    )
    for number in (0, 5, 60):
        assert command.document(path, "--step", number, *words)["samples"] == loader.samples_of_step(number)
    row = loader.samples_of_step(0)[0]
    line = command("show", path, "--step", 0, *words).splitlines()[2].split()
    assert line == [str(value) for name, value in row.items() if name != "step"]


def test_other_data_are_refused_and_grown_data_are_not(tmp_path: Path, command: Command) -> None:
    [place] = shards(tmp_path)
    loader = ResumableLoader(IndexedShards(place), equal_batches(), collate_fn=list)
    next(iter(loader))
    path, rows = saved(tmp_path / "x.pt", loader=loader), loader.samples_of_step(5)
    [other] = shards(tmp_path, ("other",))
    command("show", path, "--step", 5, "--data", other, code=2)
    assert "error: --data are not the data of the run: give every folder of the run, in its order" in command.error
    write_shards([("late", {"json": b"1"})], tmp_path / "more", n_shards=1)
    for tar in (tmp_path / "more").glob("*.tar"):
        tar.rename(place / f"z-{tar.name}")
    index_shards(place)
    assert len(IndexedShards(place)) == N + 1
    assert command.document(path, "--step", 5, "--data", place)["samples"] == rows


def test_data_without_a_step_are_compared_with_those_of_the_run(tmp_path: Path, command: Command) -> None:
    place, other = shards(tmp_path, ("train",))[0], shards(tmp_path, ("other",))[0]
    loader = ResumableLoader(IndexedShards(place), equal_batches(), collate_fn=list)
    next(iter(loader))
    loader.exclude([3, 50])
    path = saved(tmp_path / "x.pt", loader=loader)
    assert "left out: 3 (train3) 50 (train50)\n" in command("show", path, "--data", place)
    assert "left out: 3 50\n" in command("show", path)
    assert command.document(path, "--data", place)["exclude_keys"] == ["train3", "train50"]
    assert f"data: {N} samples, which begin with those of the run" in command("show", path, "--data", place)
    assert command.error == ""
    assert command.document(path, "--data", place)["data"] == {"n": N, "identified": True}
    command("show", path, "--data", other, code=2)
    assert "error: --data are not the data of the run" in command.error
    alone = saved(tmp_path / "alone.pt", batches=loader.batch_sampler)
    assert f"data: {N} samples\n" in command("show", alone, "--data", other)
    assert "warning: the state of a sampler does not identify the data" in command.error


@pytest.mark.parametrize("pattern", [False, True])
def test_the_tars_of_one_source_may_lie_in_several_folders(tmp_path: Path, command: Command, pattern: bool) -> None:
    days = shards(tmp_path, ("day1", "day2"))
    for day, sizes in zip(days, np.split(SIZES, 2), strict=True):
        add_column(day, "length", sizes)
    tars = [tar for day in days for tar in sorted(day.glob("*.tar"))]
    loader = ResumableLoader(IndexedShards(tars), batches_by_size(num_replicas=2, rank=0), collate_fn=list)
    list(loader)
    path = saved(tmp_path / "x.pt", loader=loader)
    data = ["--data", tmp_path / "day?" / "*.tar"] if pattern else [f"--data={day}" for day in days]
    words = ["--step", 3, *data, "--sizes", sizes_file(tmp_path) if pattern else "length"]
    found = command.document(path, *words)["samples"]
    assert found == [{**row, "size": SIZES[row["index"]]} for row in loader.samples_of_step(3)]
    assert "size" in command("show", path, *words).splitlines()[1].split()
    if pattern:
        command("show", path, *words[:-1], "length", code=2)
        assert "a column belongs to a folder: give each folder as --data FOLDER" in command.error


def test_several_sources_and_folders_are_told_apart(tmp_path: Path, command: Command) -> None:
    days = shards(tmp_path, ("day1", "day2"))
    loader = ResumableLoader(IndexedShards(sorted(tmp_path.glob("*/*.tar"))), equal_batches(), collate_fn=list)
    next(iter(loader))
    path = saved(tmp_path / "x.pt", loader=loader)
    for data, what in (
        ([f"--data=a={days[0]}", f"--data=b={days[1]}"], "not the data of the run: give every folder of the run"),
        ([f"--data={days[1]}", f"--data={days[0]}"], "as --data A --data B, or as --data NAME=A --data NAME=B if they"),
        ([f"--data={days[0]}"], f"the run has {N} samples, and --data {N // 2}: give every folder"),
        ([f"--data=a={days[0]}", f"--data={days[1]}"], "--data must be FOLDER for each folder of one source, or NAME="),
        ([f"--data={days[0]}", f"--data={days[0]}"], "--data must give each folder once"),
        ([f"--data=a={days[0]}", f"--data=a={days[1]}"], "--data must give each name once"),
    ):
        command("show", path, "--step", 0, *data, code=2)
        assert what in command.error


@pytest.mark.parametrize("how", ["file", "column", "member"])
def test_sizes_come_from_a_file_a_column_or_a_member(tmp_path: Path, command: Command, how: str) -> None:
    places = shards(tmp_path, ("web", "books"))
    for place, sizes in zip(places, np.split(SIZES, 2), strict=True):
        add_column(place, "length", sizes)
    batches = batches_by_size(num_replicas=2, rank=0)
    next(iter(batches))
    path = saved(tmp_path / "x.pt", batches=batches)
    data = [f"--data=web={places[0]}", f"--data=books={places[1]}"]
    words: dict[str, list[object]] = {"file": ["--sizes", sizes_file(tmp_path)], "column": ["--sizes", "length", *data]}
    words["member"] = ["--sizes", "seq.txt", *data]
    for number in (0, 9):
        assert command.step(path, number, *words[how]) == batches.step(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "sequential", "shuffle": False},
        {"strategy": "packed", "max_items": 7, "tail": "pad"},
        {"strategy": "bucketed", "cost": "padded", "length_multiple": 8, "batch_size_multiple": 2, "tail": "drop"},
        {"strategy": "bucketed", "cost": "padded", "shapes": 3},
        {"max_length": 30.5, "window": 100},
        {"max_total_size": 50.5, "oversize": "skip"},
        {"max_total_size": 50, "oversize": "own_batch", "seed": 2**63},
        {"curriculum": 20},
        {"sizes": np.stack([SIZES, SIZES**2], 1), "max_total_size": (150, 4000.5), "max_length": (None, 3000)},
    ],
)
def test_all_options_of_the_sampler_are_made_again(tmp_path: Path, command: Command, options: dict[str, Any]) -> None:
    given = {"sizes": SIZES, "max_total_size": 150, **options}
    batches = DistributedSizeAwareBatchSampler(**given, num_replicas=2, rank=1)
    rest = iter(batches)
    for _ in range(4):
        next(rest)
    batches.exclude([11] if "curriculum" not in options else [])
    np.save(tmp_path / "sizes.npy", given["sizes"])
    path = saved(tmp_path / "x.pt", batches=batches)
    for number in (0, 3, 4, 15, len(batches) - 1, len(batches) + 2):
        assert command.step(path, number, "--sizes", tmp_path / "sizes.npy") == batches.step(number)


@pytest.mark.parametrize("kind", ["batch_size", "max_total_size"])
def test_steps_before_and_behind_a_change_of_the_batches(tmp_path: Path, command: Command, kind: str) -> None:
    """Of options and of data that were appended, in the middle of an epoch."""

    def make(n: int, size: int) -> Any:
        if kind == "batch_size":
            return DistributedBatchSampler(n, size, num_replicas=2, rank=0)
        return DistributedSizeAwareBatchSampler(SIZES[:n], 30 * size, num_replicas=2, rank=0)

    first = make(150, 5)
    rest = iter(first)
    for _ in range(3):
        next(rest)
    batches = make(N, 8)
    batches.load_state_dict(first.state_dict(), accept={kind, "data"})
    rest = iter(batches)
    for _ in range(2):
        next(rest)
    path, words = saved(tmp_path / "x.pt", batches=batches), ["--sizes", sizes_file(tmp_path)]
    for number in (0, 2, 3, 4, 5, 9, 30):
        assert command.step(path, number, *words) == (first if number < 3 else batches).step(number)
    assert f"{kind}=" in command("show", path).splitlines()[-1]


def test_other_sizes_are_refused_and_none_are_asked_for(tmp_path: Path, command: Command) -> None:
    batches = batches_by_size(num_replicas=2, rank=0)
    path = saved(tmp_path / "x.pt", batches=batches)
    command("show", path, "--step", 0, "--num-replicas", 1, code=2)
    assert "give --sizes" in command.error
    np.save(tmp_path / "other.npy", SIZES[::-1])
    command("show", path, "--step", 0, "--num-replicas", 1, "--sizes", tmp_path / "other.npy", code=2)
    assert "differs in sizes" in command.error
    np.save(tmp_path / "large.npy", SIZES * 10)
    command("show", path, "--step", 0, "--num-replicas", 1, "--sizes", tmp_path / "large.npy", code=2)
    assert "--sizes do not fit the options of this run" in command.error
    np.save(tmp_path / "few.npy", SIZES[:-1])
    command("show", path, "--step", 0, "--num-replicas", 1, "--sizes", tmp_path / "few.npy", code=2)
    assert "got 199" in command.error
    command("show", path, "--step", 0, "--num-replicas", 1, "--sizes", tmp_path / "none.npy", code=2)
    assert "none.npy: No such file" in command.error


def test_pieces_of_long_samples_have_their_range(tmp_path: Path, command: Command) -> None:
    batches = DistributedSizeAwareBatchSampler(SIZES, 40, oversize="split", num_replicas=2, rank=0)
    path = saved(tmp_path / "x.pt", batches=batches)
    found = command.document(path, "--step", 3, "--num-replicas", 2, "--sizes", sizes_file(tmp_path))["samples"]
    wanted = [one for rank in batches.step(3) for one in rank]
    assert [row["index"] for row in found] == list(map(int, wanted))
    assert [(row.get("start"), row.get("stop")) for row in found] == [
        (getattr(one, "start", None), getattr(one, "stop", None)) for one in wanted
    ]
    assert any("start" in row for row in found)


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        (lambda: DistributedBatchSampler(N, 4, sampler=by_sample()), "came from a sampler"),
        (lambda: batches_by_size(sampler=by_sample()), "differs in sampler"),
        (lambda: DistributedBatchSampler(N, 4, sampler=by_token(SIZES + 1)), "shares of tokens by other sizes"),
        (lambda: batches_by_size(sampler=by_token(SIZES + 1)), "shares of tokens by other sizes"),
        (lambda: batches_by_size(work=SIZES**2), "differs in work"),
        (lambda: batches_by_size(cost=rectangle, strategy="bucketed"), "cost of this run is a function"),
    ],
)
def test_what_the_record_does_not_hold_is_refused_with_the_way_in_python(
    tmp_path: Path, command: Command, batches: Any, what: str
) -> None:
    path = saved(tmp_path / "x.pt", batches=batches())
    command("show", path, "--step", 0, "--num-replicas", 2, "--sizes", sizes_file(tmp_path), code=2)
    assert what in command.error
    assert "samples_of_step" in command.error
    assert command.document(path)["n"] == N


def rectangle(n: Any, largest: Any) -> Any:
    return n * largest


def order() -> Any:
    return WeightedDistributedSampler(range(N), {(0, 100): 1, (100, N): 2}, num_replicas=1, rank=0)


def by_sample() -> Any:
    return WeightedDistributedSampler(range(N), np.ones(N), num_replicas=1, rank=0)


def by_token(tokens: Any) -> Any:
    weights = {(0, 100): 1, (100, N): 2}
    return WeightedDistributedSampler(
        range(N), weights, per="token", sizes=tokens, semantics="proportion", num_replicas=1, rank=0
    )


@pytest.mark.parametrize(
    ("kind", "mixed", "grows"),
    [
        ("equal", "tokens", True),
        ("stratified", "samples", True),
        pytest.param("equal", "samples", False, marks=pytest.mark.slow),
        pytest.param("stratified", "tokens", False, marks=pytest.mark.slow),
        pytest.param("pieces", "tokens", True, marks=pytest.mark.slow),
    ],
)
def test_steps_of_a_mixture_are_those_that_came(
    tmp_path: Path, command: Command, kind: str, mixed: str, grows: bool
) -> None:
    """Its weights change in epoch 0; it grows behind epoch 0; the state is that of the middle of epoch 1."""
    log = []

    def train(ranks: list[ResumableLoader], steps: int, change: Any = None) -> None:
        for number, batches in enumerate(zip(*ranks, strict=True), 1):
            log.append([list(map(int, batch)) for batch in batches])
            if number == steps:
                break
            if change is not None and number == 15:
                for rank in ranks:
                    rank.reweight(change)

    ranks = growing.loaders(kind, growing.OLD, growing.FIRST, 2, mixed)
    train(ranks, 10**6, {"web": 1, "books": 2})
    sizes, weights = (growing.NEW, growing.THEN) if grows else (growing.OLD, growing.FIRST)
    state, ranks = ranks[0].state_dict(), growing.loaders(kind, sizes, weights, 3, mixed)
    for rank in ranks:
        rank.load_state_dict(state, accept={"data"})
        rank.set_epoch(1)
    train(ranks, 8)
    path = saved(tmp_path / "x.pt", loader=ranks[0])
    np.save(tmp_path / "lengths.npy", growing.SIZES)
    words: list[object] = ["--sizes", tmp_path / "lengths.npy"] if (kind, mixed) != ("equal", "samples") else []
    assert len(log) > 20
    for number in (0, 14, 16, 20, len(log) - 9, len(log) - 8, len(log) - 1):
        assert command.step(path, number, *words) == log[number], number
    coming = len(log)
    assert command.step(path, coming, *words) == [list(map(int, batch)) for batch in ranks[0].step(coming)]
    assert "a mixture of 2 sources" in command("show", path)
    assert ("a mixture of 3 sources" in command("show", path)) == grows


def test_a_mixture_that_was_changed_by_hand_is_named(tmp_path: Path, command: Command) -> None:
    state = DistributedBatchSampler(N, 4, sampler=order(), num_replicas=1, rank=0).state_dict()
    state["run"][0]["mixture"]["weights"] = ["1e999999999", 1]
    torch.save({"batches": state}, tmp_path / "x.pt")
    command("show", tmp_path / "x.pt", "--step", 0, "--num-replicas", 1, code=1)
    assert "state['mixture'] must be as state_dict() returned it: it was changed" in command.error


def reweighted(batches: Any) -> Any:
    next(iter(batches))
    assert batches.reweight({(0, 100): 1, (100, N): 0.3})[0] == 1024
    return batches


def test_other_weights_of_a_mixture_are_listed(tmp_path: Path, command: Command) -> None:
    path = saved(tmp_path / "x.pt", batches=reweighted(DistributedBatchSampler(N, 4, sampler=order())))
    assert "step 1, epoch 0, position 4 samples: weights [1, '3/10'] from draw 1,024 on" in command("show", path)
    assert command.document(path)["run"][-1]["reweight"] == [[1024, [1, "3/10"]]]


def test_steps_of_a_run_by_tokens_are_listed_past_and_coming(tmp_path: Path, command: Command) -> None:
    sizes = "--sizes", sizes_file(tmp_path)
    ranks = [batches_by_size(tokens_per_step=600, num_replicas=2, rank=rank) for rank in range(2)]
    steps = [list(row) for row in zip(*(islice(sampler, 5) for sampler in ranks), strict=True)]
    path = saved(tmp_path / "x.pt", batches=ranks[0])
    assert command.document(path)["options"]["tokens_per_step"] == 600
    assert "OptimizerStepBatchSampler" in command("show", path)
    steps += [ranks[0].step(5), ranks[0].step(90)]
    assert [command.step(path, number, *sizes) for number in (0, 1, 2, 3, 4, 5, 90)] == steps


def test_several_states_are_listed_and_one_is_chosen(tmp_path: Path, command: Command) -> None:
    one, other = equal_batches(seed=1, num_replicas=1, rank=0), equal_batches(seed=2, num_replicas=1, rank=0)
    path = tmp_path / "x.pt"
    torch.save({"loops": [one.state_dict()], "again": one.state_dict(), "val": {"batches": other.state_dict()}}, path)
    command("show", path, code=2)
    assert "2 states: choose one with --state: again, val/batches" in command.error
    assert command.document(path, "--state", "val/batches")["seed"] == 2
    command("show", path, "--state", "val", code=2)
    assert "--state must be one of again, val/batches" in command.error


def test_a_checkpoint_that_holds_itself_is_searched_once(tmp_path: Path, command: Command) -> None:
    deep: list[Any] = [equal_batches().state_dict()]
    for _ in range(60):
        deep = [deep, deep]
    around: dict[str, Any] = {"deep": deep}
    around["around"] = around
    torch.save(around, tmp_path / "x.pt")
    assert command.document(tmp_path / "x.pt")["n"] == N


def test_the_batches_of_all_ranks_are_told_rank_by_rank(tmp_path: Path, command: Command) -> None:
    batches = batches_by_size(rank="all", num_replicas=3)
    seen = list(batches)
    batches.set_epoch(1)
    seen += [batch for batch, _ in zip(batches, range(7), strict=False)]
    path, words = saved(tmp_path / "x.pt", batches=batches), ["--sizes", sizes_file(tmp_path)]
    steps = len(batches) // 3
    for number in (0, 5, steps - 1, steps, steps + 1):
        assert command.step(path, number, *words) == seen[3 * number : 3 * number + 3]
        assert command.document(path, "--step", number, *words)["epoch"] == number // steps
    assert command.document(path, "--step", 2 * steps, *words)["epoch"] == 2


def test_a_file_of_a_folder_that_needs_code_is_passed_over(tmp_path: Path, command: Command) -> None:
    (tmp_path / "state").mkdir()
    torch.save({"home": Path("/")}, tmp_path / "state" / "custom_checkpoint_0.pkl")
    torch.save(equal_batches().state_dict(), tmp_path / "state" / "custom_checkpoint_1.pkl")
    assert command.document(tmp_path / "state")["state"] == "custom_checkpoint_1.pkl"
    assert "passed over" in command.error
    assert "custom_checkpoint_0.pkl: refused" in command.error


def test_what_is_no_state_is_said(tmp_path: Path, command: Command) -> None:
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "none.pt").read_bytes()[:-300])
    old = equal_batches().state_dict()
    torch.save(
        {**{name: old[name] for name in old if name not in ("step", "starts", "run")}, "version": 1},
        tmp_path / "old.pt",
    )
    torch.save({**old, "run": [{"step": 0}]}, tmp_path / "changed.pt")
    empty = DistributedBatchSampler(0, 4)
    saved(tmp_path / "empty.pt", batches=empty)
    (tmp_path / "folder").mkdir()
    for words, code, what in (
        (["missing.pt"], 2, "missing.pt: No such file"),
        (["none.pt"], 2, "no state of ResumableLoader"),
        (["folder"], 2, "has none of custom_checkpoint"),
        (["text.pt"], 1, "no file of torch.save"),
        (["cut.pt"], 1, "no file of torch.save"),
        (["old.pt"], 2, "no record of the run"),
        (["changed.pt"], 1, "it was changed"),
        (["empty.pt", "--step", 0, "--num-replicas", 2], 2, "--step must be one that the run has, got 0"),
        (["empty.pt", "--step", -1], 2, "--step"),
        (["empty.pt", "--step", "x"], 2, "got 'x'"),
        (["empty.pt", "--data", "a.tar", "b.tar"], 2, "unrecognized arguments: b.tar (quote a pattern of tars)"),
        (["empty.pt", "--rank", 1], 2, "--rank goes with --step"),
        (["empty.pt", "--step", 1, "--export", "x"], 2, "--export goes with --data"),
    ):
        first, *rest = words
        command("show", tmp_path / str(first), *rest, code=code)
        assert what in command.error


@pytest.mark.slow
@pytest.mark.parametrize("make", [equal_batches, batches_by_size])
def test_a_state_that_was_changed_is_an_error_of_one_line(tmp_path: Path, command: Command, make: Any) -> None:
    batches = make(num_replicas=2, rank=0)
    list(batches)
    batches.set_epoch(1)
    rest = iter(batches)
    next(rest)
    batches.exclude([4])
    state = json.loads(json.dumps(batches.state_dict()))
    words = ["--sizes", sizes_file(tmp_path)] if make is batches_by_size else []
    path, codes = tmp_path / "state.json", set()
    for place in list(places(state)):
        for value in (None, "x", -1, 1, 2**61, 0.5, [None], {"n": 3}):
            changed = json.loads(json.dumps(state))
            inner = changed
            for part in place[:-1]:
                inner = inner[part]
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            for more in ([], ["--step", "1", *words], ["--step", "40", *words]):
                try:
                    code = main(["show", str(path), *map(str, more)])
                except SystemExit as stopped:
                    pytest.fail(f"{place}, {value!r}: {stopped}")
                except Exception as error:
                    pytest.fail(f"{place}, {value!r}, {more}: {error!r}")
                codes.add(code)
    assert codes == {0, 1, 2}


def places(thing: Any) -> Iterator[list[Any]]:
    """The place of each value in containers."""
    for part in range(len(thing)) if isinstance(thing, list) else thing:
        yield [part]
        if isinstance(thing[part], list | dict):
            yield from ([part, *rest] for rest in places(thing[part]))


def test_a_rank_that_was_not_there_is_refused(tmp_path: Path, command: Command) -> None:
    path = saved(tmp_path / "x.pt", batches=equal_batches())
    command("show", path, "--step", 3, "--num-replicas", 2, "--rank", 2, code=2)
    assert "--rank must be 0 to 1" in command.error


WITHOUT = """
import sys
import headrace

for name in list(sys.modules):  # torch may stay
    if name == {0!r} or name.startswith({0!r} + "."):
        del sys.modules[name]
vars(headrace).pop({0!r}.rpartition(".")[2], None)

class Missing:
    def find_spec(name, path=None, target=None):
        if name == {0!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)

sys.meta_path.insert(0, Missing)
from headrace.runs.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["webdatamodule", "size_aware_batching"])
def test_one_package_alone_is_enough_for_its_states(tmp_path: Path, lacks: str) -> None:
    states = {
        "webdatamodule": saved(tmp_path / "equal.pt", batches=equal_batches()),
        "size_aware_batching": saved(tmp_path / "sizes.pt", batches=batches_by_size()),
    }
    script = tmp_path / "runs.py"
    script.write_text(WITHOUT.format(f"headrace.{lacks}"))
    for package, path in states.items():
        words = ["show", path, "--step", "2", "--num-replicas", "2"]
        words += ["--sizes", sizes_file(tmp_path)] if package == "size_aware_batching" else []
        (ended,) = run_script(script, words, tmp_path)
        assert ended.returncode == (2 if package == lacks else 0), ended.stderr
        if package == lacks:
            assert f"pip install headrace-{lacks.replace('_', '-')}" in ended.stderr


@pytest.mark.slow
def test_a_reader_that_stops_is_no_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", batches=DistributedBatchSampler(10**6, 100_000, num_replicas=8, rank=0))
    words = [sys.executable, "-m", "headrace.runs", "show", str(path), "--step", "0", "--num-replicas", "8"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(6) == b"step 0"
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 0


@pytest.mark.slow
def test_the_command_runs_as_a_module(tmp_path: Path, command: Command) -> None:
    batches = equal_batches(num_replicas=2, rank=0)
    path = saved(tmp_path / "x.pt", batches=batches)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "headrace.runs", "show", str(path), "--step", "1", "--num-replicas", "2"]
    ended = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [f"rank {rank}: {' '.join(map(str, samples))}" for rank, samples in enumerate(batches.step(1))]
    assert ended.stdout.splitlines() == ["step 1, coming: epoch 0, 2 ranks, 8 samples", *lines]
    assert command.document(path)["n"] == N
