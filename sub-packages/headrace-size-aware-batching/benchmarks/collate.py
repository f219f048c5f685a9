"""What samples that are Python lists cost over arrays, in the collate functions.

    python benchmarks/collate.py

64 samples of 512 numbers. Times are the least of alternating runs in this process, printed as ratios to the same
samples as arrays.
"""

import timeit
from functools import partial
from typing import Any

import numpy as np

from headrace.size_aware_batching import PackedCollate, PaddedCollate


def main() -> None:
    for dtype in (np.int64, np.float32):
        arrays = [np.arange(512, dtype=dtype) for _ in range(64)]
        ways: dict[str, list[Any]] = {"arrays": arrays, "lists": [array.tolist() for array in arrays]}
        collates: tuple[Any, ...] = (PaddedCollate(), PackedCollate())
        for collate in collates:
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(15):
                for name, samples in ways.items():
                    times[name].append(timeit.timeit(partial(collate, samples), number=5))
            ratio = min(times["lists"]) / min(times["arrays"])
            name = f"{type(collate).__name__} {np.dtype(dtype).name}"
            print(f"{name:24} lists take {ratio:.1f} times as long as arrays")


if __name__ == "__main__":
    main()
