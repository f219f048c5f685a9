"""Packs pickle files in a process of its own, for tests that kill it."""

import faulthandler
import sys
import time
from pathlib import Path

from headrace.webdatamodule import PickledDataWDS, Split
from headrace.webdatamodule.shards.writing import pack_files as pickles
from headrace.webdatamodule.shards.writing.shard_task import KeyedSample

_SECONDS = 120  # nobody waits longer than this, whatever happens


class Stuck(pickles.FileSamples):
    """Says so when it is asked for one of its samples, and never gives it."""

    key, delay = "", 0.0

    def __getitem__(self, position: int) -> KeyedSample:
        time.sleep(self.delay)
        pair = super().__getitem__(position)
        if pair[0] == self.key:
            print("stuck", flush=True)
            time.sleep(2 * _SECONDS)
        return pair


def main(source: str, target: str, count: int) -> None:
    names = [f"sample{i}" for i in range(count)]
    data = PickledDataWDS(source, {Split.train: names}, "pt", {Split.train: target}, 4, n_tars_wds=6)
    data.prepare_data()
    print(len(list(Path(target).glob("*.tar"))))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    if len(sys.argv) > 4:
        Stuck.key, Stuck.delay = sys.argv[4], float(sys.argv[5])
        pickles.FileSamples = Stuck  # type: ignore[misc] # its files only come later
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
