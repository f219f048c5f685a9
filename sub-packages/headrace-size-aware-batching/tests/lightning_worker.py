"""A small Lightning run that fails where it is told to, alone or as one of two ranks."""

import os
from typing import Any

import lightning
import numpy as np
import torch
import torch.distributed as dist
from doors import sampler_with
from fails_backward import fails_backward
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from headrace.size_aware_batching import global_num_tokens, token_weighted_loss
from headrace.size_aware_batching.callbacks import OOMRescue, WorstBatchesFirst

LENGTHS = np.arange(1, 61) % 13 + 1
FAILING_STEP = 2


class Failing(torch.optim.AdamW):
    """Runs out of memory once, in the update of this number."""

    fails_at = -1
    updates = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.updates += 1
        if self.updates - 1 == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().step()
        return loss


def sampler_of(**options: Any) -> Any:
    # An order in which the batch that fails has four to seven samples: half of it fits.
    order: dict[str, Any] = {} if "tokens_per_step" in options else {"balanced_ranks": 64}
    return sampler_with(LENGTHS, 60, cost="padded", **order, **options)


def collate(samples: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "index": torch.stack([index for _, index in samples])}


class Model(lightning.LightningModule):
    """Three layers, a schedule, and a fault."""

    def __init__(self, phase: str = "", failing: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()
        self.phase, self.failing, self.options = phase, failing, options
        self.automatic_optimization = not options.get("manual", False)
        self.losses: list[float] = []
        self.drawn: list[float] = []
        self.worst: list[list[int]] = []
        self.seen = MeanMetric()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        x, index = batch["x"], batch["index"].tolist()
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        if not progress.started:
            self.worst.append(index)
            if self.phase == "large" and self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
        else:
            self.drawn.append(torch.rand(1).item())
        steps = (FAILING_STEP, FAILING_STEP + 1) if "twice" in self.phase else (FAILING_STEP,)
        fails = self.failing and self.trainer.global_step in steps and len(x) > 3
        if (fails and self.phase.startswith("forward")) or (self.phase == "sample 7" and 7 in index):
            raise torch.OutOfMemoryError("CUDA out of memory")
        hidden = self.layers(x)
        loss = (fails_backward(hidden) if fails and self.phase == "backward" else hidden).square().mean()
        self.seen.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return {"loss": loss, "samples": len(x)} if batch_idx % 2 else loss

    def on_train_epoch_end(self) -> None:
        self.means = [*getattr(self, "means", []), float(self.seen.compute())]
        self.seen.reset()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = Failing(self.parameters(), lr=0.05, foreach=False)
        if self.failing and "optimizer" in self.phase:
            optimizer.fails_at = 0 if "first" in self.phase else FAILING_STEP
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *clip: Any, **options: Any) -> None:
        if self.failing and self.phase == "clipping" and self.trainer.global_step == FAILING_STEP:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().configure_gradient_clipping(optimizer, *clip, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(60, 5, dtype=torch.float64, generator=generator), torch.arange(60))
        if self.options.get("plain"):
            return DataLoader(data, batch_size=4, collate_fn=collate)
        sampler = sampler_of(tokens_per_step=130) if self.options.get("tokens") else sampler_of()
        return DataLoader(data, batch_sampler=sampler, collate_fn=collate)

    def weights(self) -> list[float]:
        return [value for p in self.parameters() for value in p.detach().reshape(-1).tolist()]


class Weighted(Model):
    """Its loss is the mean over the targets of all ranks, counted in one place or another."""

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.num_tokens = self.count(batch)

    def count(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return global_num_tokens([torch.where(batch["index"] % 3 == 0, -100, 1)])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        x, targets = batch["x"], batch["index"] % 3 > 0
        if self.failing and self.trainer.global_step == FAILING_STEP and len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        num_tokens = self.count(batch) if self.phase == "count" else self.num_tokens
        self.seen.update(0.0)
        loss = token_weighted_loss(self.layers(x).square()[:, 0] * targets, num_tokens)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x), sync_dist=self.phase == "log")
        return loss


def fit(
    callbacks: list[Any],
    phase: str = "",
    failing: bool = True,
    clip: float | None = None,
    kind: type[Model] = Model,
    **options: Any,
) -> Model:
    """Train for two epochs."""
    ddp = dist.is_initialized()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        num_nodes=dist.get_world_size() if ddp else 1,
        strategy="ddp" if ddp else "auto",
        callbacks=callbacks,
        gradient_clip_val=clip,
        accumulate_grad_batches=options.pop("accumulate", 1),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = kind(phase, failing, **options)
    trainer.fit(model)
    return model


def main(rank: int, world: int, store: str) -> dict[str, Any]:
    """Run two ranks; the second one fails."""
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    result: dict[str, Any] = {"unbroken": fit([]).weights()}
    for phase in ("forward", "backward", "optimizer"):
        rescue = OOMRescue()
        result[phase] = fit([rescue], phase, failing=rank == 1).weights()
        if bool(rescue.events) != (rank == 1):
            raise ValueError(f"rank {rank} has the events {rescue.events}")
    result["accumulated unbroken"] = fit([], accumulate=2).weights()
    result["accumulated"] = fit([OOMRescue()], "backward", failing=rank == 1, accumulate=2).weights()
    result["weighted unbroken"] = fit([], kind=Weighted, failing=False).weights()
    result["weighted"] = fit([OOMRescue(reduction="scaled")], kind=Weighted, failing=rank == 1).weights()
    for phase in ("count", "log"):
        try:
            fit([OOMRescue(reduction="scaled")], phase, kind=Weighted, failing=rank == 1)
        except RuntimeError as error:
            result[phase] = str(error)
    try:
        fit([OOMRescue()], "clipping", failing=rank == 1, clip=0.1)
    except RuntimeError as error:
        result["clipping"] = str(error)
    try:
        fit([WorstBatchesFirst()], "large", failing=rank == 1)
    except torch.OutOfMemoryError as error:
        result["large"] = str(error)
    return result
