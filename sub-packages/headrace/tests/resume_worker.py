"""One rank of a Lightning run over indexed shards: ``resume_worker.py options.json``; see `Options`.

What is trained on is written to a log at once, one JSON line a step: epoch, step and the keys of this rank's batch.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from simulated import keys_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule, Split
from headrace.weighted_sampler import WeightedDistributedSampler


@dataclass(frozen=True)
class Options:
    """What a rank is told.

    Args:
        shards: {name of a source: its folder}.
        weights: {name of a source: its weight}.
        log: Where to write what was trained on.
        checkpoints: Folder of checkpoints.
        budget: Of a batch.
        epochs: How many.
        every: Steps from one checkpoint to the next; 0 for none.
        workers: Of the loader.
        rank: This one.
        world: Number of ranks.
        meeting: Environment by which they meet.
        strategy: Lightning's; "fsdp2" for `ModelParallelStrategy`.
        accelerator: Likewise.
        resume: A checkpoint.
        die_at: Step in which this process kills itself.
        pause: Seconds that a step takes.
    """

    shards: dict[str, str]
    weights: dict[str, float]
    log: str
    checkpoints: str
    budget: int = 150
    epochs: int = 3
    every: int = 0
    workers: int = 0
    rank: int = 0
    world: int = 1
    meeting: dict[str, str] = field(default_factory=dict)
    strategy: str = "auto"
    accelerator: str = "cpu"
    resume: str | None = None
    die_at: int | None = None
    pause: float = 0.0


class Model(lightning.LightningModule):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.layer = torch.nn.Linear(4, 4)
        self.lengths: list[int] = []

    def configure_model(self) -> None:
        if self.options.strategy == "fsdp2":
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]  # set by then

    def training_step(self, batch: list[str]) -> Tensor:
        if self.global_step == self.options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.options.pause)
        line = json.dumps([self.current_epoch, self.global_step, batch]) + "\n"
        with Path(self.options.log).open("a") as log:
            log.write(line)
        loss: Tensor = self.layer(torch.ones(2, 4, device=self.device)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(options: Options) -> IndexedWebDataModule:
    return IndexedWebDataModule(
        {Split.train: options.shards},
        batch_sampler=partial(
            DistributedSizeAwareBatchSampler,
            max_total_size=options.budget,
            strategy="bucketed",
            cost="padded",
            window=64,
        ),
        sizes="txt",
        sampler=partial(WeightedDistributedSampler, weights=options.weights, semantics="ratio"),
        collate_fn=keys_of,
        num_workers=options.workers,
        seed=7,
    )


def strategy(options: Options) -> str | Strategy:
    if options.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=options.world, tensor_parallel_size=1)
    return options.strategy


def trainer(options: Options) -> lightning.Trainer:
    callbacks: list[Any] = []
    if options.every:
        saving = {"every_n_train_steps": options.every, "save_top_k": -1, "filename": "{step}"}
        callbacks.append(ModelCheckpoint(options.checkpoints, **saving))  # type: ignore[arg-type]  # of many kinds
    return lightning.Trainer(
        max_epochs=options.epochs,
        callbacks=callbacks,
        accelerator=options.accelerator,
        devices=1,
        num_nodes=options.world,
        strategy=strategy(options),
        logger=False,
        enable_checkpointing=bool(options.every),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(options: Options) -> None:
    if options.accelerator == "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options.rank)
    if options.world > 1:
        os.environ |= {
            **options.meeting,
            "NODE_RANK": str(options.rank),
            "LOCAL_RANK": "0",
        }
    fit = trainer(options).fit
    safe: dict[str, Any] = (
        {"weights_only": True} if "weights_only" in signature(fit).parameters else {}
    )  # 2.6 and newer
    fit(Model(options), data(options), ckpt_path=options.resume, **safe)
    if dist.is_initialized():
        # Lightning leaves a gloo group open; its threads then race with the end of the interpreter, which may abort.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Options(**json.loads(Path(sys.argv[1]).read_text())))
