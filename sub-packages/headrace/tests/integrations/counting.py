"""A model that counts how often it was trained on each sample, and a callback that changes the run."""

from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

SIZES = np.random.default_rng(0).integers(5, 121, 203)
DATA = [{"ids": torch.tensor(number)} for number in range(len(SIZES))]


class Model(torch.nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(len(DATA), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += torch.bincount(ids, minlength=len(DATA))
        return {"loss": (self.weight - ids.float().mean()).square() * 1e-9}


class Change(TrainerCallback):  # type: ignore[misc]  # of a library that may not be there
    """Calls a function with an object behind a step, and ends training behind another one."""

    def __init__(self, changed: Any, step: int, change: Any, end: int | None = None) -> None:
        self.changed, self.step, self.change, self.end = changed, step, change, end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.change(self.changed)
        control.should_training_stop |= state.global_step == self.end
