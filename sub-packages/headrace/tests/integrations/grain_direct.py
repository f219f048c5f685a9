"""A loop over a GrainIterator in the main thread, where the ranks compare their plans."""

import torch
import torch.distributed as dist
from task import EPOCHS, EVERY, WORKERS, Model, Texts, collate, load, save  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader
from headrace.webdatamodule.integrations.grain import GrainIterator

dist.init_process_group("gloo")
data, model = Texts(), Model()
sampler = DistributedSizeAwareBatchSampler(data.sizes, 1000)
batches = GrainIterator(ResumableLoader(data, sampler, collate_fn=collate, num_workers=WORKERS), num_epochs=EPOCHS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
load(model=model, optimizer=optimizer, batches=batches.set_state)
parallel = DistributedDataParallel(model)
for step, batch in enumerate(batches, 1):
    optimizer.zero_grad()
    parallel(**batch)["loss"].backward()
    optimizer.step()
    if step % EVERY == 0:
        save(model=model, optimizer=optimizer, batches=batches.get_state)
model.report()
dist.destroy_process_group()
