"""Data-parallel ranks, and several processes over gloo: the same batches, or an error that names the difference."""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import distributed_tasks
import pytest
from indexed_runs import Mesh
from processes import run_ranks

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedShards,
    IndexedWebDataModule,
    ResumableLoader,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.distributed import compare_plans, on_one_rank

slow = pytest.mark.slow
COUNT = 20
KEYS = [f"s{i:02d}" for i in range(COUNT)]


def made(folder: Path, first: int = 0) -> str:
    samples = [(f"s{i:02d}", {"json": b"%d" % (i + first), "txt": b"x" * (i % 5 + 1)}) for i in range(COUNT)]
    write_tars(samples, folder, n_shards=2)
    index_shards(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("shards"))


def flat(batches: list[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


def test_a_loader_takes_the_ranks_of_the_moment(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the environment tells, as the streaming data module does."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    module = IndexedWebDataModule(folder, batch_size=2, collate_fn=distributed_tasks.keys, seed=1)
    module.setup("fit")
    loader = module.train_dataloader()
    assert (loader.ranks, len(loader)) == ((1, 0), 10)
    monkeypatch.setenv("WORLD_SIZE", "2")
    both = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader.set_epoch(0)
        assert (loader.ranks, len(loader)) == ((2, rank), 5)
        both += list(loader)
    assert sorted(flat(both)) == KEYS


def test_a_mesh_gives_a_module_and_a_loader_their_ranks(folder: str) -> None:
    came = []
    for rank in range(2):
        module = IndexedWebDataModule(folder, batch_size=4, collate_fn=distributed_tasks.keys, mesh=Mesh(2, rank))
        module.setup("fit")
        came += list(module.train_dataloader())
    assert sorted(flat(came)) == KEYS
    batches = DistributedBatchSampler(COUNT, 4, mesh=Mesh(2, 1))
    loader = ResumableLoader(list(range(COUNT)), batches, mesh=Mesh(2, 1), check_ranks=False)
    assert (loader.ranks, len(loader), sum(map(len, loader))) == ((2, 1), 3, 10)


def run(out: Path, folders: list[str], options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_ranks(distributed_tasks.two_epochs, out, 2, folders, options)


def state(folder: str, steps: int) -> dict[str, Any]:
    """A checkpoint of two ranks."""
    batches = DistributedBatchSampler(COUNT, 3, num_replicas=2, rank=0)
    loader = ResumableLoader(IndexedShards(folder), batches, num_replicas=2, rank=0, check_ranks=False)
    list(islice(loader, steps))
    return loader.state_dict()


@pytest.mark.slow
@slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_one_plan_passes(folder: str, tmp_path: Path, workers: int) -> None:
    ranks = run(tmp_path, [folder] * 2, [{"workers": workers}] * 2)
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(key for rank in ranks for key in flat(rank["came"][epoch])) == KEYS
    assert [len(rank["came"]) for rank in ranks] == [8, 8]


@slow
def test_one_checkpoint_passes(folder: str, tmp_path: Path) -> None:
    ranks = run(tmp_path, [folder] * 2, [{"state": state(folder, 2)}] * 2)
    assert [len(rank["came"]) for rank in ranks] == [6, 6]


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@slow
@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        nightly({"seed": 1}, {"seed": 2}, "order and batches"),
        ({"size": 3}, {"size": 5}, "steps: rank 0 has 4, rank 1 has 2"),
        nightly({"size": 6}, {"size": 7}, "order and batches"),
        nightly({}, {"epoch": 1}, "epoch: rank 0 has 0, rank 1 has 1"),
        ({"state": 1}, {"state": 2}, "steps done: rank 0 has 1, rank 1 has 2"),
        nightly({"state": 3}, {}, "steps done: rank 0 has 3, rank 1 has 0"),
        ({"order": 1}, {"order": 2}, "order: rank 0 has "),
    ],
)
def test_other_plans_are_an_error_on_every_rank(
    folder: str, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    options = [{**own, "state": state(folder, own["state"])} if "state" in own else own for own in (one, other)]
    ranks = run(tmp_path, [folder] * 2, options)
    assert ranks[0]["said"] == ranks[1]["said"]
    assert message in ranks[0]["said"]
    assert "give every rank the same shards" in ranks[0]["said"]
    assert [rank["came"] for rank in ranks] == [[], []]


@slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_samples_are_left_out_at_the_same_step_of_every_rank(tmp_path: Path, workers: int) -> None:
    ranks = run_ranks(distributed_tasks.excluding, tmp_path, 2, [4, 4], workers)
    assert ranks[0]["record"] == ranks[1]["record"]
    first = [sample for rank in ranks for batch in rank["came"][:10] for sample in batch]
    early = {sample for rank in ranks for batch in rank["came"][:4] for sample in batch}
    assert sorted({*first} | {1, 2, 3}) == list(range(60))
    assert len(first) == 57 + len(early & {1, 2, 3})
    second = [sample for rank in ranks for batch in rank["came"][10:] for sample in batch]
    assert sorted(second) == [0, *range(4, 60)]


@slow
@pytest.mark.parametrize("at", [[4, 5], [1, 2], [3, 99]])
def test_samples_that_are_left_out_at_different_steps_are_an_error_on_every_rank(tmp_path: Path, at: list[int]) -> None:
    ranks = run_ranks(distributed_tasks.excluding, tmp_path, 2, at, 0)
    assert ranks[0]["said"] == ranks[1]["said"]
    assert "position: rank 0 has " in ranks[0]["said"]
    assert "call exclude, skip, reshard and reweight on every rank at the same step" in ranks[0]["said"]


@slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_joins_those_that_are_in_a_loop(tmp_path: Path, workers: int) -> None:
    ranks = [rank["came"] for rank in run_ranks(distributed_tasks.joined, tmp_path, 3, workers)]
    assert [len(came) for came in ranks] == [8, 8, 4]
    assert sorted(sample for came in ranks for batch in came for sample in batch) == list(range(60))


@slow
def test_other_shards_are_an_error_on_every_rank(folder: str, tmp_path: Path) -> None:
    for rank in run(tmp_path / "run", [folder, made(tmp_path / "other", 1)], [{}, {}]):
        assert "shards: rank 0 has " in rank["said"]
        assert rank["came"] == []


@slow
@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([{"a": 1, "b": 2}, {"c": 2, "a": 1}], "(b: rank 0 has 2, rank 1 has none; c: rank 0 has none, rank 1 has 2)"),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], ""),
    ],
)
def test_what_differs_is_named(tmp_path: Path, plans: list[dict[str, Any]], message: str) -> None:
    assert all(
        message in said and bool(said) == bool(message)
        for said in run_ranks(distributed_tasks.compared, tmp_path, 2, plans)
    )


