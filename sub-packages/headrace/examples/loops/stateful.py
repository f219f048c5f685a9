"""torchdata's StatefulDataLoader: `torchrun --nproc-per-node=2 stateful.py`."""

import torch
import torch.distributed as dist
from task import EPOCHS, EVERY, WORKERS, Model, Texts, collate, load, save
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import sampler_state

dist.init_process_group("gloo")
data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = StatefulDataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
load(model=model, optimizer=optimizer, loader=lambda state: batches.load_state_dict(sampler_state(state)))
parallel = DistributedDataParallel(model)
for epoch in range(batches.epoch, EPOCHS):
    batches.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        parallel(**batch)["loss"].backward()
        optimizer.step()
        if (steps := steps + 1) % EVERY == 0:
            save(model=model, optimizer=optimizer, loader=loader)
model.report()
dist.destroy_process_group()
