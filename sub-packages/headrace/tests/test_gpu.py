"""The benchmark and the tests that wait for a GPU: they run without one as far as they can."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import run_script

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).resolve().parents[2]
MISSING = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("sybil", "torchdata", "webdataset"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_every_part_of_the_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    (result,) = run_script(PACKAGES / "headrace" / "benchmarks" / "gpu.py", ["--dry", "--out", tmp_path], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["left out"] == {}
    assert all("error" not in part for part in found["parts"].values())
    assert len(found["parts"]) == 7
    assert all(reached is not None for reached in found["goals"].values())
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", ["headrace", "headrace-size-aware-batching", "headrace-webdatamodule"])
def test_tests_for_a_gpu_are_collected_with_what_such_a_machine_has(package: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=PACKAGES / package,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
