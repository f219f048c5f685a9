"""The example that plans each step of a training on rollouts, on two ranks over gloo, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meeting import Meeting

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "steps"
LIMIT = 120  # seconds, far below gloo's own half hour
# A rank that hangs prints where each of its threads is, and ends. One that is done leaves before the interpreter ends:
# DistributedDataParallel keeps gloo's threads (torch 2.13), which race with that end and may abort.
RUN = f"""
import faulthandler, os, runpy, sys
faulthandler.dump_traceback_later({LIMIT}, exit=True)
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except SystemExit as end:
    os._exit(end.code)
"""


def ranks(world: int, *words: str) -> list[str]:
    """Run the example; return what each rank printed."""
    place = Meeting(world)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(EXAMPLE), *words],
            env={**os.environ, **place.environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=LIMIT + 30) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * world, "\n".join(errors for _, errors in printed)
    return [lines for lines, _ in printed]


@pytest.mark.parametrize(
    "world", [2, pytest.param(1, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_the_gradient_of_planned_micro_batches_is_that_of_the_whole_step(world: int) -> None:
    for rank, lines in enumerate(ranks(world)):
        steps = re.findall(r"step (\d) rank (\d): .* (\d+) micro-batches, .*, gradient (\S+) from", lines)
        assert [(int(step), int(own)) for step, own, _, _ in steps] == [(0, rank), (1, rank), (2, rank)]
        for _, _, micro_batches, apart in steps:
            assert int(micro_batches) > 1
            assert float(apart) < 1e-12
