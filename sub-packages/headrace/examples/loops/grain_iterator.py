"""A loop over an iterator of grain, as in torchtitan: `torchrun --nproc-per-node=2 grain_iterator.py`."""

import torch
import torch.distributed as dist
from grain.experimental import ThreadPrefetchIterDataset
from task import EPOCHS, EVERY, WORKERS, Model, Texts, collate, load, save
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader
from headrace.webdatamodule.integrations.grain import GrainDataset

dist.init_process_group("gloo")
data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = ResumableLoader(data, batches, collate_fn=collate, num_workers=WORKERS)
iterator = iter(ThreadPrefetchIterDataset(GrainDataset(loader, num_epochs=EPOCHS), prefetch_buffer_size=8))
optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
load(model=model, optimizer=optimizer, iterator=iterator.set_state)
parallel = DistributedDataParallel(model)
for batch in iterator:
    optimizer.zero_grad()
    parallel(**batch)["loss"].backward()
    optimizer.step()
    if (steps := steps + 1) % EVERY == 0:
        save(model=model, optimizer=optimizer, iterator=iterator.get_state)
model.report()
dist.destroy_process_group()
