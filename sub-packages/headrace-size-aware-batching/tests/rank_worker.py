"""One rank of a real gloo group that trains with DistributedDataParallel: ``rank_worker.py rank world store out``."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

LENGTHS = [1 + (37 * number) % 211 for number in range(1003)]
BUDGET = 500


def main(rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = [torch.full((length, 1), float(number)) for number, length in enumerate(LENGTHS)]
    sampler = DistributedSizeAwareBatchSampler(np.array(LENGTHS), BUDGET)  # rank and world come from the group
    loader: DataLoader[torch.Tensor] = DataLoader(data, batch_sampler=sampler, collate_fn=torch.cat)  # type: ignore[arg-type]  # a list is a dataset
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    seen: list[list[list[int]]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected, batches = len(loader), []
        for tokens in loader:
            torch.autograd.backward(model(tokens / 1000).square().mean())  # all ranks meet here, at every step
            if len(tokens) > BUDGET:
                raise ValueError(f"a batch of {len(tokens)} tokens")
            batches.append(sorted({int(value) for value in tokens[:, 0].tolist()}))
        if len(batches) != expected:
            raise ValueError(f"{len(batches)} batches, but len said {expected}")
        seen.append(batches)
    dist.barrier()
    Path(out).write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
