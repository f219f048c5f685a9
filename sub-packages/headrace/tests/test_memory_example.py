"""The example that measures, fits, plans and trains, as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "memory"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *words], text=True, capture_output=True, check=False)


@pytest.mark.nightly  # the snippets of docs/how-to/memory.md are the default proof
def test_planned_batches_fit_and_waste_less(tmp_path: Path) -> None:
    result = run("--samples", "400", "--limit", "24", "--out", str(tmp_path / "memory.png"))
    assert result.returncode == 0, result.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    safe, usual, planned = (row for row in rows if row[0].startswith(("fixed", "planned")))
    assert safe[2] == planned[2] == "0"  # out of memory
    assert int(usual[2]) > 0
    assert int(planned[1]) < int(safe[1])  # steps
    assert int(planned[3].rstrip("%")) < int(safe[3].rstrip("%"))  # padding
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_refused() -> None:
    result = run("--samples", "3")
    assert result.returncode == 2
    assert "--samples: got 3, expected 100 or more" in result.stderr
