"""The tutorial, as a reader follows it: files are saved, commands are run, and the run is killed."""

from pathlib import Path

import pytest
from pages import DOCS, block, run

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


def test_a_fasta_file_is_trained_on_killed_and_resumed(folder: Path) -> None:
    assert "102 steps, 3 epochs of 1000 proteins: 0 lost, 0 repeated" in run(PAGE, "run: killed", folder)


@pytest.mark.nightly  # test_kill_ddp.py proves more of it
def test_it_is_resumed_on_fewer_processes(folder: Path) -> None:
    assert "82 steps, 3 epochs of 1000 proteins: 0 lost, 0 repeated" in run(PAGE, "run: fewer", folder)
