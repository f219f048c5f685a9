"""A causal language model in Hugging Face's Trainer, resumed on any number of processes.

`torchrun --nproc-per-node=2 train.py`, killed at any time and started again on one process or
two, takes the same optimizer steps. Each has the same number of tokens, in batches that are
padded to their longest text and never exceed the budget. The loss and the figures of the
evaluation are means over tokens. Put your data in place of `made_up`, and your model in place
of the small Llama.
"""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from headrace.size_aware_batching import PaddedCollate
from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin

CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
BUDGET = 1024  # most tokens in a batch on one process, with padding: what its memory allows
TOKENS = 6000  # of an optimizer step, on all processes together, without padding
BATCHES = 10  # of an optimizer step, on all processes together
VOCABULARY = 97


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Tokenized texts; `lengths` are their numbers of tokens."""

    def __init__(self, texts: list[torch.Tensor]) -> None:
        self.texts = texts
        self.lengths = np.array([len(text) for text in texts])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return what the model takes; it shifts the labels itself."""
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


class TokenTrainer(SizeAwareTrainerMixin, Trainer):  # type: ignore[misc]  # transformers has no types here
    """Trains and evaluates on batches of at most so many tokens."""

    def sizes_of(self, dataset: Texts) -> Any:
        """Return the number of tokens of each text."""
        return dataset.lengths


def accuracy(evaluated: Any) -> dict[str, float]:
    """Return the share of the tokens that the model predicts: a token is the target of the one before."""
    targets, predicted = evaluated.label_ids[:, 1:], evaluated.predictions[:, :-1]
    return {"accuracy": float((predicted == targets)[targets != -100].mean())}


def made_up(count: int, seed: int) -> Texts:
    """Return texts of 8 to 400 tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4, 0.8, count), 8, 400).astype(int)
    return Texts([(torch.arange(length) * int(rng.integers(1, 9))) % VOCABULARY for length in lengths])


def main() -> None:
    """Train from the latest checkpoint on, if there is one."""
    train, validation = made_up(800, seed=0), made_up(100, seed=1)
    arguments = TrainingArguments(
        CHECKPOINTS,
        num_train_epochs=3,
        gradient_accumulation_steps=BATCHES // PROCESSES,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=1,
        save_steps=5,
        dataloader_num_workers=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)  # the same weights on all processes, and in another run
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    trainer = TokenTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)),
        arguments,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=PaddedCollate({"labels": -100}, return_mask=True),
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),  # what accuracy needs of them
        compute_metrics=accuracy,
        max_tokens_per_batch=BUDGET,
        sampler_options={"tokens_per_step": TOKENS},
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(CHECKPOINTS) if Path(CHECKPOINTS).exists() else None)
    trainer.accelerator.free_memory()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # the Trainer leaves the group open, and its threads may abort the process at its exit
        gc.collect()
        dist.destroy_process_group()
