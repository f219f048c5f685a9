"""Two processes, gloo, Lightning's DDP: equally many batches, whatever the shards hold."""

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.webdatamodule import write_tars

pytestmark = pytest.mark.slow


def train(folder: Path, n: int, n_shards: int, workers: int = 0) -> list[dict[str, Any]]:
    write_tars([(f"s{i}", {"json": b"%d" % i}) for i in range(n)], folder, n_shards=n_shards)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))  # none that the system gives out
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    worker = str(Path(__file__).with_name("rank_worker.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(folder), str(rank), str(n), str(workers)],
            env={**os.environ, **meeting, **interface, "NODE_RANK": "0", "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # does nothing to those that have ended
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_even_shards_give_every_sample_once(tmp_path: Path, workers: int) -> None:
    ranks = train(tmp_path, 24, 4, workers)
    assert [rank["world"] for rank in ranks] == [2, 2]
    assert [rank["said"] for rank in ranks] == [[], []]
    for split in ("train", "val"):
        assert [len(rank[split]) for rank in ranks] == [12, 12]
        for epoch in (slice(0, 6), slice(6, 12)):
            assert sorted(sample for rank in ranks for sample in flat(rank[split][epoch])) == list(range(24))
    first, second = ([sorted(flat(rank["train"][part])) for rank in ranks] for part in (slice(6), slice(6, 12)))
    assert first != second  # shards change hands between epochs


def test_uneven_shards_give_equally_many_batches_and_are_told(tmp_path: Path) -> None:
    ranks = train(tmp_path, 18, 3)  # 12 samples for one rank, 6 for the other
    for split in ("train", "val"):
        assert [len(rank[split]) for rank in ranks] == [10, 10]
        assert [len(flat(rank[split][:5])) for rank in ranks] == [10, 10]
    remain, dry = (sorted(rank["said"]) for rank in ranks)
    for said, word in ((remain, "samples remain after the 5 batches"), (dry, "ran dry after 6 samples in 3 batches")):
        assert [message.partition(":")[0] for message in said] == ["train", "val"]
        assert all(word in message for message in said)
    assert all("begun again, so samples repeat" in message for message in dry)