def test_a_process_alone_agrees_with_itself() -> None:
    compare_plans({"epoch": 0}, "train", 1)
    assert on_one_rank(lambda: 5) == 5


@pytest.mark.slow
@slow
@pytest.mark.parametrize(("data_parallel", "tensor_parallel"), [(1, 2), (2, 2)])
def test_tensor_parallel_ranks_get_the_same_batches(
    folder: str, tmp_path: Path, data_parallel: int, tensor_parallel: int
) -> None:
    world = data_parallel * tensor_parallel
    seen = run_ranks(distributed_tasks.tensor_parallel, tmp_path, world, folder, data_parallel, tensor_parallel)
    for group in range(data_parallel):
        same = seen[group * tensor_parallel : (group + 1) * tensor_parallel]
        assert all(rank == same[0] for rank in same)
    for split in ("train", "val"):
        came = [key for rank in seen[::tensor_parallel] for key in flat(rank[split])]
        assert sorted(came) == sorted(KEYS * 2)  # of two epochs


@slow
def test_a_look_of_one_rank_waits_for_no_other(folder: str, tmp_path: Path) -> None:
    came = run_ranks(distributed_tasks.looked_at, tmp_path, 2, folder)
    for epoch in (slice(0, 5), slice(5, 10)):
        assert sorted(key for rank in came for key in flat(rank[epoch])) == KEYS


@pytest.mark.slow
@slow
@pytest.mark.parametrize("kind", ["indexed", "sized", "stream"])
def test_looks_of_one_rank_before_in_and_after_a_fit(tmp_path: Path, kind: str) -> None:
    ranks = run_ranks(distributed_tasks.looks_of_one_rank, tmp_path, 2, made(tmp_path / "shards"), kind)
    sanity = 1
    for name, begin, epochs in (("train", 0, 2), ("val", sanity, 2), ("validated", 0, 1), ("outputs", 0, 1)):
        assert [len(rank[name]) for rank in ranks] == [begin + 5 * epochs] * 2
        for at in range(begin, begin + 5 * epochs, 5):
            assert sorted(key for rank in ranks for key in flat(rank[name][at : at + 5])) == KEYS
    if kind != "stream":
        assert ranks[0]["predicted"] == ranks[1]["predicted"] == [[key, key] for key in KEYS]


@slow
def test_looks_of_one_rank_in_a_loop(folder: str, tmp_path: Path) -> None:
    ranks = run_ranks(distributed_tasks.looks_in_a_loop, tmp_path, 2, folder)
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(key for rank in ranks for key in flat(rank["came"][epoch])) == KEYS
    assert [rank["steps"] for rank in ranks] == [[1, 2, 3, 4] * 2] * 2


