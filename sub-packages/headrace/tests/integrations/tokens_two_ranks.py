"""Training with tokens_per_step in two processes of accelerate, and of a Trainer; prints a line of JSON."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import OptimizerStepBatchSampler, global_num_tokens, token_weighted_loss
from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin
from headrace.webdatamodule import ResumableLoader

LENGTHS = np.random.default_rng(0).integers(5, 60, 302)
DATA = [
    torch.sin(torch.arange(n * 3, dtype=torch.float64) * (1 + number)).view(n, 3) for number, n in enumerate(LENGTHS)
]
TOKENS = 1500


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    x = torch.cat(samples)
    return {"x": x, "labels": torch.ones(len(x), dtype=torch.int64)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()

    def forward(  # a Trainer gives the number of targets to a model that takes any keywords
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        total = (self.layers(x)[:, 0] - 0.3 * labels).square().sum()
        return {"loss": total if num_items_in_batch is None else total / num_items_in_batch}


def weights(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def sampler_of(**options: Any) -> OptimizerStepBatchSampler:
    return OptimizerStepBatchSampler(LENGTHS, 300, tokens_per_step=TOKENS, **options)


def with_accelerate(loader_of: Callable[[], tuple[Any, Any]]) -> tuple[list[float], int]:
    model, updates = Model(), 0
    parallel, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sampler, loader = loader_of()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for micro_batches in sampler.optimizer_steps(loader):
            total = global_num_tokens(batch["labels"] for batch in micro_batches)
            for number, batch in enumerate(micro_batches, 1):
                with accelerator.no_sync(parallel) if number < len(micro_batches) else nullcontext():
                    accelerator.backward(token_weighted_loss(parallel(**batch)["loss"], total))
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return weights(model), updates


def registered() -> tuple[Any, Any]:
    sampler = sampler_of()
    return sampler, ResumableLoader(DATA, sampler, collate_fn=collate)


def prepared() -> tuple[Any, Any]:
    sampler = sampler_of(rank="all")
    loader: Any = DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]  # a list is a dataset
    return sampler, accelerator.prepare(loader)


class TokenTrainer(SizeAwareTrainerMixin, Trainer):  # type: ignore[misc]  # of a library that may not be there
    def sizes_of(self, dataset: Any) -> Any:
        return LENGTHS


def with_trainer() -> tuple[list[float], int]:
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=2,
        gradient_accumulation_steps=6,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    trainer: Any = TokenTrainer(
        Model(),
        arguments,
        train_dataset=DATA,
        data_collator=collate,
        max_tokens_per_batch=300,
        sampler_options={"cost": "sum", "tokens_per_step": TOKENS},
    )
    trainer.train()
    return weights(trainer.model), trainer.state.global_step


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=True))
found = {
    "registered": with_accelerate(registered),
    "prepared": with_accelerate(prepared),
    "trainer": with_trainer(),
    "steps": sum(sampler_of().num_optimizer_steps(epoch) for epoch in range(2)),
    "whole steps": sum(sampler_of(tail="drop").num_optimizer_steps(epoch) for epoch in range(2)),
}
if accelerator.is_main_process:
    print(json.dumps(found))
    sys.stdout.flush()
accelerator.wait_for_everyone()
os._exit(0)  # DistributedDataParallel keeps gloo's threads, which race with the end of the interpreter and may abort
