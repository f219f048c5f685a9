"""Trainer with steps of so many tokens: another number of processes, another number of accumulated batches."""

from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest  # type: ignore[import-not-found]
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import OptimizerStepBatchSampler
from headrace.size_aware_batching.integrations import TrainerGuard

data, model = Texts(), Model()
batches = OptimizerStepBatchSampler(data.sizes, 1000, tokens_per_step=5500)
arguments = TrainingArguments(
    str(CHECKPOINTS),
    num_train_epochs=EPOCHS,
    save_steps=EVERY,
    use_cpu=True,
    gradient_accumulation_steps=batches.accumulate,
)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TrainerGuard(batches)])
loader: DataLoader[dict[str, object]] = DataLoader(data, batch_sampler=batches, collate_fn=collate, num_workers=WORKERS)
trainer.get_train_dataloader = lambda: loader
trainer.train(resume_from_checkpoint=latest())
model.report()
