"""examples/downstream, a repository that uses headrace: its own tests pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "downstream"


def test_its_own_tests_pass(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(EXAMPLE / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=EXAMPLE, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
