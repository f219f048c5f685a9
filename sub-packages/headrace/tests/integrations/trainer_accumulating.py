"""Trainer with `ACCUMULATE` batches in an optimizer step on each process."""

import os

from task import CHECKPOINTS, EPOCHS, EVERY, WORKERS, Model, Texts, collate, latest  # type: ignore[import-not-found]
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin


class TextTrainer(SizeAwareTrainerMixin, Trainer):  # type: ignore[misc]  # transformers has no types here
    pass


data, model = Texts(), Model()
arguments = TrainingArguments(
    str(CHECKPOINTS),
    num_train_epochs=EPOCHS,
    save_steps=EVERY,
    use_cpu=True,
    dataloader_num_workers=WORKERS,
    gradient_accumulation_steps=int(os.environ["ACCUMULATE"]),
)
trainer = TextTrainer(
    model,
    arguments,
    train_dataset=data,
    data_collator=collate,
    max_tokens_per_batch=1000,
    sampler_options={"cost": "sum"},
)
trainer.train(resume_from_checkpoint=latest())
model.report()
