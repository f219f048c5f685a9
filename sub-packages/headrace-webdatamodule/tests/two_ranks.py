"""Starts the two ranks of a test as processes that find one another over gloo."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent


def started(worker: str, words_of: Callable[[int], Sequence[str]]) -> list[subprocess.Popen[str]]:
    """Both ranks, with their errors on pipes.

    Args:
        worker: Name of a script in this folder.
        words_of: Arguments of a rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))  # none that the system gives out
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), *words_of(rank)],
            env={**os.environ, **meeting, **interface, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)},
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
