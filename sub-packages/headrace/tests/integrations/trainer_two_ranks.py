"""Trains, evaluates and predicts by size in the processes of torchrun; prints a line of JSON."""

import json
import os
import sys
import tempfile
from typing import Any

import torch
from trainers import BUDGET, QUIET, MyTrainer, llama, tokens
from transformers import TrainingArguments

from headrace.size_aware_batching import PaddedCollate

world = int(os.environ.get("WORLD_SIZE", "1"))


def accuracy(evaluated: Any) -> dict[str, float]:
    targets = evaluated.label_ids[:, 1:]
    return {"accuracy": float((evaluated.predictions[:, :-1] == targets)[targets != -100].mean())}


data = tokens()
data = data.add_column("labels", data["input_ids"][:])
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    gradient_accumulation_steps=4 // world,
    num_train_epochs=1,
    save_strategy="no",
    optim="sgd",
    **QUIET,
)
trainer: Any = MyTrainer(
    llama(),
    arguments,
    train_dataset=data,
    eval_dataset=data,
    data_collator=PaddedCollate({"labels": -100}, return_mask=True),
    preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    compute_metrics=accuracy,
    max_tokens_per_batch=BUDGET,
)
figures = trainer.evaluate()
predicted = trainer.predict(data)
trainer.train()
lengths = [len(row) for row in data["input_ids"]]
found = {
    "eval_loss": figures["eval_loss"],
    "eval_accuracy": figures["eval_accuracy"],
    "test_loss": predicted.metrics["test_loss"],
    "labels": [row[row != -100].tolist() for row in predicted.label_ids],
    "predictions": [
        row[:n].tolist() for row, n in zip(predicted.predictions, map(len, data["input_ids"]), strict=True)
    ],
    "weights": torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]).tolist(),
}
if trainer.is_world_process_zero():
    print(json.dumps(found))
    sys.stdout.flush()
trainer.accelerator.wait_for_everyone()
os._exit(0)  # DistributedDataParallel keeps gloo's threads, which race with the end of the interpreter and may abort
