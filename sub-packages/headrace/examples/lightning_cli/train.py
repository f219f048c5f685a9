"""A model, and data of size-aware batches, for LightningCLI: all options are in fit.yaml."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.cli import LightningCLI


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Keys and lengths of the samples, the lengths of shape [n, 1]."""
    lengths = torch.tensor([[float(len(sample["txt"]))] for sample in samples])
    return {"keys": [sample["__key__"] for sample in samples], "lengths": lengths}


class Model(lightning.LightningModule):
    """Learns nothing of use, and notes what it was trained on."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.learning_rate, self.layer = learning_rate, torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """One step."""
        with Path("keys.txt").open("a") as notes:
            print(self.trainer.current_epoch, *batch["keys"], file=notes)
        return torch.Tensor(self.layer(batch["lengths"] / 50).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(Model, lightning.LightningDataModule, subclass_mode_data=True, save_config_callback=None)
