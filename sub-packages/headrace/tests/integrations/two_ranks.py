"""What accelerate does with samplers that are distributed already, in two processes; prints a line of JSON."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object
from torch.utils.data import BatchSampler, DataLoader

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    BucketBatchSampler,
    DistributedSizeAwareBatchSampler,
    SizeAwareBatchSampler,
)
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler

SIZES = np.random.default_rng(0).integers(5, 121, 601)
DATA = [torch.tensor(number) for number in range(len(SIZES))]
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def prepared(**options: Any) -> Any:
    return accelerator.prepare(DataLoader(DATA, **options))  # type: ignore[arg-type]  # a list is a dataset too


def counted(batches: Iterable[torch.Tensor]) -> dict[int, int]:
    """How many samples came how often, in all processes together."""
    counts = torch.zeros(len(DATA), dtype=torch.int64)
    for batch in batches:
        counts += torch.bincount(batch, minlength=len(DATA))
    dist.all_reduce(counts)
    return dict(Counter(counts.tolist()))


def size_aware(**options: Any) -> DistributedSizeAwareBatchSampler:
    return DistributedSizeAwareBatchSampler(SIZES, 1000, **options)


def weighted(**options: Any) -> WeightedDistributedSampler:
    return WeightedDistributedSampler(DATA, {(0, len(DATA)): 1}, **options)


def streamed(workers: int = 0, **options: Any) -> Any:
    stream = InterleavedDataset({"data": range(len(DATA))}, {"data": 1}, **options)
    return accelerator.prepare(DataLoader(stream, batch_size=4, num_workers=workers))


def gradient_error() -> float:
    """Largest error against the mean over all rows of a step: of both ranks, of three batches or fewer at the end."""
    accelerator.gradient_accumulation_steps = 3
    loader, model = prepared(batch_sampler=size_aware(rank="all")), torch.nn.Linear(1, 1)
    parallel, worst, group = accelerator.prepare(model), 0.0, list[torch.Tensor]()
    for batch in loader:
        group.append(batch[:, None] / len(DATA))
        if len(group) < 3 and not loader.end_of_dataloader:
            continue
        total = accelerator.reduce(torch.tensor(float(sum(map(len, group)))))
        for rows in group:
            with accelerator.accumulate(parallel):
                # Gradients are averaged over the processes, and backward divides by the accumulated batches.
                scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / total
                accelerator.backward(parallel(rows).square().sum() * scale)
        own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        model(torch.cat(gather_object(group))).square().mean().backward()
        wanted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        worst = max([worst, *(float((a - b).abs().max()) for a, b in zip(own, wanted, strict=True))])
        model.zero_grad()
        group.clear()
    return worst


found: dict[str, Any] = {
    "batches of a rank": error_of(lambda: list(prepared(batch_sampler=size_aware()))),
    "samples of a rank": error_of(lambda: list(prepared(sampler=weighted(), batch_size=4))),
    "batches of all": counted(prepared(batch_sampler=size_aware(rank="all"))),
    "samples of all": counted(prepared(sampler=weighted(num_replicas=1, rank=0), batch_size=4)),
    "mixture of all": counted(prepared(batch_sampler=size_aware(rank="all", sampler=weighted(num_replicas=1, rank=0)))),
    "without workers": counted(DataLoader(DATA, batch_sampler=size_aware())),  # type: ignore[arg-type]  # see above
}
accelerator.dataloader_config.dispatch_batches = False
found["streams of a rank"] = [
    error_of(lambda: list(streamed(0))),
    error_of(lambda: list(streamed(1))),
]
accelerator.dataloader_config.dispatch_batches = None
loader = ResumableLoader(DATA, size_aware())
found["left alone"] = accelerator.prepare(loader) is loader
found["not prepared"] = counted(loader)
accelerator.dataloader_config.even_batches = True
found["evened"] = counted(prepared(batch_sampler=size_aware(rank="all")))
found["gradients"] = gradient_error()

accelerator.dataloader_config.dispatch_batches = True
found["dispatched"] = counted(prepared(batch_sampler=DistributedBatchSampler(600, 10, num_replicas=1, rank=0)))
if accelerator.is_main_process:  # which alone reads these loaders, and is to fail before the others wait for it
    found["cut"] = [
        error_of(partial(list, prepared(batch_sampler=batches, num_workers=workers)))
        for batches in (
            size_aware(),
            size_aware(rank="all"),
            BlockwiseSizeAwareBatchSampler([SIZES], 1000, rank="all"),
            SizeAwareBatchSampler(range(601), SIZES, 1000),
            BucketBatchSampler(torch.tensor(SIZES), [0, 60, 121], BatchSampler, {"batch_size": 4, "drop_last": False}),
        )
        for workers in (0, 1)
    ]
    found["lost"] = [
        error_of(lambda: list(prepared(batch_sampler=DistributedBatchSampler(601, 7)))),
        error_of(lambda: list(prepared(sampler=weighted(), batch_size=4))),
        error_of(lambda: list(prepared(sampler=weighted(), batch_size=4, num_workers=1))),
    ]
    print(json.dumps(found), flush=True)
accelerator.end_training()
os._exit(0)  # DistributedDataParallel keeps gloo's threads, which race with the end of the interpreter and may abort
