"""A function whose backward pass runs out of memory."""

from typing import Any

import torch


class FailsBackward(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


fails_backward: Any = FailsBackward.apply
