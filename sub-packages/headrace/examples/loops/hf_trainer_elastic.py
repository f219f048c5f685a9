"""Hugging Face Trainer, resumed on any number of processes: `torchrun --nproc-per-node=2 hf_trainer_elastic.py`."""

import gc

import torch.distributed as dist
from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import TrainerLoader
from headrace.webdatamodule import ResumableLoader

data, model, path = Texts(), Model(), latest()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000)
loader = TrainerLoader(ResumableLoader(data, batches, collate_fn=collate, num_workers=WORKERS))
steps = {"max_steps": loader.max_steps(EPOCHS, path), "ignore_data_skip": True, "save_steps": EVERY}
arguments = TrainingArguments(str(CHECKPOINTS), use_cpu=True, **steps)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[loader])
trainer.get_train_dataloader = lambda: loader
trainer.train(resume_from_checkpoint=path)
model.report()
if dist.is_initialized():
    trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    dist.destroy_process_group()
