"""Train a small model and draw the figures that its data module logged: ``python logged_run.py [picture.png]``.

Two sources of made-up texts, three quarters and a quarter of the tokens, in padded batches; a Transformer on the CPU,
Lightning, and its CSV logger. It takes about a minute.
"""

import csv
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, PaddedCollate
from headrace.webdatamodule import MapDataModule
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

PICTURE = Path(__file__).parents[3] / "docs" / "figures" / "logged_run.png"
BUDGET, STEPS, EVERY = 2048, 300, 10
TARGETS = {"articles": 0.75, "chats": 0.25}
BLUE, ORANGE, GREY = "#3a6ea5", "#d9822b", "#8a8a8a"


class Texts(Dataset[Any]):
    """Made-up token ids of given lengths."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": (torch.arange(self.lengths[index]) * (index % 7 + 1)) % 60 + 1}


class Model(lightning.LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(61, 32), layer, torch.nn.Linear(32, 61))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        loss = cross_entropy(self.layers(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss, batch_size=len(tokens))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(folder: Path) -> list[dict[str, float]]:
    """Train, and return the rows of the logger that have figures of the data."""
    draw = np.random.default_rng(0)
    sources = {"articles": (160, 6000), "chats": (90, 6000)}
    lengths = {
        name: np.clip(draw.lognormal(np.log(median), 0.5, count), 8, 600).astype(int)
        for name, (median, count) in sources.items()
    }
    sizes = np.concatenate([*lengths.values()])
    data = MapDataModule(
        {"train": NamedConcatDataset({name: Texts(own) for name, own in lengths.items()})},
        sampler=partial(WeightedDistributedSampler, weights=TARGETS, per="token", sizes=sizes),
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET, cost="padded", window=512),
        sizes=sizes,
        collate_fn=PaddedCollate(),
        num_workers=1,
        log_stats=True,
    )
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        log_every_n_steps=EVERY,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    lightning.seed_everything(0, verbose=False)
    trainer.fit(Model(), datamodule=data)
    [path] = folder.glob("**/metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["data/fill"]]
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def picture(rows: list[dict[str, float]]) -> Figure:
    """Draw the figures over the steps."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    steps = [row["step"] for row in rows]

    def curve(place: tuple[int, int], name: str, label: str, colour: str) -> None:
        axes[place].plot(steps, [100 * row[name] for row in rows], color=colour, label=label, linewidth=1.4)

    curve((0, 0), "data/fill", "fill", BLUE)
    curve((0, 0), "data/padding", "padding", ORANGE)
    for (name, target), colour in zip(TARGETS.items(), (BLUE, ORANGE), strict=True):
        axes[0, 1].axhline(100 * target, color=GREY, linewidth=1, linestyle=":")
        curve((0, 1), f"data/token_share/{name}", name, colour)
    axes[1, 0].plot(steps, [row["data/tokens_per_second"] / 1000 for row in rows], color=BLUE, linewidth=1.4)
    curve((1, 1), "data/wait_share", "wait", BLUE)
    titles = {
        (0, 0): "data/fill, data/padding (%)",
        (0, 1): "data/token_share/NAME (%)",
        (1, 0): "data/tokens_per_second (thousands)",
        (1, 1): "data/wait_share (%)",
    }
    for place, title in titles.items():
        axes[place].set_title(title, loc="left", fontsize=10)
        axes[place].spines[["top", "right"]].set_visible(False)
        axes[place].set_ylim(0, 105 if place[0] == 0 else None)
    for place in ((0, 0), (0, 1)):
        axes[place].legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2, fontsize=9, borderaxespad=0
        )
    for axis in axes[1]:
        axis.set_xlabel("step")
    return figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = train(Path(folder))
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    picture(rows).savefig(target, dpi=140, metadata={"Software": None})
    for name in ("data/fill", "data/padding", "data/token_share/articles", "data/wait_share"):
        values = [row[name] for row in rows]
        print(f"{name}: {min(values):.3f} to {max(values):.3f}")
