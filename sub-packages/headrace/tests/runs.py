"""Starts the ranks of `resume_worker.py` as processes, waits for them, and reads what they have trained on."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("resume_worker.py")
Step = tuple[int, int, list[str]]  # epoch, step, keys


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))  # none that the system gives out
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(
    folder: Path, world: int, per_rank: dict[int, dict[str, Any]] | None = None, **options: Any
) -> Iterator[Any]:
    """Starts all ranks, each in a process group of its own, and leaves none of their processes behind."""
    folder.mkdir(exist_ok=True)
    port, ranks = free_port(), []
    for rank in range(world):
        told = {"log": str(folder / f"{rank}.log"), "rank": rank, "world": world, "port": port}
        path = folder / f"{rank}.json"
        path.write_text(json.dumps(told | options | (per_rank or {}).get(rank, {})))
        with (folder / f"{rank}.err").open("w") as errors:
            ranks.append(
                subprocess.Popen([sys.executable, str(WORKER), str(path)], stderr=errors, start_new_session=True)
            )
    try:
        yield ranks
    finally:
        for process in ranks:
            if alive(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(folder: Path, world: int, **options: Any) -> list[list[Step]]:
    """Trains to the end; gives each rank's steps."""
    with started(folder, world, **options) as ranks:
        codes = [process.wait(timeout=200) for process in ranks]
        assert codes == [0] * world, "\n".join(errors_of(folder, rank) for rank in range(world))
        assert_none_left(ranks)
    return [steps_of(folder, rank) for rank in range(world)]


def steps_of(folder: Path, rank: int) -> list[Step]:
    log = folder / f"{rank}.log"
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def errors_of(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.err").read_text()


def alive(group: int) -> bool:
    """Whether any process of a group, a loader's worker too, is there and no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False


def assert_none_left(ranks: list[subprocess.Popen[bytes]], seconds: float = 60) -> None:
    """Workers whose parent was killed notice it themselves, within seconds."""
    until = time.monotonic() + seconds
    while left := [process.pid for process in ranks if alive(process.pid)]:
        assert time.monotonic() < until, f"processes of the groups {left} are still there"
        time.sleep(0.2)


def last_checkpoint(folder: Path) -> tuple[int, str | None]:
    """The number of steps in the latest checkpoint, and its path; (0, None) when there is none."""
    found = [(int(path.stem.removeprefix("step=")), str(path)) for path in folder.glob("step=*.ckpt")]
    return max(found, default=(0, None))


def counted(steps: list[Step]) -> dict[int, Counter[str]]:
    """How often each sample came in each epoch."""
    counts: dict[int, Counter[str]] = {}
    for epoch, _, keys in steps:
        counts.setdefault(epoch, Counter()).update(keys)
    return counts
