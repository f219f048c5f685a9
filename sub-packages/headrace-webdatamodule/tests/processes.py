"""Runs a function on several ranks that find one another over gloo, each in a process of its own.

The processes are forked from a server that has imported torch and Lightning already, which saves seconds for each.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["distributed_tasks", "map_training", "shard_server", "stream_training"])
# The server does not take over this process's sys.path before Python 3.13.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
LIMIT = 120.0  # seconds, far below gloo's own half hour


class Meeting:
    """Where ranks meet: a store of this process, at a port that the system gives; keep it until they have ended.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not listed
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store, as it does under torchrun
            "WORLD_SIZE": str(world),
        } | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def _run(task: Callable[..., Any], out: str, env: dict[str, str], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    os.environ.update(env)
    stacks = os.open(f"{out}.stacks", os.O_WRONLY | os.O_CREAT)  # of a rank that hangs
    faulthandler.dump_traceback_later(LIMIT - 15, file=stacks)
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    result: dict[str, Any] = {}
    try:
        result["value"] = task(int(env["RANK"]), *arguments)
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["trace"] = traceback.format_exc()
    Path(out).write_text(json.dumps(result))
    if dist.is_available() and dist.is_initialized():
        # gloo's threads race with the end of the interpreter, which may abort, and with torch 2.6 destroy_process_group
        # may wait for them for ever: they wait for the GIL that it holds. So neither is asked.
        dist.barrier()
        os._exit(0)


def run_ranks(task: Callable[..., Any], folder: Path, world: int, *arguments: Any) -> list[Any]:
    """Call `task(rank, *arguments)` on each rank; returns the results, which are JSON, or raises what a rank raised."""
    results = outcomes(task, folder, world, *arguments)
    for rank, result in enumerate(results):
        assert "error" not in result, f"rank {rank}: {result['trace']}"
    return [result["value"] for result in results]


def outcomes(task: Callable[..., Any], folder: Path, world: int, *arguments: Any) -> list[dict[str, Any]]:
    """The same; {"value": ...} or {"error": ...} of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = Meeting(world)
    shared = {**meeting.environment, "OMP_NUM_THREADS": "1"}
    files = [folder / f"{rank}.json" for rank in range(world)]
    ranks = [
        SERVER.Process(
            target=_run,
            args=(
                task,
                str(file),
                {**shared, "NODE_RANK": str(rank), "RANK": str(rank), "LOCAL_RANK": "0"},
                arguments,
            ),
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT)
        codes = [process.exitcode for process in ranks]
        said = [file.read_text() for file in sorted(folder.glob("*.json*"))]
        assert codes == [0] * world, f"the ranks ended with {codes}; what they said and where they hung: {said}"
    finally:
        for process in ranks:
            if process.pid is not None and process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
    return [dict(json.loads(file.read_text())) for file in files]
