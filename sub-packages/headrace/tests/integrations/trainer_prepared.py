"""Trainer with a loader that accelerate prepares, and accumulated batches whose last group in an epoch is shorter."""

from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest  # type: ignore[import-not-found]
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import TrainerGuard

data, model = Texts(), Model()
batches = DistributedSizeAwareBatchSampler(data.sizes, 1000, rank="all")
arguments = TrainingArguments(
    str(CHECKPOINTS), num_train_epochs=EPOCHS, save_steps=EVERY, use_cpu=True, gradient_accumulation_steps=3
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TrainerGuard(batches)])
loader: DataLoader[dict[str, object]] = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)
trainer.train(resume_from_checkpoint=latest())
model.report()
