"""torchdata.nodes: `torchrun --nproc-per-node=2 nodes.py`."""

import torch
import torch.distributed as dist
from task import EPOCHS, EVERY, WORKERS, Model, Texts, collate, load, save
from torch.nn.parallel import DistributedDataParallel
from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler


def read(batch: list[int]) -> dict[str, torch.Tensor]:
    """Read and collate a batch."""
    return collate([data[i] for i in batch])


dist.init_process_group("gloo")
data, model = Texts(), Model()
batches = SamplerWrapper(DistributedSizeAwareBatchSampler(data.sizes, 1000))
loader = Loader(ParallelMapper(batches, read, WORKERS))
optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
load(model=model, optimizer=optimizer, loader=loader)
parallel = DistributedDataParallel(model)
while model.seen.sum() < EPOCHS * len(data):
    for batch in loader:
        optimizer.zero_grad()
        parallel(**batch)["loss"].backward()
        optimizer.step()
        if (steps := steps + 1) % EVERY == 0:
            save(model=model, optimizer=optimizer, loader=loader)
model.report()
dist.destroy_process_group()
