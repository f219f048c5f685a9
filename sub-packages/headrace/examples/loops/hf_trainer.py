"""Hugging Face Trainer, on any number of processes: `torchrun --nproc-per-node=2 hf_trainer.py`."""

import gc
from typing import Any

import torch.distributed as dist
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin


class TextTrainer(SizeAwareTrainerMixin, Trainer):  # type: ignore[misc]  # transformers has no types here
    """Reads batches of at most so many tokens."""


data, model = Texts(), Model()
options: dict[str, Any] = {"use_cpu": True, "dataloader_num_workers": WORKERS}
arguments = TrainingArguments(str(CHECKPOINTS), num_train_epochs=EPOCHS, save_steps=EVERY, **options)
batches: dict[str, Any] = {"max_tokens_per_batch": 1000, "sampler_options": {"cost": "sum"}}
trainer = TextTrainer(model, arguments, train_dataset=data, data_collator=collate, **batches)
trainer.train(resume_from_checkpoint=latest())
model.report()
if dist.is_initialized():
    trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    dist.destroy_process_group()
