"""What the packages' conftest.py promises: seeds that repeat, and hangs that end with the stacks of every process."""

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

DRAWS = """
import random
import numpy as np
import torch

def test_one():
    print("drew", random.random(), np.random.rand(), torch.rand(()).item())

test_two = test_one
"""

# The parent says when its child waits, and the timer goes off at once: no second passes by the clock.
HANGS = """
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = '''
import subprocess, sys, time
def grandchild_waits_here():
    print("ready", flush=True)  # in here, or the stack may be that of a moment before
    time.sleep(600)
def child_waits_here():
    pipe = subprocess.PIPE  # a stderr of its own: stacks are written in pieces, which would mix
    process = subprocess.Popen([sys.executable, __file__, "below"], stdout=pipe, stderr=pipe, text=True)
    print(process.stdout.readline(), end="", flush=True)
    process.wait()
if len(sys.argv) > 1:
    grandchild_waits_here()
child_waits_here()
'''

def forked_waits_here(ready):
    ready.set()
    time.sleep(600)

def test_hangs(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    ready = multiprocessing.get_context("fork").Event()
    forked = multiprocessing.get_context("fork").Process(target=forked_waits_here, args=(ready,))
    forked.start()
    child = subprocess.Popen(
        [sys.executable, tmp_path / "child.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout.readline() == b"ready\\n"
    assert ready.wait(60)
    print("processes", forked.pid, child.pid)
    os.kill(os.getpid(), signal.SIGALRM)
    child.wait()
"""


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 300\n")
    (folder / "test_it.py").write_text(code)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options],
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_every_test_draws_from_the_seed_in_the_header(seed: int, tmp_path: Path) -> None:
    result = run(tmp_path, DRAWS, *([f"--seed={seed}"] if seed else []))
    assert result.returncode == 0, result.stdout
    assert re.findall(r"^seed: (\d+)", result.stdout, re.MULTILINE) == [str(seed)]
    expected = (
        random.Random(seed).random(),
        np.random.RandomState(seed).rand(),
        torch.rand((), generator=torch.Generator().manual_seed(seed)).item(),
    )
    assert re.findall(r"^drew (.*)$", result.stdout, re.MULTILINE) == 2 * [" ".join(map(str, expected))]


@pytest.mark.slow
def test_a_hang_ends_with_the_stacks_of_all_processes(tmp_path: Path) -> None:
    result = run(tmp_path, HANGS)
    said = result.stdout + result.stderr
    assert result.returncode == 1, said
    for function in ("child_waits_here", "grandchild_waits_here", "forked_waits_here"):
        assert f"in {function}" in said
    pids = re.search(r"processes (\d+) (\d+)", said)
    assert pids, said
    for pid in pids.groups():
        assert not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text()
