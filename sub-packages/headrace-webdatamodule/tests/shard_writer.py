"""Writes shards in a process of its own, for tests that kill it, starve it or look at what it says."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headrace.webdatamodule import Manifest, write_shards


class Made:
    """Samples that are made when they are asked for, and maybe are trouble."""

    def __init__(self, count: int, nbytes: int, delay: float, trouble: dict[int, str]) -> None:
        self.count, self.nbytes, self.delay, self.trouble = count, nbytes, delay, trouble

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[str, dict[str, bytes]]:
        time.sleep(self.delay)
        if self.trouble.get(number) == "raise":
            raise RuntimeError("no such luck")
        if self.trouble.get(number) == "exit":
            os._exit(9)
        if self.trouble.get(number) == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble.get(number) == "eio":
            with Path("/proc/self/mem").open("rb") as memory:  # nothing is mapped at 0: a real EIO
                memory.read(1)
        if self.trouble.get(number) == "hog":
            limit_files(-1)  # not even for what takes the place of a file that was closed
        if self.trouble.get(number) == "unpicklable error":
            raise OddError(1, 2)
        return f"sample{number:05d}", {"bin": number.to_bytes(4, "little") * (self.nbytes // 4), "txt": b"%d" % number}


class OddError(Exception):
    """Cannot be made again from its arguments, and so cannot be received from another process."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


def limit_files(more: int) -> None:
    there = len(list(Path("/proc/self/fd").iterdir())) - 1  # one was open to count them
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def write(directory: str, options: dict[str, Any]) -> Manifest:
    samples: Any = Made(
        options.get("count", 100),
        options.get("nbytes", 1000),
        options.get("delay", 0.0),
        {int(number): what for number, what in options.get("trouble", {}).items()},
    )
    packs = options.get("bytes_per_pack")
    if options.get("stream"):
        made = (samples[number] for number in range(len(samples)))
        return write_shards(made, directory, samples_per_shard=25, fingerprint="1", bytes_per_pack=packs)
    shards = {"n_shards": options.get("n_shards", 4), "workers": options.get("workers", 1), "bytes_per_pack": packs}
    return write_shards(samples, directory, **shards, fingerprint=options.get("fingerprint", "1"))


def main(directory: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it runs behind
    if "fsize" in options:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["fsize"],) * 2)
    if "files" in options:
        limit_files(options["files"])
    print(write(directory, options).n_samples)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
