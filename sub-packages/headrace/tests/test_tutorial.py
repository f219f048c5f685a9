"""The tutorial, as a reader follows it: files are saved, commands are run, and the run is killed."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import DOCS, block, run
from runs import run_script

PAGE = "tutorial.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DOCS.is_dir(), reason="the documents lie in the repository")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("make_data.py", "train.py"):
        (tmp_path / name).write_text(block(PAGE, name))
    told = run(PAGE, "run: data", tmp_path)
    assert all(figure in told for figure in (" 34\n", "96.79%", "6.54%", "4,096\n"))
    run(PAGE, "run: fasta", tmp_path)
    return tmp_path


def forked(page: str, mark: str, folder: Path) -> str:
    """Run a block of ``NAME=value python script words``; its last command has to end well."""
    for line in block(page, mark).splitlines():
        words = shlex.split(line)
        python = words.index("python")
        environment = dict(word.split("=", 1) for word in words[:python])
        (done,) = run_script(folder / words[python + 1], words[python + 2 :], folder, [environment])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", [forked, pytest.param(run, marks=pytest.mark.nightly)])  # bash imports Lightning twice
def test_a_fasta_file_is_trained_on_killed_and_resumed(how: Callable[[str, str, Path], str], folder: Path) -> None:
    assert "102 steps, 3 epochs of 1000 proteins: 0 lost, 0 repeated" in how(PAGE, "run: killed", folder)


@pytest.mark.nightly  # test_kill_ddp.py proves more of it
def test_it_is_resumed_on_fewer_processes(folder: Path) -> None:
    assert "82 steps, 3 epochs of 1000 proteins: 0 lost, 0 repeated" in run(PAGE, "run: fewer", folder)
