"""One rank of `test_map_datamodule.py`: trains under Lightning, and notes each batch once its step is done."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from headrace.webdatamodule import MapDataModule

N, EPOCHS, EVERY = 61, 3, 2


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Noting(lightning.LightningModule):
    def __init__(self, notes: Path, kill_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.notes, self.kill_at = notes.open("a"), kill_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.Tensor(self.layer(batch).mean())

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        note = [self.trainer.current_epoch, self.global_step, batch[:, 0].int().tolist()]
        print(json.dumps(note), file=self.notes, flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saving(lightning.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step % EVERY == 0:
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")


def main(
    rank: int, environment: dict[str, str], folder: Path, name: str, kill_at: int = -1, ckpt: str | None = None
) -> None:
    os.setsid()
    with (folder / f"{name}{rank}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    os.environ.update({**environment, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    world = int(environment.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[Saving(folder)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = MapDataModule({"train": Numbers()}, batch_size=4, num_workers=1, seed=3)
    trainer.fit(Noting(folder / f"{name}{rank}.jsonl", kill_at if rank == world - 1 else -1), data, ckpt_path=ckpt)
    if world > 1:  # Lightning leaves a gloo group open; its threads then race with the end of the interpreter
        dist.barrier()
        dist.destroy_process_group()
