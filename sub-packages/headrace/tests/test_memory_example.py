"""The example that measures, fits, plans and trains, as a user runs it."""

import re
from pathlib import Path

import pytest
from runs import run_script

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "memory"


@pytest.mark.nightly  # the snippets of docs/how-to/memory.md are the default proof
def test_planned_batches_fit_and_waste_less(tmp_path: Path) -> None:
    words = ["--samples", "400", "--limit", "24", "--out", tmp_path / "memory.png"]
    (result,) = run_script(EXAMPLE, words, tmp_path)
    assert result.returncode == 0, result.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    safe, usual, planned = (row for row in rows if row[0].startswith(("fixed", "planned")))
    assert safe[2] == planned[2] == "0"  # out of memory
    assert int(usual[2]) > 0
    assert int(planned[1]) < int(safe[1])  # steps
    assert int(planned[3].rstrip("%")) < int(safe[3].rstrip("%"))  # padding
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_refused(tmp_path: Path) -> None:
    (result,) = run_script(EXAMPLE, ["--samples", "3"], tmp_path)
    assert result.returncode == 2
    assert "--samples: got 3, expected 100 or more" in result.stderr
