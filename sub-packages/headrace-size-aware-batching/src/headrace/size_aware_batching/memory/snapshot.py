"""Trial steps without side effects: copies of weights, optimizer and random state to restore."""

import random
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching.memory.device import uses_cuda

Optimizers: TypeAlias = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


def as_optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Return one optimizer, several or None as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


class HostCopy:
    """The bytes of a tensor; numpy holds them, so that they count in no device's memory, simulated ones included."""

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = _local(tensor).cpu().reshape(-1).contiguous()
        flat = flat.as_strided(flat.shape, (1,))  # a single number may have stride 0, of which there is no view
        self.bytes: NDArray[np.uint8] = flat.view(torch.uint8).numpy().copy()

    def restore(self, tensor: torch.Tensor) -> None:
        """Write the bytes back."""
        local = _local(tensor)
        if local.numel():  # a rank may have no part of a sharded tensor, and no bytes are no view of anything
            local.copy_(torch.from_numpy(self.bytes).view(local.dtype).reshape(local.shape))


def gradient_copies(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, HostCopy]]:
    """Return the existing gradients with copies of them, except sparse ones."""
    gradients = [p.grad for p in parameters if p.grad is not None and p.grad.layout == torch.strided]
    return [(gradient, HostCopy(gradient)) for gradient in gradients]


class DictCopy:
    """The values of a dict: the bytes of its tensors, which stay the same objects, and copies of all else."""

    def __init__(self, values: dict[str, Any], leave: str = "") -> None:
        self.leave = leave
        self.copies = {
            key: (value, HostCopy(value) if isinstance(value, torch.Tensor) else deepcopy(value))
            for key, value in values.items()
            if key != leave
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Put the values back, and drop those that are new."""
        for key in set(values) - set(self.copies) - {self.leave}:
            del values[key]
        for key, (value, copy) in self.copies.items():
            if isinstance(copy, HostCopy):
                copy.restore(value)
            values[key] = value if isinstance(copy, HostCopy) else deepcopy(copy)


class OptimizerCopy:
    """The parameters that an optimizer changes, its state and its options; ``restore`` drops new entries.

    Parameters in ``held`` are restored by others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, held: Container[torch.Tensor] = frozenset()) -> None:
        self.optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in held]
        self.parameters = [(p, HostCopy(p)) for p in parameters]
        self.options = [DictCopy(group, leave="params") for group in optimizer.param_groups]
        self.state = {parameter: DictCopy(entry) for parameter, entry in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back into the tensors that there were."""
        for parameter, copy in self.parameters:
            copy.restore(parameter)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            options.restore(group)
        for parameter in [p for p in self.optimizer.state if p not in self.state]:
            del self.optimizer.state[parameter]
        for parameter, entry in self.state.items():
            entry.restore(self.optimizer.state[parameter])


class TrainingState:
    """Weights, buffers and gradients of a model, its optimizers' state and all random states."""

    def __init__(self, model: torch.nn.Module | None, optimizer: Optimizers = None) -> None:
        self.parameters = [] if model is None else list(model.parameters())
        held = set(self.parameters)
        self.optimizers = [OptimizerCopy(each, held) for each in as_optimizers(optimizer)]
        tensors = [] if model is None else [*self.parameters, *model.buffers()]
        self.tensors = [(tensor, HostCopy(tensor)) for tensor in tensors]
        modules = () if model is None else model.modules()
        self.buffers = [(module, dict(module.named_buffers(recurse=False))) for module in modules]
        self.gradients = [None if p.grad is None else (p.grad, HostCopy(p.grad)) for p in self.parameters]
        self.random: tuple[Any, ...] = (
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 -- users' augmentations draw from it
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if uses_cuda() else [],  # the current device may be another one
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient[0]
            if gradient is not None:
                gradient[1].restore(gradient[0])
        for tensor, copy in self.tensors:
            copy.restore(tensor)
        for module, buffers in self.buffers:
            for name, buffer in buffers.items():
                current = getattr(module, name, None)  # one of another shape is a cache that has grown
                if current is not buffer and current is not None and current.shape == buffer.shape:
                    setattr(module, name, buffer)
        for optimizer in self.optimizers:
            optimizer.restore()
        python, numbers, torch_state, devices = self.random
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002 -- see above
        torch.set_rng_state(torch_state)
        if devices:
            torch.cuda.set_rng_state_all(devices)


@contextmanager
def unchanged(model: torch.nn.Module | None, optimizer: Optimizers = None) -> Iterator[TrainingState]:
    """Put weights, gradients, optimizer state and random states back at the end of the block."""
    state = TrainingState(model, optimizer)
    try:
        yield state
    finally:
        state.restore()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without its graph."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
