"""One rank of a Lightning run over two processes."""

import json
import os
from pathlib import Path

import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.weighted_sampler import WeightedDistributedSampler

LENGTHS = [1 + (37 * number) % 97 for number in range(400)]
BUDGET = 250
EPOCHS = 6


class Sequences(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((LENGTHS[index], 1), float(index))


class Model(lightning.LightningModule):
    def __init__(self, batches: DistributedSizeAwareBatchSampler) -> None:
        super().__init__()
        self.batches = batches
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[list[int]]] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Lightning asks in every epoch, and then for the length, which differs from epoch to epoch.
        self.batches.set_epoch(self.trainer.current_epoch)
        return DataLoader(Sequences(), batch_sampler=self.batches, collate_fn=padded)

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Tensor) -> Tensor:
        if batch.shape[0] * batch.shape[1] > BUDGET:
            raise ValueError(f"a batch of {tuple(batch.shape)}")
        self.seen[-1].append([int(index) for index in batch[:, 0, 0].tolist()])
        loss: Tensor = self.layer(batch / 400).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1.0)


def main(rank: int, meeting: dict[str, str], out: str) -> None:
    os.environ |= {
        **meeting,
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
    }
    # Every rank mixes the same epoch; the batches are what is dealt to the ranks.
    order = WeightedDistributedSampler(Sequences(), {(0, 300): 0.5, (300, 400): 2.0}, num_replicas=1, rank=0)
    batches = DistributedSizeAwareBatchSampler(
        np.array(LENGTHS), BUDGET, strategy="bucketed", cost="padded", sampler=order, window=100
    )
    model = Model(batches)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        devices=1,
        num_nodes=int(meeting["WORLD_SIZE"]),
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    Path(out).write_text(json.dumps(model.seen))
    # Lightning leaves a gloo group open; its threads then race with the end of the interpreter, which may abort.
    dist.barrier()
    dist.destroy_process_group()
