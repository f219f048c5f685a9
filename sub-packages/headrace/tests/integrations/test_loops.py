"""Every example in `examples/loops`, with its own launcher: killed in mid-epoch, resumed, and nothing lost or repeated.

The model counts what it is trained on, and its counts are saved with its weights. So a sample counts when its step is
in a checkpoint that was resumed from, or came after it.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import LOOPS, Run, run

NAMES = sorted(path.stem for path in LOOPS.glob("*.py") if path.stem != "task")
# Steps in which a run dies, counted from 1 in each run; an epoch has 40 in one process and 20 in two.
KILLS = {1: [50], 2: [8, 16]}
MANY_KILLS = {1: [8, 20, 17, 20, 11], 2: [5, 8, 7, 9, 5]}
REPEATED = ["accelerate_prepared", "accelerate_registered", "hf_trainer", "hf_trainer_elastic"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def killed(name: str, world: int, folder: Path, step: int, workers: int = 0) -> None:
    dead = run(name, world, folder, step, workers)
    assert dead.code, dead.output
    assert re.search(r"SIGKILL|exitcode *: -9", dead.output), dead.output
    assert "samples:" not in dead.output


def assert_exact(last: Run, world: int) -> None:
    assert last.code == 0, last.output
    assert "2 epochs of 602 samples: 0 lost, 0 repeated" in last.output, last.output
    # No sample came a second time before all others had come once: each epoch was whole by itself.
    assert f"most ahead: 1, total: 1204, processes: {world}" in last.output, last.output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "kills", [pytest.param(KILLS, id="killed"), pytest.param(MANY_KILLS, id="five-times", marks=pytest.mark.nightly)]
)
def test_a_killed_run_goes_on_exactly(name: str, world: int, kills: dict[int, list[int]], tmp_path: Path) -> None:
    for step in kills[world]:
        killed(name, world, tmp_path, step)
    assert_exact(run(name, world, tmp_path), world)


@pytest.mark.parametrize("name", NAMES)
def test_what_workers_have_read_ahead_is_not_lost(name: str, tmp_path: Path) -> None:
    killed(name, 1, tmp_path, 50, workers=2)
    assert_exact(run(name, 1, tmp_path, workers=2), 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_a_run_goes_on_with_another_number_of_processes(name: str, before: int, after: int, tmp_path: Path) -> None:
    killed(name, before, tmp_path, 26 if before == 2 else 50)
    assert_exact(run(name, after, tmp_path), after)


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize(
    ("runs", "last"),
    [
        # The processes of each run, and the step it dies in. In 1, 2, 3, 4 processes an epoch has 40, 20, 14, 10 steps.
        pytest.param([(2, 11)], 3, id="2-to-3"),
        pytest.param([(4, 7)], 2, id="4-to-2"),
        pytest.param([(2, 8), (3, 5), (1, 30)], 2, id="2-3-1-2", marks=pytest.mark.nightly),
    ],
)
def test_processes_come_and_go_in_one_epoch(name: str, runs: list[tuple[int, int]], last: int, tmp_path: Path) -> None:
    for world, step in runs:
        killed(name, world, tmp_path, step)
    assert_exact(run(name, last, tmp_path), last)


def numbers(folder: Path) -> dict[int, tuple[Any, ...]]:
    """Epoch, max_steps, steps of the schedule and learning rate in the checkpoints of a Trainer, by global_step."""
    found = {}
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        state = json.loads((path / "trainer_state.json").read_text())
        schedule = torch.load(path / "scheduler.pt", weights_only=True)
        found[state["global_step"]] = (
            state["epoch"],
            state["max_steps"],
            schedule["last_epoch"],
            schedule["_last_lr"][0],
        )
    return dict(sorted(found.items()))


@pytest.mark.parametrize("name", ["hf_trainer", "hf_trainer_elastic"])
def test_a_trainer_counts_the_steps_that_were_done_and_the_epochs_of_the_data(name: str, tmp_path: Path) -> None:
    killed(name, 2, tmp_path, 11)
    before = numbers(tmp_path)
    assert list(before) == [3, 6, 9]
    assert before[9] == (pytest.approx(9 / 20), 40, 9, pytest.approx(5e-5 * 31 / 40))
    assert_exact(run(name, 1, tmp_path), 1)
    after = numbers(tmp_path)
    assert list(after) == [*range(3, 71, 3), 71]  # 9 in two processes, 22 for the rest of that epoch in one, and 40
    assert after[12][1:] == (71, 12, pytest.approx(5e-5 * 59 / 71))  # the schedule goes on over 71 steps
    assert after[12][0] == pytest.approx(9 / 20 + 3 / 40)  # epochs are shares of the data
    assert [epoch for epoch, *_ in after.values()] == sorted(epoch for epoch, *_ in after.values())
    assert after[30][0] < 1 < after[33][0] == pytest.approx(1 + 2 / 40)
    assert after[71] == (2, 71, 71, 0)
    again = run(name, 1, tmp_path)  # a run that has ended trains on nothing
    assert_exact(again, 1)
    assert list(numbers(tmp_path)) == list(after)


def test_the_steps_of_a_trainer_stay_the_same_where_more_batches_are_accumulated_on_fewer_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCUMULATE", "3")
    killed("trainer_accumulating", 2, tmp_path, 23)  # in step 8, the first of the second epoch
    monkeypatch.setenv("ACCUMULATE", "6")
    assert_exact(run("trainer_accumulating", 1, tmp_path), 1)
    found = numbers(tmp_path)
    assert list(found) == [3, 6, 9, 12, 14]
    for step, (epoch, *rest) in found.items():
        assert [epoch, *rest] == [pytest.approx(step / 7), 14, step, pytest.approx(5e-5 * (14 - step) / 14)]


def test_a_trainer_goes_on_with_other_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for world, accumulate, step in ((2, 3, 14), (1, 2, 15), (2, 1, 5)):
        monkeypatch.setenv("ACCUMULATE", str(accumulate))
        killed("trainer_accumulating", world, tmp_path, step)
    monkeypatch.setenv("ACCUMULATE", "4")
    assert_exact(run("trainer_accumulating", 1, tmp_path), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_of_grain_goes_on_with_another_number_of_processes(workers: int, tmp_path: Path) -> None:
    killed("grain_direct", 2, tmp_path, 26, workers)
    killed("grain_direct", 1, tmp_path, 10, 2 - workers)
    assert_exact(run("grain_direct", 2, tmp_path, workers=workers), 2)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_at_most_twenty_lines(name: str) -> None:
    text = (LOOPS / f"{name}.py").read_text()
    tree = ast.parse(text)
    left_out = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    left_out += [node.body[0] for node in documented if ast.get_docstring(node)]  # type: ignore[misc]  # docstrings
    without = {line for node in left_out for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line for number, line in enumerate(text.splitlines(), 1) if line.strip() and number not in without]
    assert len(lines) <= 20, f"{name} has {len(lines)}"
