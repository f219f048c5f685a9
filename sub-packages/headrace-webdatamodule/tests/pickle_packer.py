"""Packs pickle files in a process of its own, for tests that kill it."""

import faulthandler
import sys
import time
from pathlib import Path

from headrace.webdatamodule import PickledDataWDS, Split

_SECONDS = 120  # nobody waits longer than this, whatever happens


def pack(source: Path, target: Path, count: int) -> None:
    names = [f"sample{i}" for i in range(count)]
    data = PickledDataWDS(str(source), {Split.train: names}, "pt", {Split.train: str(target)}, 4, n_tars_wds=6)
    data.prepare_data()


def stick(name: str, folder: Path) -> None:
    """Let the file of that name never be read; say so when all other shards are there."""
    read = Path.read_bytes

    def stuck(path: Path) -> bytes:
        if path.stem == name:
            while len(list(folder.glob("*.tar.hri"))) < 5:
                time.sleep(0.01)
            print("stuck", flush=True)
            time.sleep(2 * _SECONDS)
        return read(path)

    Path.read_bytes = stuck  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    stick(sys.argv[4], Path(sys.argv[2]))
    pack(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
