"""Small models and trainers with `SizeAwareTrainerMixin`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from counting import SIZES
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from headrace.size_aware_batching import PaddedCollate
from headrace.size_aware_batching.integrations import SizeAwareTrainerMixin

BUDGET = 500
QUIET: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True}


class MyTrainer(SizeAwareTrainerMixin, Trainer):  # type: ignore[misc]  # of a library that may not be there
    """The shortest trainer by size."""


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Numbered texts of `SIZES` tokens."""

    def __init__(self, n: int = len(SIZES)) -> None:
        self.sizes = SIZES[:n]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor(index), "tokens": torch.ones(int(self.sizes[index]))}


class Counting(torch.nn.Module):
    """Counts how often it was trained on each sample, and the most tokens of a batch, with padding."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.register_buffer("seen", torch.zeros(len(SIZES), dtype=torch.int64))
        self.most = 0

    def forward(self, ids: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        self.most = max(self.most, tokens.numel())
        if self.training:
            self.seen += torch.bincount(ids, minlength=len(SIZES))
        kept = torch.nn.functional.dropout(self.weight, training=self.training)
        return {"loss": (kept.sum() - ids.float().mean()).square() * 1e-5, "rows": ids[:, None].repeat(1, 2)}


def trainer_of(folder: Path, n: int = len(SIZES), options: Any = None, accept: Any = (), **arguments: Any) -> Any:
    return MyTrainer(
        Counting(),
        TrainingArguments(str(folder), **{"num_train_epochs": 2, "save_steps": 5, **QUIET, **arguments}),
        train_dataset=Texts(n),
        eval_dataset=Texts(60),
        data_collator=PaddedCollate(),
        max_tokens_per_batch=BUDGET,
        sampler_options=options,
        accept=accept,
    )


def tokens(n: int = 60) -> Dataset:
    rows = [(np.arange(size) * (1 + number % 7) + 4) % 97 for number, size in enumerate(SIZES[:n].tolist())]
    return Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, initializer_range=0.5, pad_token_id=0, eos_token_id=1, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2}
    plain = Tokenizer(models.WordLevel({**special, **{f"w{n}": n for n in range(3, 97)}}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def causal_loss(model: Any, rows: list[list[int]]) -> float:
    """The mean over all targets, one text after the other."""
    model.eval()
    with torch.no_grad():
        batches = [torch.tensor([row]) for row in rows]
        losses = [float(model(input_ids=ids, labels=ids).loss) * (ids.numel() - 1) for ids in batches]
    return sum(losses) / sum(len(row) - 1 for row in rows)
