"""Replicas of torchft that are killed and join again, with its lighthouse and its manager."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.size_aware_batching import OptimizerStepBatchSampler

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "replicas" / "train.py"
SIZES = np.random.default_rng(0).integers(5, 121, 602)  # of the script
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Replicas:
    """Processes of the script, which write to one file each."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._running: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def start(self) -> None:
        with (self._folder / f"{self._started}.txt").open("wb") as output:
            command = [sys.executable, str(SCRIPT)]
            self._running.append(
                subprocess.Popen(command, env=self._environment, stdout=output, stderr=subprocess.STDOUT)
            )
        self._started += 1

    def kill(self, number: int) -> None:
        dead = self._running.pop(number)
        dead.send_signal(signal.SIGKILL)
        assert dead.wait() == -signal.SIGKILL

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def outputs(self) -> list[str]:
        return [path.read_text() for path in sorted(self._folder.glob("*.txt"))]

    def steps(self) -> dict[int, set[tuple[int, int]]]:
        """The tokens and texts of each step, as each replica saw them."""
        found: dict[int, set[tuple[int, int]]] = {}
        for output in self.outputs():
            for step, tokens, texts in re.findall(r"^step (\d+): (\d+) tokens, (\d+) texts", output, re.MULTILINE):
                found.setdefault(int(step), set()).add((int(tokens), int(texts)))
        return found

    def replicas_at_once(self) -> set[int]:
        return {int(count) for output in self.outputs() for count in re.findall(r", (\d) replicas$", output, re.M)}

    def wait_for(self, step: int) -> None:
        while max(self.steps(), default=0) < step:
            assert all(process.poll() is None for process in self._running), self.outputs()
            time.sleep(0.05)  # a poll: the test's timeout bounds it

    def wait(self) -> None:
        for process in self._running:
            assert process.wait() == 0, self.outputs()


@pytest.mark.parametrize(
    ("kills", "epochs", "workers"), [(3, 2, 0), (2, 2, 1), pytest.param(20, 9, 0, marks=pytest.mark.nightly)]
)
def test_every_step_has_its_tokens_and_nothing_is_lost_whoever_dies(
    kills: int, epochs: int, workers: int, tmp_path: Path
) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1500
    )
    port = lighthouse.address().rpartition(":")[2]
    settings = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "EPOCHS": str(epochs), "WORKERS": str(workers)}
    replicas, draw = Replicas(tmp_path, os.environ | settings | {"OMP_NUM_THREADS": "1"}), random.Random(kills)
    try:
        for _ in range(3):
            replicas.start()
        for kill in range(kills):
            replicas.wait_for(1 + (13 * epochs - 6) * (kill + 1) // (kills + 1))
            replicas.kill(draw.randrange(3))
            replicas.start()
        replicas.wait()
    finally:
        replicas.end()
        lighthouse.shutdown()
    ended = [output for output in replicas.outputs() if f"{epochs} epochs:" in output]
    assert len(ended) == 3
    assert all(f"{epochs} epochs: 0 lost, 0 repeated" in output for output in ended), ended
    found, asked = replicas.steps(), list[tuple[int, int]]()
    sampler = OptimizerStepBatchSampler(SIZES, 1000, tokens_per_step=3000, num_replicas=1, rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step in sampler.optimizer_steps(sampler):
            samples = np.concatenate([np.array(batch) for batch in step])
            asked.append((int(SIZES[samples].sum()), len(samples)))
    assert found == {number: {step} for number, step in enumerate(asked, 1)}
    assert len(replicas.replicas_at_once()) > 1