@slow
@pytest.mark.parametrize("threaded", [False, True])
def test_plans_that_differ_are_an_error_in_a_loop_that_talks_in_each_step(
    folder: str, tmp_path: Path, threaded: bool
) -> None:
    ranks = run_ranks(distributed_tasks.differing, tmp_path, 2, folder, threaded)
    assert ranks[0]["said"] == ranks[1]["said"]
    message = "steps done: rank 0 has 0, rank 1 has 4" if threaded else "epoch: rank 0 has 0, rank 1 has 1"
    assert message in ranks[0]["said"][0]
    assert [rank["came"] for rank in ranks] == [0 if threaded else 1] * 2


@slow
@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_validation_data_that_differs_is_an_error_on_every_rank(folder: str, tmp_path: Path, kind: str) -> None:
    said = run_ranks(distributed_tasks.validated, tmp_path / "run", 2, [folder, made(tmp_path / "other", 1)], kind)
    assert said[0] == said[1]
    assert "the ranks differ in what the val loader is to deliver" in said[0]


@slow
@pytest.mark.parametrize("seeds", [[1, 1], [1, 2]])
def test_ranks_of_a_mesh_talk_to_one_another_alone(folder: str, tmp_path: Path, seeds: list[int]) -> None:
    ranks = run_ranks(distributed_tasks.one_of_each_model, tmp_path, 4, folder, seeds)
    reading = ranks[::2]
    assert [rank["came"] for rank in ranks[1::2]] == [[], []]
    if seeds[0] == seeds[1]:
        for epoch in (slice(0, 4), slice(4, 8)):
            assert sorted(key for rank in reading for key in flat(rank["came"][epoch])) == KEYS
    else:
        assert all("order and batches: rank 0 has" in rank["said"] for rank in reading)


@slow
def test_a_rank_that_waits_says_for_what(folder: str, tmp_path: Path) -> None:
    said = run_ranks(distributed_tasks.late, tmp_path, 2, folder, str(tmp_path / "begun"))
    assert said[1] == []
    message = "rank 0 has waited 0.2 s for the other ranks to begin epoch 3 of the train loader: "
    assert said[0] == [message + "iterate it on every rank, or take one batch at most where one rank looks at it"]


@slow
@pytest.mark.parametrize("by_size", [False, True])
def test_a_loader_that_was_made_before_the_process_group(folder: str, tmp_path: Path, by_size: bool) -> None:
    seen = run_ranks(distributed_tasks.early_loader, tmp_path, 2, folder, by_size)
    assert len(seen[0]) == len(seen[1]) > 1
    came = [key for rank in seen for key in flat(rank)]
    assert len(set(came)) == len(came)
    assert by_size or sorted(came) == KEYS


@slow
@pytest.mark.parametrize("kind", ["instance", "function", "without a state"])
def test_a_length_that_was_asked_for_before_the_process_group(tmp_path: Path, kind: str) -> None:
    ranks = run_ranks(distributed_tasks.asked_early, tmp_path, 2, kind)
    for came in ("came", "read"):
        for begin in range(0, len(ranks[0][came]), 7):
            epoch = [number for rank in ranks for batch in rank[came][begin : begin + 7] for number in batch]
            assert sorted(epoch) == list(range(distributed_tasks.COUNT))
    assert [len(rank["came"]) for rank in ranks] == [14, 14]


@slow
@pytest.mark.parametrize("place", ["a list of tars", "a read-only folder"])
def test_sizes_of_a_function_are_evaluated_by_one_rank(tmp_path: Path, place: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        shards: Any = made(Path(name) / "shards")
        log = Path(name) / "log"
        log.touch()
        for path, mode in ((Path(name), 0o755), (Path(shards), 0o555), (log, 0o666)):
            path.chmod(mode)
        if place == "a list of tars":
            shards = sorted(map(str, Path(shards).glob("*.tar")))
        seen = run_ranks(distributed_tasks.sized, tmp_path, 2, shards, str(log))
        assert len(log.read_text()) == COUNT
    assert [rank["warned"] for rank in seen] == [["SizesInMemoryWarning"], []]
    assert len(seen[0]["came"]) == len(seen[1]["came"]) > 1
    came = [key for rank in seen for key in flat(rank["came"])]
    assert len(set(came)) == len(came)


@pytest.mark.slow
@slow
def test_workers_are_forked_beside_the_threads_of_a_process_group(folder: str, tmp_path: Path) -> None:
    assert run_ranks(distributed_tasks.forked_beside_gloo, tmp_path, 2, folder, 5) == [50, 50]
