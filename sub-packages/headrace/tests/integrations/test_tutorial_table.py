"""The tutorial from a Parquet table, which needs datasets and pyarrow."""

from pathlib import Path

import pytest
from pages import DOCS, block, run

pytest.importorskip("datasets")

PAGE = "tutorial.md"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DOCS.is_dir(), reason="the documents lie in the repository")]


def test_a_table_is_trained_on_killed_and_resumed(tmp_path: Path) -> None:
    for name in ("make_data.py", "make_table.py", "train.py"):
        (tmp_path / name).write_text(block(PAGE, name))
    run(PAGE, "run: data", tmp_path)
    run(PAGE, "run: table", tmp_path)
    assert "102 steps, 3 epochs of 1000 proteins: 0 lost, 0 repeated" in run(PAGE, "run: killed table", tmp_path)
