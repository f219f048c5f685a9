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


@pytest.mark.parametrize(
    "parts",
    [["fit esm padded", "oom"], pytest.param([], marks=pytest.mark.nightly)],
    ids=["a part of each kind", "every part"],
)
def test_the_tests_and_the_parts_of_the_benchmark_run_on_the_cpu(tmp_path: Path, parts: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    result = subprocess.run(
        [SCRIPT, "--dry", "--out", tmp_path, *(["--parts", *parts] if parts else [])],
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
    assert len(found["parts"]) == (len(parts) or 7)
    reached = {name for name, figure in found["goals"].items() if figure is not None}
    assert reached == {*found["goals"]} if not parts else {"coverage", "headroom"} <= reached
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
