"""Steps one after another on a simulated caching allocator, with the budget of `fit_budget`.

How full the memory is, and what runs out.

    python benchmarks/warm_steps.py            # 24 data sets of 2,000 lengths, 8 epochs each; a minute

A step keeps activations of several sizes, as layers do. Each batch fits into an emptied allocator. After a step that
runs out of memory, the allocator is emptied, as after a restart.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, SimulatedMemory, fit_budget

LIMIT = 40_000_000
PER_TOKEN = (50, 30, 50, 30, 50, 30, 120)  # bytes of the activations, in the order in which they arise


def layered_step() -> Callable[[tuple[int, int]], None]:
    """Return a step with weights, activations of several sizes, and what an optimizer needs for any batch."""
    weights = torch.zeros(2**18)

    def step(shape: tuple[int, int]) -> None:
        kept = [torch.empty(each * shape[0] * shape[1], dtype=torch.uint8) for each in PER_TOKEN]
        weights.mul_(1)
        del kept
        torch.empty(2**19)

    return step


def runs_out(step: Callable[[tuple[int, int]], None], shape: tuple[int, int]) -> bool:
    try:
        step(shape)
    except torch.OutOfMemoryError:
        return True
    return False


def train(seed: int, epochs: int) -> tuple[list[bool], float]:
    """Return which steps run out of memory, and the median share of the memory that tensors take."""
    lengths = np.clip(np.random.default_rng(seed).lognormal(np.log(360), 0.8, 2000), 8, 2048).astype(int)

    def shape_of(batch: NDArray[np.int64]) -> tuple[int, int]:
        return len(batch), int(lengths[batch].max())

    step, failed, shares = layered_step(), [], []
    with SimulatedMemory(LIMIT, caching=True) as device:
        model = fit_budget(step, shape_of, lengths, device, seed=seed)
        sampler = DistributedSizeAwareBatchSampler(
            lengths, model.budget(), cost=model.cost(), strategy="bucketed", seed=seed
        )
        device.start()
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in sampler:
                device.reset_peak()
                failed.append(runs_out(step, shape_of(np.asarray(batch))))
                shares.append(device.peak() / LIMIT)
                if failed[-1]:
                    device.start()
    return failed, float(np.median(shares))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    runs = [train(seed, options.epochs) for seed in range(options.sets)]
    failed = sum(map(sum, (failed for failed, _ in runs)))
    print(
        f"{failed} of {sum(len(failed) for failed, _ in runs):,} steps ran out, in {sum(any(f) for f, _ in runs)} runs"
    )
    print(f"tensors take {np.mean([share for _, share in runs]):.3f} of the memory")
