"""accelerate with a loader that it prepares: `accelerate launch --num_processes=2 accelerate_prepared.py`.

On a machine without GPUs, `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu ...`: without it one process starts.
"""

import torch
from accelerate import Accelerator, skip_first_batches
from task import CHECKPOINTS, EPOCHS, WORKERS, Model, Texts, collate, latest
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler

accelerator = Accelerator(gradient_accumulation_steps=3)
data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000, rank="all")
loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
parallel, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
if path := latest():
    accelerator.load_state(str(path))
done = int(path.name) if path else 0  # batches of this process
for epoch in range(done // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    for batch in skip_first_batches(loader, done % len(loader)):
        done += 1
        with accelerator.accumulate(parallel):
            accelerator.backward(parallel(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # also after the last group of an epoch, which is shorter
            accelerator.save_state(str(CHECKPOINTS / f"{done:06d}"))
model.report()
