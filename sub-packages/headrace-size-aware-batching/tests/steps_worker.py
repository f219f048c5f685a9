"""A training with tokens_per_step, alone or as one of several ranks."""

import os
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from headrace.size_aware_batching import (
    OptimizerStepBatchSampler,
    global_num_tokens,
    token_weighted_loss,
)
from headrace.size_aware_batching.callbacks import TokensPerStep

LENGTHS = np.random.default_rng(3).integers(1, 60, 300)
SCHEDULE = [(0, 900), (4, 2000)]
EPOCHS = 2


def sampler_of(**options: Any) -> OptimizerStepBatchSampler:
    return OptimizerStepBatchSampler(LENGTHS, 220, tokens_per_step=SCHEDULE, **options)


def dataset() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(int(length), 3, dtype=torch.float64, generator=generator) for length in LENGTHS]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def losses(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).square().sum()


def weights(module: torch.nn.Module) -> list[float]:
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def loader_of(sampler: OptimizerStepBatchSampler, workers: int = 0) -> Any:
    return DataLoader(
        dataset(),  # type: ignore[arg-type]  # a list is a dataset
        batch_sampler=sampler,
        collate_fn=torch.cat,
        num_workers=workers,
    )


def loop(workers: int = 0) -> list[float]:
    """Train in a plain loop, each step's gradient being that of the mean over its tokens."""
    sampler, module = sampler_of(), model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3)
    parallel: Any = DistributedDataParallel(module) if dist.is_initialized() else module
    loader, updates = loader_of(sampler, workers), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for micro_batches in sampler.optimizer_steps(loader):
            total = global_num_tokens([len(batch) for batch in micro_batches])
            if dist.is_initialized():
                for batch in micro_batches[:-1]:
                    with parallel.no_sync():
                        torch.autograd.backward(token_weighted_loss(losses(parallel(batch)), total))
                micro_batches = micro_batches[-1:]
            for batch in micro_batches:
                torch.autograd.backward(token_weighted_loss(losses(parallel(batch)), total))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    if updates != sum(sampler.num_optimizer_steps(epoch) for epoch in range(EPOCHS)):
        raise ValueError(f"{updates} updates")
    return weights(module)


class Module(lightning.LightningModule):
    """The same for Lightning, with the tokens of a step as a constant."""

    def __init__(self, sampler: OptimizerStepBatchSampler, workers: int = 0) -> None:
        super().__init__()
        self.model, self.sampler, self.workers = model(), sampler, workers
        self.accumulated: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        tokens = self.sampler.tokens_at(self.trainer.global_step)
        # The gradients are averaged over the ranks, and the trainer divides by the accumulated batches.
        scale = self.trainer.world_size * self.trainer.accumulate_grad_batches / tokens
        loss: torch.Tensor = losses(self.model(batch)) * scale
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.accumulated.append(int(self.trainer.accumulate_grad_batches))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (self.sampler.tokens_at(step) / self.sampler.tokens_at(0)) ** 0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return loader_of(self.sampler, self.workers)


def fit(workers: int = 0) -> tuple[list[float], int, list[int]]:
    """Train with Lightning; return weights, updates and how many batches were accumulated at each."""
    ddp = dist.is_initialized()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        num_nodes=dist.get_world_size() if ddp else 1,
        strategy="ddp" if ddp else "auto",
        callbacks=[TokensPerStep()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(sampler_of(), workers)
    trainer.fit(module)
    if trainer.accumulate_grad_batches != 1:
        raise ValueError("the trainer must be left as it was")
    return weights(module), trainer.global_step, module.accumulated


def of_rank(train: Callable[[], Any], rank: int, world: int, store: str) -> Any:
    """Train as one of several ranks, each of which is a node for Lightning."""
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return train()
