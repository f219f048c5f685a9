"""Lightning: `python lightning_trainer.py 2` for two processes, or with `torchrun --nproc-per-node=2`."""

import sys
from functools import partial

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import MapDataModule


class Module(lightning.LightningModule):
    """The model, as Lightning trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


module, batches = Module(), partial(DistributedSizeAwareBatchSampler, max_total_size=1000)
data = MapDataModule({"train": Texts()}, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
keeper = ModelCheckpoint(CHECKPOINTS, every_n_train_steps=EVERY, save_top_k=-1, filename="{step}")
devices = int(sys.argv[1])
trainer = lightning.Trainer(max_epochs=EPOCHS, devices=devices, strategy="ddp", accelerator="cpu", callbacks=[keeper])
trainer.fit(module, data, ckpt_path=latest())
module.model.report()
