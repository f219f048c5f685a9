"""Two processes, gloo: ranks that hold different plans all end with an error that names the difference."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from two_ranks import ended, started

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, index_shards, write_tars
from headrace.webdatamodule.loading.distributed import compare_plans

pytestmark = pytest.mark.slow

COUNT = 20


def made(folder: Path, first: int = 0) -> str:
    write_tars([(f"s{i:02d}", {"json": b"%d" % (i + first)}) for i in range(COUNT)], folder, n_shards=2)
    index_shards(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("shards"))


def run(out: Path, folders: list[str], options: list[dict[str, Any]], code: int) -> list[dict[str, Any]]:
    ended(started("agreeing_worker.py", lambda rank: (str(out), folders[rank], json.dumps(options[rank]))), code)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def state(folder: str, steps: int) -> dict[str, Any]:
    """A checkpoint of two ranks."""
    batches = DistributedBatchSampler(COUNT, 3, num_replicas=2, rank=0)
    loader = ResumableLoader(IndexedShards(folder), batches, num_replicas=2, rank=0, check_ranks=False)
    list(islice(loader, steps))
    return loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
def test_one_plan_passes(folder: str, tmp_path: Path, workers: int) -> None:
    ranks = run(tmp_path, [folder] * 2, [{"workers": workers}] * 2, 0)
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(key for rank in ranks for batch in rank["came"][epoch] for key in batch) == [
            f"s{i:02d}" for i in range(COUNT)
        ]
    assert [len(rank["came"]) for rank in ranks] == [8, 8]


def test_one_checkpoint_passes(folder: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, [folder] * 2, [{"state": state(folder, 2)}] * 2, 0)
    assert [len(rank["came"]) for rank in ranks] == [6, 6]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"seed": 1}, {"seed": 2}, "position"),
        ({"size": 3}, {"size": 5}, "steps: rank 0 has 4, rank 1 has 2"),
        ({"size": 6}, {"size": 7}, "order and batches"),
        ({}, {"epoch": 1}, "epoch: rank 0 has 0, rank 1 has 1"),
        ({"state": 1}, {"state": 2}, "steps done: rank 0 has 1, rank 1 has 2"),
        ({"state": 3}, {}, "steps done: rank 0 has 3, rank 1 has 0"),
    ],
)
def test_other_plans_are_an_error_on_every_rank(
    folder: str, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], told: str
) -> None:
    options = [{**own, "state": state(folder, own["state"])} if "state" in own else own for own in (one, other)]
    ranks = run(tmp_path, [folder] * 2, options, 3)
    assert ranks[0]["said"] == ranks[1]["said"]
    assert told in ranks[0]["said"]
    assert "give every rank the same shards" in ranks[0]["said"]
    assert [rank["came"] for rank in ranks] == [[], []]


def test_other_shards_are_an_error_on_every_rank(folder: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, [folder, made(tmp_path / "other", 1)], [{}, {}], 3)
    for rank in ranks:
        assert "shards: rank 0 has " in rank["said"]
        assert rank["came"] == []


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "(b: rank 0 has none, rank 1 has 2)"),
        ({"a": 1, "b": 2}, {"c": 2, "a": 1}, "(b: rank 0 has 2, rank 1 has none; c: rank 0 has none, rank 1 has 2)"),
    ],
)
def test_plans_of_other_things_are_told_apart(
    folder: str, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], told: str
) -> None:
    for rank in run(tmp_path, [folder] * 2, [{"plan": one}, {"plan": other}], 3):
        assert told in rank["said"]


def test_plans_in_another_order_are_the_same(folder: str, tmp_path: Path) -> None:
    run(tmp_path, [folder] * 2, [{"plan": {"a": 1, "b": 2}}, {"plan": {"b": 2, "a": 1}}], 0)


def test_a_process_alone_agrees_with_itself() -> None:
    compare_plans({"epoch": 0}, "train")
