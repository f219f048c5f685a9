"""Starts the ranks of `resume_worker.py`, or of a script, as processes, waits for them, and reads what they have done.

The ranks are forked from a server that has imported torch and Lightning already, which saves seconds for each of them.
"""

import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import resume_worker
from in_process import Done
from meeting import Meeting

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["resume_worker"])
# The server does not take over this process's sys.path before Python 3.13.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
Step = tuple[int, int, list[str]]  # epoch, step, keys
LIMIT = 240  # seconds of a script or a rank, below the limit of a test and far below gloo's own half hour


def apart(main: Callable[..., None], errors: Path, *arguments: Any) -> None:
    """Runs in the new process: a process group of its own, stderr in a file, and workers as users start them."""
    os.setsid()
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    main(*arguments)


@contextmanager
def processes(main: Callable[..., None], folder: Path, arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Starts ``main`` with each of the arguments, and leaves none of the processes behind."""
    ranks = [
        SERVER.Process(target=apart, args=(main, folder / f"{rank}.err", *words))
        for rank, words in enumerate(arguments)
    ]
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            if process.pid is not None:
                if alive(process.pid):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()


@contextmanager
def started(
    folder: Path, world: int, per_rank: dict[int, dict[str, Any]] | None = None, **options: Any
) -> Iterator[Any]:
    """Starts all ranks of `resume_worker.py`."""
    folder.mkdir(exist_ok=True)
    place = Meeting(world)
    meeting: dict[str, Any] = {"world": world, "meeting": place.environment}
    each: list[dict[str, Any]] = [
        {"log": str(folder / f"{rank}.log"), "rank": rank} | meeting | options | (per_rank or {}).get(rank, {})
        for rank in range(world)
    ]
    with processes(resume_worker.main, folder, [(resume_worker.Options(**words),) for words in each]) as ranks:
        yield ranks


def as_script(path: str, words: Sequence[str], folder: str, environment: dict[str, str], out: str) -> None:
    """Runs in the new process what ``python path words`` would run in the folder; stdout goes to a file."""
    with Path(out).open("w") as file:
        os.dup2(file.fileno(), 1)
    # One that hangs prints where each of its threads is, and ends.
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.chdir(folder)
    os.environ |= environment
    if "PYTHONWARNINGS" in environment:  # else read when the interpreter begins
        warnings.simplefilter(environment["PYTHONWARNINGS"])  # type: ignore[arg-type]  # an action
    sys.argv = [path, *words]
    sys.path.insert(0, path if Path(path).is_dir() else str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_script(
    path: Path, words: Sequence[object], folder: Path, environments: Sequence[dict[str, str]] = ({},)
) -> list[Done]:
    """Runs a script in a folder, in one process for each of the environments, side by side."""
    outs = [folder / f"{rank}.out" for rank in range(len(environments))]
    common = (str(path), [str(word) for word in words], str(folder))
    arguments = [(*common, environment, str(out)) for environment, out in zip(environments, outs, strict=True)]
    with processes(as_script, folder, arguments) as ranks:
        codes = [exit_code(process, LIMIT + 30) for process in ranks]
    return [
        Done(-1 if code is None else code, out.read_text(), errors_of(folder, rank))
        for rank, (code, out) in enumerate(zip(codes, outs, strict=True))
    ]


def torchrun(world: int) -> tuple[Meeting, list[dict[str, str]]]:
    """The environments that torchrun gives to the ranks; keep the meeting until they have ended."""
    place = Meeting(world)
    return place, [place.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def exit_code(process: BaseProcess, timeout: float = LIMIT) -> int | None:
    """Waits for the end of a process; None if it does not come."""
    process.join(timeout)
    return process.exitcode


def run(folder: Path, world: int, **options: Any) -> list[list[Step]]:
    """Trains to the end; gives each rank's steps."""
    with started(folder, world, **options) as ranks:
        codes = [exit_code(process) for process in ranks]
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


def assert_none_left(ranks: Sequence[BaseProcess], seconds: float = 60) -> None:
    """Workers whose parent was killed notice it themselves, within seconds."""
    until = time.monotonic() + seconds
    while left := [process.pid for process in ranks if process.pid and alive(process.pid)]:
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
