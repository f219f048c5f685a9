"""Starts ranks as processes, forked from a server that has imported torch already, which saves seconds for each."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["rank_worker"])
# The server does not take over this process's sys.path before Python 3.13.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def apart(main: Callable[..., None], errors: Path, environment: dict[str, str], *arguments: Any) -> None:
    """Runs in the new process: stderr in a file."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    main(*arguments)


def run_ranks(
    main: Callable[..., None], folder: Path, environment: dict[str, str], arguments: Sequence[tuple[Any, ...]]
) -> None:
    """Run ``main`` with each of the arguments, side by side; all have to end well."""
    errors = [folder / f"{rank}.err" for rank in range(len(arguments))]
    ranks = [
        SERVER.Process(target=apart, args=(main, file, environment, *words))
        for file, words in zip(errors, arguments, strict=True)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(200)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()  # does nothing to those that have ended
                process.join()
    assert codes == [0] * len(ranks), "\n".join(file.read_text() for file in errors)
