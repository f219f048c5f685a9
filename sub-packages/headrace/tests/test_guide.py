"""What the guide shows beyond its Python examples: a script on two ranks, and the command line."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from headrace.webdatamodule import IndexedShards, write_shards

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"
SCRIPTS = Path(sys.executable).parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not GUIDE.is_file(), reason="the guide lies in the repository")]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def script(folder: Path) -> Path:
    """The guide's script: its functions and its model, and the end that makes several ranks of it."""
    definitions = next(block for block in blocks("python") if "class Model" in block)
    definitions = definitions[: definitions.index("def train(")]
    ending = next(block for block in blocks("python") if "sys.argv" in block)
    path = folder / "several.py"
    path.write_text(f"{definitions}\n{ending}")
    return path


@pytest.mark.parametrize("start", ["python", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_the_script_trains_on_two_ranks(start: str, tmp_path: Path) -> None:
    samples = [(f"m{n:03d}", {"atoms.json": json.dumps([n % 90] * (1 + n % 60)).encode()}) for n in range(300)]
    write_shards(samples, tmp_path / "train", n_shards=3)
    words = [str(script(tmp_path)), "train", "2", "cpu"]
    starters = {
        "python": [sys.executable],
        "torchrun": [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node=2"],
    }
    done = subprocess.run(
        [*starters[start], *words], cwd=tmp_path, text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = dict(re.findall(r"steps (\d+) of rank (\d)", done.stdout)[::-1])
    assert len(re.findall(r"of rank [01]", done.stdout)) == 2
    assert len(steps) == 1, "both ranks make as many steps"


def test_the_commands_pack_an_lmdb_and_a_folder(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "structures.lmdb"), map_size=2**20) as store, store.begin(write=True) as entries:
        for number in range(30):
            entries.put(b"s%02d" % number, pickle.dumps([number]))
    (tmp_path / "pickles").mkdir()
    for number in range(20):
        (tmp_path / "pickles" / f"p{number:02d}.pkl").write_bytes(pickle.dumps([number]))
    done = subprocess.run(
        ["bash", "-euc", blocks("bash")[-1]],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"},
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^samples +30$", done.stdout, re.MULTILINE)
    assert re.search(r"^fill", done.stdout, re.MULTILINE)
    sizes = [int(line) for line in (tmp_path / "bytes.txt").read_text().splitlines()]
    assert sizes == [len(pickle.dumps([number])) for number in range(30)]
    for folder, count in (("train", 30), ("train2", 20)):
        shards = IndexedShards(tmp_path / folder)
        assert [sample["pkl"] for sample in shards] == [[number] for number in range(count)]
