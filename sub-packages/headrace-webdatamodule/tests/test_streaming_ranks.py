"""Two processes, gloo, Lightning: equal steps on all ranks, and a fit that resumes after a kill."""

import json
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import stream_training
from processes import SERVER, Meeting
from stream_training import EPOCHS, STEPS, N
from streams import flat, loader, write

from headrace.webdatamodule import index_shards

pytestmark = pytest.mark.slow


def apart(errors: Path, *arguments: Any) -> None:
    """Runs in the new process: a process group of its own, stderr in a file, and workers as users start them."""
    os.setsid()
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    stream_training.main(*arguments)


def run(folder: Path, name: str, *more: Any) -> tuple[list[int | None], list[str]]:
    """Exit codes and messages of two ranks; when one of them fails, the other is not waited for."""
    meeting = Meeting(2)
    ranks: list[BaseProcess] = [
        SERVER.Process(target=apart, args=(folder / f"{rank}.err", rank, meeting.environment, folder, name, *more))
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            rank.start()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            ranks[0].join(0.05)
    finally:
        for rank in ranks:
            if rank.pid is not None and rank.is_alive():
                os.killpg(rank.pid, signal.SIGKILL)
            rank.join()
    return [rank.exitcode for rank in ranks], [(folder / f"{rank}.err").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 samples for one rank and 6 for the other, if they share shards."""
    folder = tmp_path_factory.mktemp("ranks")
    index_shards(write(folder / "indexed", [6, 6, 6]))
    write(folder / "plain", [6, 6, 6])
    return folder


@pytest.fixture(scope="module")
def fits(folder: Path) -> list[dict[str, Any]]:
    """What each rank noted of its fits."""
    codes, errors = run(folder, "several")
    assert codes == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def epochs(batches: list[list[int]]) -> list[list[int]]:
    return [flat(batches[i : i + STEPS]) for i in range(0, EPOCHS * STEPS, STEPS)]


@pytest.mark.parametrize("name", ["early", "indexed", "given"])
def test_ranks_share_the_samples(fits: list[dict[str, Any]], name: str) -> None:
    """Also of a module that made its loader before there was a process group, and ranks that were given."""
    seen = [epochs(rank[name]["train"]) for rank in fits]
    assert [sorted(one + other) for one, other in zip(*seen, strict=True)] == [list(range(N))] * EPOCHS
    assert [len(rank[name]["train"]) for rank in fits] == [EPOCHS * STEPS] * 2
    assert set(seen[0][0]) != set(seen[0][1])  # in each epoch other ones
    assert [rank[name]["warned"] for rank in fits] == [[], []]
    val = [epochs(rank[name]["val"]) for rank in fits]
    assert all(first == second for first, second in val)  # validation has the same order every time
    assert sorted(val[0][0] + val[1][0]) == list(range(N))


@pytest.mark.parametrize("name", ["tensor parallel", "mesh"])
def test_ranks_of_one_data_parallel_group_get_the_same_batches(fits: list[dict[str, Any]], name: str) -> None:
    for split in ("train", "val"):
        one, other = (rank[name][split] for rank in fits)
        assert one == other
        assert sorted(flat(one[: len(one) // EPOCHS])) == list(range(N))


def test_uneven_shards_give_equal_steps_and_warnings(fits: list[dict[str, Any]]) -> None:
    for split in ("train", "val"):
        batches = [rank["by shards"][split] for rank in fits]
        assert [len(one) for one in batches] == [EPOCHS * STEPS] * 2
        assert [len(flat(one[:STEPS])) for one in batches] == [2 * STEPS] * 2
    remain, dry = (sorted(rank["by shards"]["warned"]) for rank in fits)
    expected = ((remain, "samples remain after the 5 batches"), (dry, "ran out after 6 samples in 3 batches"))
    for messages, word in expected:
        assert [message.partition(":")[0] for message in messages] == ["train", "val"]
        assert all(word in message for message in messages)
    assert all("read again, so samples repeat" in message for message in dry)


def test_ranks_that_differ_all_raise(fits: list[dict[str, Any]]) -> None:
    """Without the check they would train, each on an order of its own, and read some samples twice."""
    for rank in fits:
        assert rank["differ"].startswith("RankMismatchError")
        assert "seed: rank 0 has 0, rank 1 has 1" in rank["differ"]


def test_a_rank_that_is_killed(folder: Path, fits: list[dict[str, Any]]) -> None:
    whole = [rank["indexed"]["train"] for rank in fits]
    codes, _ = run(folder, "killed", 7)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    codes, errors = run(folder, "resumed", -1, str(folder / "step7.ckpt"))
    assert codes == [0, 0], errors
    for rank in range(2):
        killed, resumed = (
            [json.loads(line) for line in (folder / f"{name}{rank}.jsonl").read_text().splitlines()]
            for name in ("killed", "resumed")
        )
        assert [samples for step, samples in killed if step < 7] + [samples for _, samples in resumed] == whole[rank]


def test_ranks_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun sets them, before there is a process group."""
    write(tmp_path, [2, 2])
    made = loader(tmp_path, 4, 1, 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert flat(made) == [2, 3]
