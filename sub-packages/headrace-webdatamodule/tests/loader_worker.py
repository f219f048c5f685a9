"""A process of its own that loads shards, for tests that kill it or its workers."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headrace.webdatamodule import IndexedShards, ResumableLoader
from headrace.webdatamodule.loading import worker


class Trouble:
    """A transform that comes to grief with one sample, in a worker or not."""

    def __init__(self, what: str, sample: str) -> None:
        self.what, self.sample = what, sample

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == self.sample:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "stuck":
                time.sleep(600)
            if self.what == "deaf":  # as one that was forked in a bad moment
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                time.sleep(600)
            if self.what == "exit":
                os._exit(3)
            if self.what == "raise":
                raise OSError("no such luck")
        return sample


def write_down() -> None:
    """Leave a file with the number of this process as its name, which no signal can leave half written."""
    Path(json.loads(sys.argv[2])["pids"], str(os.getpid())).touch()


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


def fails(samples: list[Any]) -> Any:
    if samples[0]["__key__"] == "s08":
        raise ValueError("cannot be put together")
    return keys(samples)


def begin() -> None:
    """Have this process and all that it forks written down."""
    write_down()
    os.register_at_fork(after_in_child=write_down)


def forked(folder: str, options: dict[str, Any], out: str) -> None:
    """The same in a process that was forked from a server, which saves the seconds of its imports."""
    sys.argv[1:] = [folder, json.dumps(options)]
    with Path(out).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)
    begin()
    main(folder, options)


def main(folder: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it runs behind
    if start := options.get("start"):
        multiprocessing.set_start_method(start)
    worker.GRACE = options.get("grace", worker.GRACE)
    trouble = Trouble(options.get("what", ""), "s09")
    loader = ResumableLoader(
        IndexedShards(folder, transform=trouble),
        [[i, i + 1] for i in range(0, 20, 2)],
        collate_fn=fails if options.get("what") == "collate" else keys,
        num_workers=options.get("workers", 2),
        timeout=options.get("timeout", 60),
    )
    told: dict[str, Any] = {"came": []}
    try:
        for batch in loader:
            told["came"].append(batch)
            if len(told["came"]) == options.get("stop"):
                break
            if len(told["came"]) == options.get("pause"):
                print("ready", flush=True)
                time.sleep(600)
    except Exception as error:
        if not hasattr(error, "__notes__"):
            loader._explain_if_own(error)  # that a worker was killed may interrupt the loop between two batches
        told |= {"kind": type(error).__name__, "said": str(error), "notes": getattr(error, "__notes__", [])}
        told["again"] = loader.state_dict()["steps"]
    if not options.get("leave"):
        loader.close()
        told["left"] = [child.pid for child in multiprocessing.active_children()]
    print(json.dumps(told), flush=True)


if __name__ in ("__main__", "__mp_main__"):  # the latter in what is spawned
    begin()
if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
