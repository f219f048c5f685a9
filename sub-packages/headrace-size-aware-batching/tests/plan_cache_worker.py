"""A process that plans by a cache on disk, for test_plan_cache.py."""

import json
import warnings
from pathlib import Path

import numpy as np

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler


def main(folder: Path, number: int) -> None:
    """Write the first batch and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sizes = np.load(folder / "sizes.npy", mmap_mode="r")
        sampler = DistributedSizeAwareBatchSampler(sizes, 4096, plan_cache=folder / "plans")
        first = next(iter(sampler))
    result = {"first": first, "warnings": [str(one.message) for one in caught]}
    (folder / f"{number}.json").write_text(json.dumps(result))
