"""A model of Lightning that FSDP2 shards."""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from headrace.size_aware_batching.callbacks import OOMRescue

WIDTH = 8


class Module(lightning.LightningModule):
    """A model that Lightning's ModelParallelStrategy shards with FSDP2."""

    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(WIDTH, 1)
        mesh: Any = self.device_mesh
        fully_shard(self.layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch).square().mean()
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def in_lightning() -> str:
    """Return what OOMRescue says about FSDP2."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1),
        callbacks=[OOMRescue()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Module(), DataLoader([torch.ones(WIDTH)] * 4, batch_size=2))  # type: ignore[arg-type]  # a list is a dataset
    except TypeError as error:
        return str(error)
    return "nothing"
