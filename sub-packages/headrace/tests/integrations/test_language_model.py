"""`examples/language_model`: killed, resumed on other processes; every step is that of an unbroken run."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import HERE, Run, launch

SCRIPT = Path(__file__).parents[2] / "examples" / "language_model" / "train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(world: int, folder: Path, die_at: int = 0) -> Run:
    folder.mkdir(exist_ok=True)
    command = ["torchrun", "--standalone", f"--nproc-per-node={world}", str(HERE / "killed_trainer.py"), str(SCRIPT)]
    return launch(command, folder, {"DIE_AT": str(die_at)})


def history(folder: Path) -> dict[int, dict[str, Any]]:
    """What the Trainer logged, by step, from the last checkpoint."""
    last = max((folder / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    found: dict[int, dict[str, Any]] = {}
    for logs in json.loads((last / "trainer_state.json").read_text())["log_history"]:
        found.setdefault(logs["step"], {}).update(logs)
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unbroken")
    done = run(1, folder)
    assert done.code == 0, done.output
    return history(folder)


@pytest.mark.parametrize("worlds", [[1, 1], [2, 1], [1, 2], pytest.param([2, 1, 2, 1], marks=pytest.mark.nightly)])
def test_every_step_of_a_killed_run_is_that_of_an_unbroken_one(
    worlds: list[int], unbroken: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    """Losses and figures of the evaluation are equal but for the order of sums; so are the learning rates."""
    for world in worlds[:-1]:
        dead = run(world, tmp_path, 60 // world)
        assert dead.code, dead.output
        assert re.search(r"SIGKILL|exitcode *: -9", dead.output), dead.output
    done = run(worlds[-1], tmp_path)
    assert done.code == 0, done.output
    found = history(tmp_path)
    assert list(found) == list(unbroken) == list(range(1, len(found) + 1))
    assert sum("eval_loss" in logs for logs in found.values()) == 2  # the last checkpoint precedes the last evaluation
    for step, logs in unbroken.items():
        for name in ("loss", "learning_rate", "eval_loss", "eval_accuracy"):
            if name in logs:
                assert found[step][name] == pytest.approx(logs[name], rel=1e-3), (step, name)
    losses = [logs["loss"] for logs in found.values()]
    assert np.mean(losses[-5:]) < losses[0] - 0.5
