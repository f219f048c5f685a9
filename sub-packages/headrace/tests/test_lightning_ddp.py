"""The mixture and the batches together under a real Lightning Trainer, on two real processes."""

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

WORKER = Path(__file__).with_name("ddp_worker.py")
WORLD, EPOCHS = 2, 6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_ranks_train_on_the_exact_mixture_in_equal_steps(tmp_path: Path) -> None:
    port, outs = free_port(), [tmp_path / f"rank{rank}.json" for rank in range(WORLD)]
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(WORLD), str(port), str(out)])
        for rank, out in enumerate(outs)
    ]
    try:
        assert [process.wait(timeout=200) for process in ranks] == [0] * WORLD
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    seen = [json.loads(out.read_text()) for out in outs]
    epochs = [Counter(i for rank in seen for batch in rank[epoch] for i in batch) for epoch in range(EPOCHS)]
    for epoch, drawn in enumerate(epochs):
        assert len({len(rank[epoch]) for rank in seen}) == 1
        # Half of the first 300, each once; all of the last 100, each twice.
        assert sum(count for index, count in drawn.items() if index < 300) == 150
        assert all(drawn[index] == 2 for index in range(300, 400))
    # Lightning set the epoch: the second one draws what the first did not.
    for first, second in zip(epochs[::2], epochs[1::2], strict=True):
        assert sorted(i for drawn in (first, second) for i in drawn if i < 300) == list(range(300))
    assert seen[0][0] != seen[0][1]
    # The numbers of batches differ, and nothing was left out nevertheless.
    assert len({len(batches) for batches in seen[0]}) > 1
