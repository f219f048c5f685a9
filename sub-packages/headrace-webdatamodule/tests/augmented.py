"""Datasets with random transforms, and a fit over them in a process of its own, which may be killed."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from loaders import COUNT

from headrace.webdatamodule import IndexedWebDataModule, MapDataModule, sample_rng

EPOCHS, EVERY = 2, 4


def draw_all(number: int) -> torch.Tensor:
    """What the random transforms of one sample draw, more often for some than for others."""
    drawn = [random.random() for _ in range(1 + number % 3)]
    drawn += [random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]  # noqa: NPY002 - what is seeded
    drawn += [float(torch.rand(())), float(torch.randn(())), sample_rng().random(), sample_rng().normal()]
    return torch.tensor([number, *drawn[-8:]], dtype=torch.float64)


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset with random transforms."""

    fingerprint = "augmented"

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw_all(int(index))


class InBatches(Augmented):
    """The same, read in batches."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [draw_all(int(index)) for index in indices]


def augment(sample: dict[str, Any]) -> torch.Tensor:
    return draw_all(sample["json"])


def decode_randomly(key: str, data: bytes) -> Any:
    return draw_all(json.loads(data))


class Noting(lightning.LightningModule):
    """Notes the samples of each batch once its step is done, and draws as dropout does."""

    def __init__(self, notes: Path, kill_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.notes, self.kill_at = notes.open("a"), kill_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.rand(3)
        return torch.Tensor(self.layer(torch.ones(1, 1)).sum())

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        print(json.dumps([self.trainer.current_epoch, batch.tolist()]), file=self.notes, flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saving(lightning.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step % EVERY == 0:
            trainer.save_checkpoint(self.path)


def module_of(kind: str, shards: Path, workers: int) -> lightning.LightningDataModule:
    options: Any = {"batch_size": 3, "num_workers": workers, "seed": 5, "collate_fn": torch.stack}
    if kind == "map":
        return MapDataModule({"train": Augmented()}, seed_per="sample", **options)
    return IndexedWebDataModule({"train": shards}, transform=augment, seed_per="sample", **options)


def train(
    rank: int,
    environment: dict[str, str],
    kind: str,
    shards: Path,
    out: Path,
    name: str,
    workers: int,
    kill_at: int = -1,
    ckpt: Path | None = None,
) -> None:
    with (out / f"{name}{rank}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update({**environment, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    world = int(environment.get("WORLD_SIZE", "1"))
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[Saving(out / f"{name}.ckpt")],
        **quiet,
    )
    model = Noting(out / f"{name}{rank}.jsonl", kill_at)
    trainer.fit(model, module_of(kind, shards, workers), ckpt_path=ckpt)
    if world > 1:  # Lightning leaves a gloo group open; its threads then race with the end of the interpreter
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
