"""What waits for a GPU, ci/gpu: it runs without one as far as it can, with what such a machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "gpu"
MISSING = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("obstore", "sybil", "torchdata", "webdataset"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_the_tests_and_every_part_of_the_benchmark_run_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    result = subprocess.run(
        [SCRIPT, "--dry", "--out", tmp_path],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "11 skipped" in result.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["left out"] == {}
    assert all("error" not in part for part in found["parts"].values())
    assert len(found["parts"]) == 7
    assert all(reached is not None for reached in found["goals"].values())
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
