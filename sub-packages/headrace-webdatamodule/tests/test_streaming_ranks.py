"""Two processes, gloo, Lightning's DDP: equal shares of uneven shards, and a fit that goes on after a kill."""

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from two_ranks import started

from headrace.webdatamodule import index_shards, write_tars

pytestmark = pytest.mark.slow

Row = tuple[int, int, list[int]]  # epoch, step, samples


def launch(
    folder: Path, n: int, workers: int, kill_at: int = -1, ckpt: str = "", differ: str = ""
) -> list[subprocess.Popen[str]]:
    return started("stream_rank.py", lambda rank: (str(folder), str(n), str(workers), str(kill_at), ckpt, differ))


def finish(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes and messages; when one rank was killed, the other is not waited for."""
    try:
        end = time.monotonic() + 200
        while ranks[1].poll() is None and not ranks[0].poll() and time.monotonic() < end:
            time.sleep(0.1)
        if ranks[1].poll():
            ranks[0].kill()
        elif ranks[0].poll():
            ranks[1].kill()  # which would wait for it
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to those that have ended
    return [rank.returncode for rank in ranks], errors


def notes(folder: Path, name: str) -> list[list[Row]]:
    return [[json.loads(line) for line in (folder / f"{name}{r}.jsonl").read_text().splitlines()] for r in range(2)]


def counted(ranks: list[list[Row]], epoch: int) -> Counter[int]:
    return Counter(sample for rank in ranks for at, _, samples in rank if at == epoch for sample in samples)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_rank_that_is_killed(tmp_path: Path, workers: int) -> None:
    n, steps = 18, 5
    every: Any = [(f"s{i}", {"json": b"%d" % i}) for i in range(n)]
    write_tars(every, tmp_path, n_shards=3)  # 12 samples for one rank and 6 for the other, if they shared shards
    index_shards(tmp_path)

    assert finish(launch(tmp_path, n, workers))[0] == [0, 0]
    whole = notes(tmp_path, "whole")
    assert [len(rank) for rank in whole] == [2 * steps, 2 * steps]
    assert [counted(whole, epoch) for epoch in range(2)] == [Counter(range(n))] * 2
    assert {tuple(samples) for _, _, samples in whole[0][:steps]} != {tuple(s) for _, _, s in whole[0][steps:]}

    codes, _ = finish(launch(tmp_path, n, workers, kill_at=7))
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    codes, errors = finish(launch(tmp_path, n, workers, ckpt=str(tmp_path / "step7.ckpt")))
    assert codes == [0, 0], errors
    killed, resumed = notes(tmp_path, "killed"), notes(tmp_path, "resumed")
    for rank in range(2):
        before = [row for row in killed[rank] if row[1] < 7]
        assert before + resumed[rank] == whole[rank]


def test_ranks_that_differ_all_end(tmp_path: Path) -> None:
    """Without the check they would train, each on an order of its own, and read some samples twice."""
    write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(18)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    ranks = launch(tmp_path, 18, 0, differ="yes")
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode != 0 for rank in ranks] == [True, True]
    assert all("DifferentPlanError" in error for error in errors), errors
    assert all("seed: rank 0 has 0, rank 1 has 1" in error for error in errors), errors
