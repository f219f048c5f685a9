"""One rank of ``test_streaming_ranks.py``: trains under Lightning, and notes each batch as it comes."""

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import webdataset as wds
from lightning.pytorch.strategies import ModelParallelStrategy

from headrace.webdatamodule import Split, WebDataModule

EPOCHS, STEPS, N = 2, 5, 18


class Model(lightning.LightningModule):
    """Notes what it sees; one rank may kill itself at a step."""

    def __init__(self, notes: Path | None = None, kill_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": []}
        self.notes, self.kill_at = None if notes is None else notes.open("a"), kill_at

    def configure_model(self) -> None:
        pass  # which the strategy for tensor parallel ranks insists on

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen["train"].append(batch[:, 0].int().tolist())
        if self.notes is not None:
            print(json.dumps([self.global_step, self.seen["train"][-1]]), file=self.notes, flush=True)
        return torch.Tensor(self.layer(batch).mean())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen["val"].append(batch[:, 0].int().tolist())
        self.log("loss", batch.mean(), sync_dist=True, batch_size=len(batch))

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


def module(place: Path, workers: int = 0, seed: int = 0, ranks: int = 2, **more: Any) -> WebDataModule:
    splits = (Split.train, Split.val)
    return WebDataModule(
        dict.fromkeys(splits, N),
        "json",
        dict.fromkeys(splits, place),
        2 * ranks,
        pipeline_wds=dict.fromkeys(splits, wds.map(tensor)),
        pipeline_prebatch_wld=dict.fromkeys(splits, wds.batched(2, collation_fn=torch.stack)),
        kwargs_wds={split: {"shardshuffle": True, "seed": seed} for split in splits},
        kwargs_wld={split: {"num_workers": workers} for split in splits},
        **more,
    )


def trainer(strategy: Any = "ddp", *callbacks: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted(data: Any, strategy: Any = "ddp") -> dict[str, Any]:
    """The batches of a fit, and its warnings about samples."""
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy).fit(model, datamodule=data)
    messages = [str(one.message) for one in caught]
    return {**model.seen, "warned": [text for text in messages if "n_samples" in text or "fork" in text]}


def several(folder: Path, rank: int) -> None:
    """Several fits in one process; the first one has to come first."""
    environment = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    early = module(folder / "indexed")
    early.setup("fit")
    early.train_dataloader()
    os.environ.update(environment)
    noted: dict[str, Any] = {"early": fitted(early)}
    noted["indexed"] = fitted(module(folder / "indexed", workers=2))
    noted["by shards"] = fitted(module(folder / "plain"))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    noted["mesh"] = fitted(module(folder / "indexed", mesh=mesh["data"], ranks=1))
    noted["given"] = fitted(module(folder / "indexed", num_replicas=2, rank=1 - rank))
    try:
        fitted(module(folder / "indexed", seed=rank))
    except Exception as error:
        noted["differ"] = f"{type(error).__name__}: {error}"
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    noted["tensor parallel"] = fitted(module(folder / "indexed", ranks=1), strategy)
    (folder / f"{rank}.json").write_text(json.dumps(noted))


def main(
    rank: int, meeting: dict[str, str], folder: Path, name: str, kill_at: int = -1, ckpt: str | None = None
) -> None:
    """Run in a process of its own."""
    os.environ.update({**meeting, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    if name == "several":
        several(folder, rank)
    else:
        model = Model(folder / f"{name}{rank}.jsonl", kill_at if rank == 1 else -1)
        data = module(folder / "indexed", workers=2)
        trainer("ddp", Saving(folder)).fit(model, datamodule=data, ckpt_path=ckpt)
    # Lightning leaves a gloo group open; its threads then race with the end of the interpreter, which may abort.
    dist.barrier()
    dist.destroy_process_group()
