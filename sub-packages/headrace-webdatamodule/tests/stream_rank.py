"""One rank of ``test_streaming_ranks.py``: trains under Lightning's DDP, and notes each sample as it comes."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule


class Model(lightning.LightningModule):
    """Writes down what it sees; one rank may kill itself at a step."""

    def __init__(self, notes: Path, kill_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.notes, self.kill_at = notes.open("a"), kill_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        row = [self.current_epoch, self.global_step, batch[:, 0].int().tolist()]
        self.notes.write(json.dumps(row) + "\n")
        self.notes.flush()
        return torch.Tensor(self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Saving(lightning.Callback):
    """A checkpoint after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")


def tensor(sample: tuple[int]) -> torch.Tensor:
    return torch.tensor([float(sample[0])])


def main(folder: Path, n: int, workers: int, kill_at: int, ckpt: str, differ: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    data = WebDataModule(
        {Split.train: n},
        "json",
        {Split.train: folder},
        4,
        pipeline_wds={Split.train: wds.map(tensor)},
        pipeline_prebatch_wld={Split.train: wds.batched(2, collation_fn=torch.stack)},
        kwargs_wds={Split.train: {"shardshuffle": True, "seed": rank if differ else 0}},
        kwargs_wld={Split.train: {"num_workers": workers}},
    )
    name = "resumed" if ckpt else "killed" if kill_at >= 0 else "whole"
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        callbacks=Saving(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(folder / f"{name}{rank}.jsonl", kill_at if rank == 1 else -1)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt or None)
    # Lightning leaves a gloo group open; its threads then race with the end of the interpreter, which may abort.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6])
