"""Runs an example, with a model that kills the process in a step: `runner.py SCRIPT ARGUMENT...`.

DIE_AT: number of the step, counted from 1 in this process, in which the last rank kills itself. All ranks have come to
that step by then, so that what was to be saved before it has been saved.
"""

import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

script = Path(sys.argv[1])
sys.argv = sys.argv[1:]
sys.path[:0] = [str(script.parent), str(Path(__file__).parents[2] / "examples" / "loops")]

import task  # type: ignore[import-not-found]  # noqa: E402
import torch.distributed as dist  # noqa: E402

die_at, steps, forward = int(os.environ.get("DIE_AT", "0")), 0, task.Model.forward


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.wraps(forward)  # a Trainer reads its signature
def counting(self: Any, *arguments: Any, **words: Any) -> Any:
    global steps
    steps += 1
    result = forward(self, *arguments, **words)
    if steps == die_at and rank() == processes() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def report(self: Any) -> None:
    original(self)
    if rank() == 0:
        counts = f"most ahead: {int(self.most_ahead)}, total: {int(self.seen.sum())}, processes: {processes()}"
        print(counts, flush=True)


original = task.Model.report
task.Model.forward = counting
task.Model.report = report
runpy.run_path(str(script), run_name="__main__")
sys.stdout.flush()
os._exit(0)  # DistributedDataParallel keeps gloo's threads, which race with the end of the interpreter and may abort
