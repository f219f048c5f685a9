"""Images and clips of many shapes: how long ranks wait for the slowest, and how evenly two models are loaded.

    python benchmarks/video.py                # a few seconds

Baselines: buckets of one shape that hold as many tokens as fit, in random order; and a random split of a step.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, plan_step

TOKENS, COMPUTE, RANKS = 80_000, 300_000, 8


def waiting(batches: Sequence[Any], work: NDArray[Any]) -> float:
    """The mean over steps of the largest rank's work beyond the mean rank's, as a share of that."""
    sums = np.array([work[np.asarray(batch)].sum() for batch in batches])
    steps = sums[: len(sums) // RANKS * RANKS].reshape(-1, RANKS)
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean() - 1)


def clips(seed: int) -> tuple[float, float]:
    draw = np.random.default_rng(seed)
    frames = draw.choice([1, 17, 33, 49, 81], 20_000, p=[0.35, 0.2, 0.2, 0.15, 0.1])
    resolution = draw.choice(3, 20_000, p=[0.3, 0.5, 0.2])
    heights, widths = np.array([[256, 256], [480, 832], [720, 1280]])[resolution].T
    tokens = (1 + (frames - 1) // 4) * (heights // 16) * (widths // 16)
    compute = tokens * (1 + tokens / 30_000)
    buckets = list[Any]()
    for shape in np.unique(shapes := frames * 4 + resolution):
        samples = draw.permutation(np.flatnonzero(shapes == shape))
        count = max(1, TOKENS // int(tokens[samples[0]]))
        buckets += [samples[begin : begin + count] for begin in range(0, len(samples), count)]
    sizes = np.stack([tokens, np.ceil(compute)], axis=1)
    ours = DistributedSizeAwareBatchSampler(sizes, (TOKENS, COMPUTE), work=compute, num_replicas=RANKS, rank=0)
    return waiting([buckets[place] for place in draw.permutation(len(buckets))], compute), waiting(
        [list(batch) for batch in ours.plan()], compute
    )


def two_models(seed: int) -> dict[str, tuple[float, float]]:
    """Variation over micro-batches, as a share of the mean: of a random split, and of the plan."""
    draw = np.random.default_rng(seed)
    patches = np.array([draw.choice([256, 576, 1024, 2304], count).sum() for count in draw.poisson(1.5, 512)])
    text = np.clip(draw.lognormal(5.5, 0.8, 512), 16, 4000).astype(int) + patches // 4
    work = {"encoder": patches, "language": text * (1 + text / 24_576)}
    plan = plan_step(np.stack([patches, text], axis=1), (16_384, 8192), num_replicas=RANKS, work=work)
    count = plan.report().num_micro_batches
    random = [batch for part in np.array_split(draw.permutation(512), RANKS) for batch in np.array_split(part, count)]
    planned = [np.asarray(batch) for rank in plan.micro_batches for batch in rank]

    def variation(batches: list[NDArray[Any]], kind: str) -> float:
        sums = np.array([work[kind][batch].sum() for batch in batches])
        return float(sums.std() / sums.mean())

    return {kind: (variation(random, kind), variation(planned, kind)) for kind in work}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    seeds = range(parser.parse_args().draws)
    equal, ours = zip(*map(clips, seeds), strict=True)
    print(f"waiting for the slowest of {RANKS} ranks, medians of {len(seeds)} draws:")
    print(f"  buckets of equal tokens {median(equal):.1%}, two budgets and work {median(ours):.2%}")
    found = [two_models(seed) for seed in seeds]
    for kind in found[0]:
        random, planned = (median(each[kind][place] for each in found) for place in (0, 1))
        print(f"{kind}: variation over micro-batches {random:.3f} in a random split, {planned:.3f} by plan_step")


if __name__ == "__main__":
    main()
