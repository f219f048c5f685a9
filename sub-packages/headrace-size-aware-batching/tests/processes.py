"""Ranks of a real gloo group, each in a process of its own.

The processes are forked from a server that has imported torch already, which saves seconds for each.
"""

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lightning_worker", "memory_worker", "sharded_worker"])
# The server does not take over this process's sys.path before Python 3.13.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

Task = Callable[[int, int, str], Any]  # rank, world and the file where ranks meet


def run_ranks(task: Task, world: int, folder: Path) -> list[Any]:
    """Call a task on each rank; return the results, which are JSON."""
    outs = [folder / f"rank{rank}.json" for rank in range(world)]
    ranks = [
        SERVER.Process(target=_run, args=(task, rank, world, str(folder / "store"), str(out)))
        for rank, out in enumerate(outs)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(280)
        assert [process.exitcode for process in ranks] == [0] * world
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return [json.loads(out.read_text()) for out in outs]


def run_in(environment: dict[str, str], task: Callable[[], Any], folder: Path) -> Any:
    """Call a task in a process with these variables; return the result, which is JSON."""
    out = folder / "result.json"
    process = SERVER.Process(target=_run_in, args=(environment, task, str(out)))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return json.loads(out.read_text())


def _run(task: Task, rank: int, world: int, store: str, out: str) -> None:
    result = task(rank, world, store)
    dist.barrier()
    Path(out).write_text(json.dumps(result))
    dist.destroy_process_group()


def _run_in(environment: dict[str, str], task: Callable[[], Any], out: str) -> None:
    os.environ |= environment
    Path(out).write_text(json.dumps(task()))
