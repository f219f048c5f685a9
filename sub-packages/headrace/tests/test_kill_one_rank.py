"""One real process under Lightning, killed again and again at random moments, each time resumed from its checkpoint."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import Step, assert_none_left, errors_of, exit_code, last_checkpoint, run, started, steps_of
from simulated import write_source

pytestmark = pytest.mark.slow

RUNS = [(1, 2), pytest.param(2, 30, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sources")
    shards = {"a": write_source(folder / "a", "a", 300, 3), "b": write_source(folder / "b", "b", 80, 2)}
    weights = {"a": 0.5, "b": 1.5}
    told = {name: str(path) for name, path in shards.items()}
    return {"shards": told, "weights": weights, "workers": 1, "checkpoints": ""}


def wait_for(log: Path, lines: int, process: Any) -> None:
    """Until some steps are done, or the process has ended by itself."""
    until = time.monotonic() + 100
    while process.is_alive() and (not log.exists() or log.read_text().count("\n") < lines):
        assert time.monotonic() < until, "no step was done"
        time.sleep(0.02)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "kills"), RUNS)
def test_killed_at_random_moments(seed: int, kills: int, tmp_path: Path, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    (whole,) = run(tmp_path / "whole", 1, **options)
    checkpoints = tmp_path / "checkpoints"
    options = options | {"every": 1, "checkpoints": str(checkpoints), "pause": 0.01}
    trained: list[Step] = []
    for kill in range(kills + 1):
        begin, checkpoint = last_checkpoint(checkpoints)
        options["resume"], folder = checkpoint, tmp_path / str(kill)
        if kill == kills:
            (steps,) = run(folder, 1, **options)
        else:
            with started(folder, 1, **options) as (process,):
                # As many steps in each, so that the last ones are left to do.
                wait_for(folder / "0.log", rng.randint(0, 2 * len(whole) // (3 * kills)), process)
                time.sleep(rng.random() * 0.05)
                process.kill()
                assert exit_code(process) == -signal.SIGKILL, errors_of(folder, 0)
                assert_none_left([process])
            steps = steps_of(folder, 0)
        assert [step for _, step, _ in steps] == list(range(begin, begin + len(steps)))
        # What was trained on after the last checkpoint is done again: at most the step that was not over.
        assert 0 <= len(trained) - begin <= 2
        trained = trained[:begin] + steps
    assert trained == whole
