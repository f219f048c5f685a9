"""Hugging Face Trainer: `torchrun --nproc-per-node=2 hf_trainer.py`."""

import gc

import torch.distributed as dist
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import TrainerGuard

data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
arguments = TrainingArguments(str(CHECKPOINTS), num_train_epochs=EPOCHS, save_steps=EVERY, use_cpu=True)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TrainerGuard(batches)])
trainer.get_train_dataloader = lambda: DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
trainer.train(resume_from_checkpoint=latest())
model.report()
if dist.is_initialized():
    trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    dist.destroy_process_group()
