"""Lightning Fabric: `fabric run --devices=2 --strategy=ddp fabric.py`, which launches the processes."""

import torch
from lightning.fabric import Fabric
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader

fabric = Fabric()
data, path = Texts(), CHECKPOINTS / "last.ckpt"
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = ResumableLoader(data, batches, collate_fn=collate, num_workers=WORKERS)  # not for setup_dataloaders
model = Model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
state = {"model": model, "optimizer": optimizer, "loader": loader}
if path.exists():
    fabric.load(path, state)
for epoch in range(loader.epoch, EPOCHS):
    loader.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(model(**fabric.to_device(batch))["loss"])
        optimizer.step()
        if loader.steps % EVERY == 0:
            fabric.save(path, state)
model.report()
