"""One rank of a real gloo group, and one that finds its rank in the environment."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

LENGTHS = [1 + (37 * number) % 211 for number in range(1003)]
BUDGET = 500


def train(rank: int, world: int, store: str) -> Any:
    """Train with DistributedDataParallel; return the batches of two epochs."""
    sampler = DistributedSizeAwareBatchSampler(np.array(LENGTHS), BUDGET)  # built before there is a process group
    join(rank, world, store)
    data = [torch.full((length, 1), float(number)) for number, length in enumerate(LENGTHS)]
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
    return seen


def mesh(rank: int, world: int, store: str) -> Any:
    """Two data-parallel times two tensor-parallel ranks; return the batches, and what became of drawn orders."""
    join(rank, world, store)
    part: Any = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))["dp"]
    torch.manual_seed(rank)
    outcomes = []
    for seed, ranks in ((None, None), (None, part), (7, None), (7, part)):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        order = SubsetRandomSampler(range(len(LENGTHS)), generator=generator)
        try:
            next(iter(DistributedSizeAwareBatchSampler(LENGTHS, BUDGET, sampler=order, mesh=ranks)))
        except ValueError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("accepted")
    return list(DistributedSizeAwareBatchSampler(LENGTHS, BUDGET, mesh=part)), outcomes


def join(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def before_the_group() -> Any:
    """Return the number of batches of a rank that knows the environment alone, and the batches."""
    sampler = DistributedSizeAwareBatchSampler([1 + n % 7 for n in range(100)], 20)
    return len(sampler), list(sampler)
