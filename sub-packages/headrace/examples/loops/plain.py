"""Plain PyTorch: `torchrun --nproc-per-node=2 plain.py`, on as many processes as you like, after a crash too."""

import torch
import torch.distributed as dist
from task import EPOCHS, EVERY, WORKERS, Model, Texts, collate, load, save
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader

dist.init_process_group("gloo")
data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = ResumableLoader(data, batches, collate_fn=collate, num_workers=WORKERS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
load(model=model, optimizer=optimizer, loader=loader)
parallel = DistributedDataParallel(model)
for epoch in range(loader.epoch, EPOCHS):
    loader.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        parallel(**batch)["loss"].backward()
        optimizer.step()
        if loader.steps % EVERY == 0:
            save(model=model, optimizer=optimizer, loader=loader)
model.report()
dist.destroy_process_group()
