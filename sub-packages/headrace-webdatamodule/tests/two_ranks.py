"""Starts the two ranks of a test as processes that find one another over gloo."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from meeting import Meeting

HERE = Path(__file__).parent
_KEPT: list[Meeting] = []  # until this process ends


def started(worker: str, words_of: Callable[[int], Sequence[str]]) -> list[subprocess.Popen[str]]:
    """Both ranks, with their errors on pipes.

    Args:
        worker: Name of a script in this folder.
        words_of: Arguments of a rank.
    """
    _KEPT.append(Meeting(2))
    meeting = {**_KEPT[-1].environment, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), *words_of(rank)],
            env={**os.environ, **meeting, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(ranks: Sequence[subprocess.Popen[str]], code: int, timeout: float = 200.0) -> None:
    """Wait for both, which are to end with a code."""
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in ranks]  # far below gloo's own half hour
    finally:
        for process in ranks:
            process.kill()  # does nothing to those that have ended
    assert [process.returncode for process in ranks] == [code, code], errors
