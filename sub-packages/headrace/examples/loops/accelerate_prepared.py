"""accelerate with a loader that it prepares: `accelerate launch --num_processes=2 accelerate_prepared.py`.

On a machine without GPUs, `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu ...`: without it one process starts.
"""

import torch
from accelerate import Accelerator
from task import CHECKPOINTS, EPOCHS, WORKERS, Model, Texts, collate, latest
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import PreparedBatchSampler

accelerator, steps = Accelerator(gradient_accumulation_steps=3), 0
data, model = Texts(), Model()
batches = PreparedBatchSampler(DistributedSizeAwareBatchSampler(data.sizes, 1000, rank="all"))
loader = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
parallel, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
accelerator.register_for_checkpointing(batches)
if path := latest():
    accelerator.load_state(str(path))
for epoch in range(batches.epoch, EPOCHS):
    loader.set_epoch(epoch)
    for batch in batches.delivered(loader):
        with accelerator.accumulate(parallel):
            accelerator.backward(parallel(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # also after the last group of an epoch, which is shorter
            accelerator.save_state(str(CHECKPOINTS / f"{batches.run_steps:06d}"))
model.report()
