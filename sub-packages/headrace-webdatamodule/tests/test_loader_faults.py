"""Workers that die, hang or raise: the message names the sample and its shard, and no process is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import loader_worker
import pytest
from processes import SERVER

from headrace.webdatamodule import index_shards, write_tars

SCRIPT = str(Path(__file__).with_name("loader_worker.py"))
pytestmark = pytest.mark.slow


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:02d}", {"json": b"%d" % i}) for i in range(20)], folder, n_shards=4)
    index_shards(folder)
    return folder


def started(folder: Path, pids: Path, **options: Any) -> subprocess.Popen[str]:
    pids.mkdir()
    command = [sys.executable, SCRIPT, str(folder), json.dumps({"pids": str(pids), **options})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, pids: Path, **options: Any) -> dict[str, Any]:
    """What the process tells that closes its loader in the end."""
    pids.mkdir()
    out = pids.with_suffix(".out")
    process = SERVER.Process(target=loader_worker.forked, args=(str(folder), {"pids": str(pids), **options}, str(out)))
    process.start()
    try:
        process.join(120)
    finally:
        process.kill()
    assert process.exitcode == 0, out.read_text()
    assert gone(pids)
    return dict(json.loads(out.read_text().splitlines()[-1]))


def leave(folder: Path, pids: Path, **options: Any) -> dict[str, Any]:
    """The same of one that never closes it, and ends as an interpreter does."""
    with started(folder, pids, leave=True, **options) as process:
        try:
            out, err = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert gone(pids)
    return dict(json.loads(out.splitlines()[-1]))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state not in "ZX"


def gone(pids: Path) -> bool:
    """Whether all processes that were written down have ended, or do so in half a minute."""
    waiting = [int(path.name) for path in pids.iterdir()]
    assert waiting
    for _ in range(300):
        if not any(map(alive, waiting)):
            return True
        time.sleep(0.1)
    return False


def shard(folder: Path) -> str:
    return str(sorted(folder.glob("*.tar"))[1])  # of samples 5 to 9


@pytest.mark.nightly
def test_all_goes_well(folder: Path, tmp_path: Path) -> None:
    told = run(folder, tmp_path / "pids")
    assert [key for batch in told["came"] for key in batch] == [f"s{i:02d}" for i in range(20)]
    assert told["left"] == []


@pytest.mark.parametrize("what", ["kill", nightly("exit")])
def test_a_worker_that_dies_is_an_error_with_the_sample(folder: Path, tmp_path: Path, what: str) -> None:
    told = run(folder, tmp_path / "pids", what=what)
    assert told["kind"] == "RuntimeError"
    assert "DataLoader worker" in told["said"]
    assert len(told["came"]) <= 4  # what was read ahead may be lost with it
    note = told["notes"][-1]
    assert f"the train loader waited for batch {len(told['came'])} of epoch 0" in note
    waited = 2 * len(told["came"])
    assert f"sample 's{waited:02d}' in shard" in note
    assert told["again"] == len(told["came"])
    assert told["left"] == []


@pytest.mark.nightly
def test_a_worker_that_dies_at_the_first_of_its_batches_is_named(folder: Path, tmp_path: Path) -> None:
    told = run(folder, tmp_path / "pids", what="kill", workers=1)
    assert told["kind"] == "RuntimeError"
    assert "in shard" in told["notes"][-1]


@pytest.mark.nightly
def test_a_worker_that_is_stuck_is_an_error_with_the_sample(folder: Path, tmp_path: Path) -> None:
    told = run(folder, tmp_path / "pids", what="stuck", timeout=4)
    assert told["kind"] == "RuntimeError"
    assert "timed out after 4 seconds: raise timeout, " in told["said"]
    assert told["came"] == [[f"s{i:02d}", f"s{i + 1:02d}"] for i in range(0, 8, 2)]
    note = told["notes"][-1]
    assert "waited for batch 4 of epoch 0: sample 's08' in shard" in note
    assert f"sample 's09' in shard {shard(folder)!r}" in note
    assert told["left"] == []


@pytest.mark.parametrize("how", [run, nightly(leave)])
def test_a_worker_that_ignores_signals_is_killed(folder: Path, tmp_path: Path, how: Any) -> None:
    told = how(folder, tmp_path / "pids", what="deaf", grace=0.5, timeout=2)
    assert "timed out after 2 seconds" in told["said"]
    assert told.get("left", []) == []


def test_a_worker_that_ignores_signals_does_not_keep_the_process_from_ending(folder: Path, tmp_path: Path) -> None:
    leave(folder, tmp_path / "pids", what="deaf", grace=0.5, stop=3)


@pytest.mark.parametrize("workers", [nightly(0), 2])
@pytest.mark.parametrize(("what", "kind"), [("raise", "OSError"), ("collate", "ValueError")])
def test_an_exception_names_sample_and_shard(folder: Path, tmp_path: Path, what: str, kind: str, workers: int) -> None:
    told = run(folder, tmp_path / "pids", what=what, workers=workers)
    assert told["kind"] == kind
    assert len(told["came"]) == 4
    everything = "\n".join([told["said"], *told["notes"]])
    assert "'s09'" in everything
    assert repr(shard(folder)) in everything
    assert {"raise": "in transform", "collate": "in collate_fn, of 2 samples"}[what] in everything
    assert told["again"] == 4
    assert told["left"] == []


@pytest.mark.parametrize("what", ["", nightly("raise")])
def test_a_loader_that_is_never_closed_leaves_no_process(folder: Path, tmp_path: Path, what: str) -> None:
    leave(folder, tmp_path / "pids", what=what)


@pytest.mark.parametrize(
    ("signum", "start"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGKILL, "forkserver"),
        nightly(signal.SIGKILL, "fork"),
        nightly(signal.SIGKILL, "spawn"),  # its workers are children of the process, as those of fork are
        nightly(signal.SIGTERM, "spawn"),
        nightly(signal.SIGINT, "fork"),
        nightly(signal.SIGINT, "spawn"),
    ],
)
def test_a_parent_that_is_killed_leaves_no_process(folder: Path, tmp_path: Path, signum: int, start: str) -> None:
    pids = tmp_path / "pids"
    with started(folder, pids, pause=3, start=start) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(list(pids.iterdir())) >= 3  # spawning starts a process that tracks resources
            process.send_signal(signum)
            _, err = process.communicate()
        finally:
            process.kill()
    expected = (-signal.SIGINT, 130, 1) if signum == signal.SIGINT else (-signum,)
    assert process.returncode in expected, err
    assert gone(pids)
