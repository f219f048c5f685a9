"""One rank of ``test_ranks.py``: trains under Lightning's DDP and writes down what came."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import webdataset as wds

from headrace.webdatamodule import Split, WebDataModule


class Model(lightning.LightningModule):
    """Notes what it sees; the normalisation's buffers are synchronised in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": []}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch[:, 0].int().tolist())
        return torch.Tensor(self.layers(batch).mean())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen["val"].append(batch[:, 0].int().tolist())
        self.log("loss", self.layers(batch).mean(), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def tensors(source: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (torch.tensor([float(number)]) for (number,) in source)


def main(folder: Path, rank: int, n: int, workers: int) -> None:
    splits = (Split.train, Split.val)
    data = WebDataModule(
        dict.fromkeys(splits, n),
        "json",
        dict.fromkeys(splits, str(folder)),
        4,
        pipeline_wds=dict.fromkeys(splits, tensors),
        pipeline_prebatch_wld=dict.fromkeys(splits, wds.batched(2, collation_fn=torch.stack)),
        kwargs_wds={split: {"shardshuffle": split is Split.train, "seed": 1} for split in splits},
        kwargs_wld={split: {"num_workers": workers} for split in splits},
    )
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=data)
    said = [str(warning.message) for warning in caught if "n_samples" in str(warning.message)]
    (folder / f"{rank}.json").write_text(json.dumps({**model.seen, "said": said, "world": trainer.world_size}))
    # Lightning leaves a gloo group open; its threads then race with the end of the interpreter, which may abort.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
