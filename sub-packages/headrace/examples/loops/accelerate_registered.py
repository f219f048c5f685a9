"""accelerate, resumed on any number of processes: `accelerate launch --num_processes=2 accelerate_registered.py`.

On a machine without GPUs, `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu ...`: without it one process starts.
"""

import torch
from accelerate import Accelerator
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader

accelerator, data, model = Accelerator(), Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = ResumableLoader(data, batches, collate_fn=collate, num_workers=WORKERS)
parallel, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.register_for_checkpointing(loader)  # instead of prepare
if path := latest():
    accelerator.load_state(str(path))
for epoch in range(loader.epoch, EPOCHS):
    loader.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(parallel(**batch)["loss"])
        optimizer.step()
        if loader.steps % EVERY == 0:
            accelerator.save_state(str(CHECKPOINTS / f"{epoch}-{loader.steps:06d}"))
model.report()
