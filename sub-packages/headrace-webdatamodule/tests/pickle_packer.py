"""Packs pickle files in a process of its own, for tests that kill it."""

import sys
import time
from pathlib import Path

from headrace.webdatamodule import PickledDataWDS, Split
from headrace.webdatamodule.shards.pickles import FileSamples
from headrace.webdatamodule.shards.writing.task import Pair

DELAY = 0.0


class Slow(FileSamples):
    """Takes its time, so that there is a moment to be killed in."""

    def __getitem__(self, position: int) -> Pair:
        time.sleep(DELAY)
        return super().__getitem__(position)


def main(source: str, target: str, count: int) -> None:
    names = [f"sample{i}" for i in range(count)]
    data = PickledDataWDS(source, {Split.train: names}, "pt", {Split.train: target}, 4, n_tars_wds=6)
    data.prepare_data()
    print(len(list(Path(target).glob("*.tar"))))


if __name__ == "__main__":
    if len(sys.argv) > 4:
        from headrace.webdatamodule.shards import pickles

        DELAY = float(sys.argv[4])
        pickles.FileSamples = Slow  # type: ignore[misc] # its files only come later
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
