"""`LightningCLI` with the YAML of examples/lightning_cli: stopped in mid-epoch and resumed."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.webdatamodule import index_shards, write_tars

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_cli"
N = 100


def fit(folder: Path, *words: str) -> None:
    command = [sys.executable, "train.py", "fit", "--config", "fit.yaml", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_configuration_trains_and_resumes(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    write_tars(
        [(f"s{i:03d}", {"txt": b"x" * (1 + i * 7 % 50)}) for i in range(N)], tmp_path / "shards/train", n_shards=2
    )
    index_shards(tmp_path / "shards/train")
    fit(tmp_path, "--trainer.max_steps", "5")
    begun = (tmp_path / "keys.txt").read_text().splitlines()
    assert len(begun) == 5
    fit(tmp_path, "--ckpt_path", "checkpoints/last.ckpt")
    lines = [line.split() for line in (tmp_path / "keys.txt").read_text().splitlines()]
    # The trainer takes the epoch that max_steps ended for a whole one, and counts its rest as another.
    assert Counter(key for _, *keys in lines for key in keys) == {f"s{i:03d}": 2 for i in range(N)}
