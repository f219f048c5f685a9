"""What changes in the middle of an epoch cost, and when a state is loaded, against ``numpy.random.permutation``.

    python benchmarks/run_changes.py                  # 10,000,000 samples
    python benchmarks/run_changes.py --samples 1e6

Processor times in user mode, and with the system's, which maps new memory: medians of alternating runs in this process,
printed as ratios to those of the permutation.
"""

import argparse
import resource
from collections.abc import Callable
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler

CHANGES = (0, 1, 5)
PLANNED = 1_000_000  # samples, in optimizer steps, whose whole epoch is planned


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the processor time in user mode, and all of it: the rest is mostly the system's, which maps new memory."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    user = after.ru_utime - before.ru_utime
    return user, user + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=float, default=1e7)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    count = int(options.samples)
    drawn = np.random.default_rng(0).lognormal(np.log(360), 0.8, count)
    sizes = np.clip(drawn, 8, 2048).astype(np.int32)
    sizes.flags.writeable = False

    def sampler() -> DistributedSizeAwareBatchSampler:
        return DistributedSizeAwareBatchSampler(sizes, 16384, num_replicas=8, rank=0)

    def loaded(state: dict[str, Any]) -> DistributedSizeAwareBatchSampler:
        resumed = sampler()
        resumed.load_state_dict(state)
        return resumed

    def begin(state: dict[str, Any]) -> None:
        next(iter(loaded(state)))

    states = {}
    for changes in CHANGES:
        running = sampler()
        list(islice(running, 200))
        for number in range(changes):
            running.exclude([number])
            list(islice(running, 100))
        states[changes] = running.state_dict()
    steps = OptimizerStepBatchSampler(sizes[:PLANNED], 16384, tokens_per_step=2**20, num_replicas=8, rank=0)
    list(islice(steps, 200))

    def reshard(running: Any, ranks: int) -> None:
        running.reshard(ranks, ranks - 1)
        next(iter(running))

    asked = loaded(states[5])
    asked.step(250)
    times: dict[str, list[tuple[float, float]]] = {}
    for run in range(options.runs):
        times.setdefault("permutation", []).append(timed(lambda: np.random.permutation(count)))
        for changes, state in states.items():
            name = f"load and first batch, {changes} changes"
            times.setdefault(name, []).append(timed(partial(begin, state)))
        times.setdefault("a past step", []).append(timed(lambda: asked.step(351)))
        running = loaded(states[0])
        times.setdefault("reshard and next batch", []).append(timed(partial(reshard, running, 7 - run % 3)))
        name = f"the same, optimizer steps of {PLANNED:,} samples"
        times.setdefault(name, []).append(timed(partial(reshard, steps, 7 - run % 3)))
    user, both = (median(some) for some in zip(*times.pop("permutation"), strict=True))
    for name, found in times.items():
        own, all_of_it = (median(some) for some in zip(*found, strict=True))
        print(f"{name:52}{own / user:8.3f}{all_of_it / both:8.3f}")


if __name__ == "__main__":
    main()
