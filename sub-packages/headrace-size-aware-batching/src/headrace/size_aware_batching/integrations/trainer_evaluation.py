"""Evaluation of a ``Trainer`` on batches of different numbers of samples: exact losses, rows in the dataset's order."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class EvaluationLoader:
    """The batches of this process, and the order in which all processes together deliver the samples.

    Args:
        loader: A loader over ``batches``, distributed over the processes.
        batches: The batch sampler of all ranks.
    """

    def __init__(self, loader: Any, batches: Any) -> None:
        self.dataset = loader.dataset  # a Trainer asks for its length
        self.order = np.fromiter(chain.from_iterable(batch.samples for batch in batches.batches_from()), np.int64)
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Deliver the batches of this process."""
        return iter(self._loader)


class WeightedMean:
    """A mean over all batches and processes, weighted by the number of targets of each batch."""

    def __init__(self, skips_not_finite: bool) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._skips_not_finite = skips_not_finite

    def add(self, mean: torch.Tensor, weight: torch.Tensor | int) -> None:
        """Add the mean of a batch; a batch without targets counts nothing, whatever its mean."""
        mean, weight = mean.detach().double().mean(), torch.as_tensor(weight, device=mean.device).double()
        counts = weight > 0
        if self._skips_not_finite:
            counts = counts & mean.isfinite()
        zero = torch.zeros((), dtype=torch.float64, device=mean.device)
        added = torch.stack([torch.where(counts, mean * weight, zero), torch.where(counts, weight, zero)])
        self._sums = self._sums.to(mean.device) + added

    def compute(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the mean, NaN without targets; ``reduce`` adds up the sums of all processes."""
        total, weight = reduce(self._sums).tolist()
        return total / weight if weight else float("nan")


def gather_rows(accelerator: Any, rows: Any) -> Any:
    """Gather tensors whose first dimensions differ from process to process; it keeps the order of the processes."""
    if accelerator.num_processes == 1:
        return rows
    utils = import_module("accelerate.utils")
    counts = accelerator.gather(torch.tensor([utils.find_batch_size(rows)], device=accelerator.device))
    padded = accelerator.pad_across_processes(rows, dim=0)
    kept = (torch.arange(int(counts.max()), device=counts.device) < counts[:, None]).flatten()
    return utils.recursively_apply(lambda gathered: gathered[kept], accelerator.gather(padded))


def in_order_of_dataset(values: Any, order: NDArray[np.int64]) -> Any:
    """Return arrays with a row for each sample in the order of the dataset, each sample once; others unchanged."""
    if isinstance(values, np.ndarray):
        return values[np.unique(order, return_index=True)[1]] if len(values) == len(order) else values
    if isinstance(values, Mapping):
        return {name: in_order_of_dataset(value, order) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(in_order_of_dataset(value, order) for value in values)
    return values


def metrics_in_order(compute_metrics: Callable[[Any], Any], order: NDArray[np.int64]) -> Callable[[Any], Any]:
    """Return ``compute_metrics`` for an evaluation whose rows come in another order than the dataset's."""
    return partial(_computed_in_order, compute_metrics, order)


def _computed_in_order(compute_metrics: Callable[[Any], Any], order: NDArray[np.int64], evaluated: Any) -> Any:
    rows = {name: in_order_of_dataset(getattr(evaluated, name), order) for name in ("predictions", "label_ids")}
    more = {name: getattr(evaluated, name) for name in ("inputs", "losses") if getattr(evaluated, name) is not None}
    if "inputs" in more:
        more["inputs"] = in_order_of_dataset(more["inputs"], order)
    return compute_metrics(type(evaluated)(**rows, **more))
