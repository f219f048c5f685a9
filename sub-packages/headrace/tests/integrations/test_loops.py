"""Every example in `examples/loops`, with its own launcher: killed in mid-epoch, resumed, and nothing lost or repeated.

The model counts what it is trained on, and its counts are saved with its weights. So a sample counts when its step is
in a checkpoint that was resumed from, or came after it.
"""

import ast
import re
from pathlib import Path

import pytest
from launching import LOOPS, Run, run

NAMES = sorted(path.stem for path in LOOPS.glob("*.py") if path.stem != "task")
# Steps in which a run dies, counted from 1 in each run; an epoch has 40 in one process and 20 in two.
KILLS = {1: [50], 2: [8, 16]}
MANY_KILLS = {1: [8, 20, 17, 20, 11], 2: [5, 8, 7, 9, 5]}
INELASTIC = ["hf_trainer"]
ELASTIC = [name for name in NAMES if name not in INELASTIC]
# Killed and resumed on other processes again and again, by the last epoch that each run dies in.
REPEATED = ["accelerate_prepared", "accelerate_registered", "hf_trainer_elastic", "trainer_tokens"]
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


@pytest.mark.parametrize("name", ELASTIC)
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_a_run_goes_on_with_another_number_of_processes(name: str, before: int, after: int, tmp_path: Path) -> None:
    killed(name, before, tmp_path, 26 if before == 2 else 50)
    assert_exact(run(name, after, tmp_path), after)


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize(
    ("runs", "last"),
    [
        # Of each run the processes and the step it dies in; a run of its own has 40, 20, 14 or 10 steps an epoch.
        pytest.param([(2, 11)], 3, id="2-to-3"),
        pytest.param([(4, 7)], 2, id="4-to-2"),
        pytest.param([(2, 8), (3, 5), (1, 30)], 2, id="2-3-1-2", marks=pytest.mark.nightly),
    ],
)
def test_processes_come_and_go_in_one_epoch(
    name: str, runs: list[tuple[int, int]], last: int, tmp_path: Path
) -> None:
    for world, step in runs:
        killed(name, world, tmp_path, step)
    assert_exact(run(name, last, tmp_path), last)


def test_trainer_refuses_another_number_of_processes(tmp_path: Path) -> None:
    killed("hf_trainer", 2, tmp_path, 8)
    refused = run("hf_trainer", 1, tmp_path)
    assert refused.code
    assert "world_size must be 2, as in the checkpoint, got 1" in refused.output, refused.output


def test_a_trainer_with_a_prepared_loader_and_accumulated_batches_goes_on_exactly(tmp_path: Path) -> None:
    for step in (8, 23):
        killed("trainer_prepared", 2, tmp_path, step)
    assert_exact(run("trainer_prepared", 2, tmp_path), 2)


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
