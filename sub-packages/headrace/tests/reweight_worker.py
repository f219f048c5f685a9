"""Loaders whose batch samplers read a mixture, and one of two ranks that change its weights while they train."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, RankMismatchError, ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

N, LENGTH, SEED = 520, 2500, 4
DATA = NamedConcatDataset({"web": range(400), "books": range(90), "code": range(30)})
SIZES = np.random.default_rng(0).integers(1, 50, N)
FIRST = {"web": 5, "books": 3, "code": 2}
WEIGHTS: list[dict[str, Any]] = [
    {"web": 1, "books": 1, "code": 4},
    {"web": 0.7, "books": 0.3, "code": 0},
    {"text": (0.4, {"web": 3, "books": 1}), "code": 0.6},
]
BATCHES: dict[str, dict[str, Any]] = {
    "equal": {"batch_size": 20},
    "stratified": {"max_total_size": 600, "window": 256},
    "packed": {"max_total_size": 600, "strategy": "packed", "window": 300},
    "bucketed": {"max_total_size": 600, "strategy": "bucketed", "cost": "padded", "window": 128},
    "sequential": {"max_total_size": 600, "strategy": "sequential", "batch_size_multiple": 2},
    "one window": {"max_total_size": 600},
    "pieces": {"max_total_size": 600, "max_length": 20, "oversize": "split", "window": 256},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "samples": {},
    "tokens": {"per": "token", "sizes": SIZES + 3},
    "caps": {"max_passes": {"code": 31}},
}


class Indices:
    """Samples that are their own indices, and pieces."""

    fingerprint = "indices"

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> Any:
        return key


def mixture(**options: Any) -> WeightedDistributedSampler:
    own: dict[str, Any] = {"epoch_length": LENGTH, "num_replicas": 1, "rank": 0, "seed": SEED}
    return WeightedDistributedSampler(DATA, FIRST, **own | options)


def loader(kind: str, mixed: str = "samples", workers: int = 0, **ranks: Any) -> ResumableLoader:
    options, order = dict(BATCHES[kind]), mixture(**MIXTURES[mixed])
    batches: Any
    if "batch_size" in options:
        batches = DistributedBatchSampler(N, sampler=order, **options, **ranks)
    else:
        batches = DistributedSizeAwareBatchSampler(SIZES, sampler=order, **options, **ranks)
    return ResumableLoader(Indices(), batches, collate_fn=list, num_workers=workers)


def train(kind: str, weights: dict[str, Any], workers: int, folder: Path) -> dict[str, Any]:
    """Train an epoch, change the weights behind 12 steps, and save the state behind 20."""
    dist.init_process_group("gloo")
    one, came, changed = loader(kind, workers=workers), list[list[int]](), (0, 0)
    try:
        for batch in one:
            came.append(batch)
            if one.steps == 12:
                changed = one.reweight(weights)
            if one.steps == 20 and dist.get_rank() == 0:
                torch.save(one.state_dict(), folder / "state.pt")
    except RankMismatchError as error:
        return {"came": came, "said": str(error)}
    finally:
        one.close()
    return {"came": came, "changed": changed}


if __name__ == "__main__":
    kind, weights, workers, folder = sys.argv[1:]
    own = json.loads(weights)[int(os.environ["RANK"])]
    print(json.dumps(train(kind, WEIGHTS[own], int(workers), Path(folder))), flush=True)
    # gloo's threads race with the end of the interpreter, which may abort.
    dist.barrier()
    os._exit(0)
