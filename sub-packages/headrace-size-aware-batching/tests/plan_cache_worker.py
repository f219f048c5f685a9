"""Processes that plan by a cache on disk, for test_plan_cache.py."""

import json
import sys
import warnings

import numpy as np

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler


def main(sizes: str, directory: str) -> None:
    print("begins", flush=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = DistributedSizeAwareBatchSampler(np.load(sizes, mmap_mode="r"), 4096, plan_cache=directory)
        first = next(iter(sampler))
    print(json.dumps({"first": first, "warnings": [str(one.message) for one in caught]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
