"""What every loop in this folder trains: samples of uneven size, and a model that counts them.

Stands for your data and your model. The model's buffer `seen` holds how often each sample was trained on, by all ranks
together. It is saved and loaded with the weights, so it shows what a run with its crashes has really trained on.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset

CHECKPOINTS = Path(os.environ.get("CHECKPOINTS", "checkpoints"))
WORKERS = int(os.environ.get("WORKERS", "0"))  # of the loaders
EPOCHS, EVERY = 2, 3  # optimizer steps from one checkpoint to the next
Batch = dict[str, torch.Tensor]


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Made-up texts of 5 to 120 tokens.

    Attributes:
        sizes: Tokens of each text, shape [602].
    """

    sizes = np.random.default_rng(0).integers(5, 121, 602)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Batch:
        """Return the number of a text and its tokens, int64 of shape [length]."""
        return {"ids": torch.tensor(index), "tokens": (torch.arange(self.sizes[index]) * 31 + index) % 97}


def collate(samples: list[Batch]) -> Batch:
    """Return `ids` of shape [n], and all `tokens` and their `targets` in a row, without padding; -1 is no target."""
    return {
        "ids": torch.stack([sample["ids"] for sample in samples]),
        "tokens": torch.cat([sample["tokens"] for sample in samples]),
        "targets": torch.cat([pad(sample["tokens"][1:], (0, 1), value=-1) for sample in samples]),
    }


class Model(torch.nn.Module):
    """Predicts the next token from the one before."""

    seen: torch.Tensor
    most_ahead: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(97, 8), torch.nn.Linear(8, 97))
        self.register_buffer("seen", torch.zeros(len(Texts.sizes), dtype=torch.int64))
        self.register_buffer("most_ahead", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `loss`, the mean over the tokens of this batch."""
        if self.training:
            self._count(ids)
        return {"loss": cross_entropy(self.layers(tokens), targets, ignore_index=-1)}

    def _count(self, ids: torch.Tensor) -> None:
        counts = torch.bincount(ids, minlength=len(self.seen))
        if dist.is_initialized():
            dist.all_reduce(counts)
        self.seen += counts
        # More than 1 if a sample comes a second time before all others have come once.
        self.most_ahead.clamp_(min=self.seen.max() - self.seen.min())

    def report(self) -> None:
        """Print what has been trained on."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            lost, repeated = int((EPOCHS - self.seen).clamp(min=0).sum()), int((self.seen - EPOCHS).clamp(min=0).sum())
            print(f"{EPOCHS} epochs of {len(self.seen)} samples: {lost} lost, {repeated} repeated", flush=True)


def save(**parts: Any) -> None:
    """Save the states of the parts, all or nothing; a part may be a function that returns its state."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        CHECKPOINTS.mkdir(exist_ok=True)
        states = {name: getattr(part, "state_dict", part)() for name, part in parts.items()}
        torch.save(states, CHECKPOINTS / "unfinished")
        (CHECKPOINTS / "unfinished").replace(CHECKPOINTS / "last.pt")


def load(**parts: Any) -> None:
    """Load the states of the parts, if they were ever saved; a part may be a function of its state."""
    if (CHECKPOINTS / "last.pt").exists():
        for name, state in torch.load(CHECKPOINTS / "last.pt", weights_only=True).items():
            getattr(parts[name], "load_state_dict", parts[name])(state)


def latest() -> Path | None:
    """Return the checkpoint of the most steps, for trainers that number theirs."""
    found = {int("".join(filter(str.isdigit, path.stem)) or 0): path for path in CHECKPOINTS.glob("*[0-9]*")}
    return found[max(found)] if found else None
