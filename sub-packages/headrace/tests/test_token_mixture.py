"""Shares by tokens through shards, a token budget, workers and a real Trainer."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule, write_shards
from headrace.weighted_sampler import WeightedDistributedSampler

SHARES, MEDIANS, COUNTS = {"books": 0.2, "chat": 0.1, "web": 0.7}, (900, 40, 200), (300, 2000, 1500)
BUDGET = 8192


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], np.ndarray[Any, Any]]:
    """Shards of three sources, and the tokens of all samples: here a byte is a token."""
    home, sizes = tmp_path_factory.mktemp("corpus"), []
    for number, (name, median, count) in enumerate(zip(SHARES, MEDIANS, COUNTS, strict=True)):
        drawn = np.random.default_rng(number).lognormal(np.log(median), 0.8, count)
        sizes.append(np.clip(drawn, 1, 4000).astype(np.int64))
        samples = [(f"{name}{at:05d}", {"txt": b"x" * int(size)}) for at, size in enumerate(sizes[-1])]
        write_shards(samples, home / name, n_shards=3)
    return {name: home / name for name in SHARES}, np.concatenate(sizes)


def keys_and_tokens(samples: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = torch.tensor([len(sample["txt"]) for sample in samples], dtype=torch.float32)
    return {"source": [sample["__key__"][:-5] for sample in samples], "tokens": sizes}


class Model(lightning.LightningModule):
    """Notes the source and the tokens of each sample that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[str, int]] = []
        self.largest = 0

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        tokens = batch["tokens"].int().tolist()
        self.seen += zip(batch["source"], tokens, strict=True)
        self.largest = max(self.largest, sum(tokens))
        loss: torch.Tensor = self.layer(batch["tokens"][:, None]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def shares(seen: list[tuple[str, int]]) -> dict[str, float]:
    total = sum(tokens for _, tokens in seen)
    return {name: sum(tokens for source, tokens in seen if source == name) / total for name in SHARES}


@pytest.mark.parametrize("strategy", ["stratified", "sequential"])
def test_a_fit_over_shards_sees_the_token_shares(corpus: Any, strategy: Any) -> None:
    folders, sizes = corpus
    data = IndexedWebDataModule(
        {"train": folders},
        sampler=partial(WeightedDistributedSampler, weights=SHARES, per="token", sizes=sizes, epoch_length=4000),
        batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET, strategy=strategy),
        sizes="txt",
        collate_fn=keys_and_tokens,
        num_workers=1,
        seed=3,
    )
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, barebones=True
    )
    trainer.fit(model, datamodule=data)
    assert len(model.seen) == 2 * 4000
    assert model.largest <= BUDGET
    within = 3 * sizes.max() / sum(tokens for _, tokens in model.seen)
    assert shares(model.seen) == pytest.approx(SHARES, abs=within)
    if strategy == "sequential":  # in the order of the mixture: every stretch has its shares
        for begin in range(0, 8000 - 500, 100):
            stretch = model.seen[begin : begin + 500]
            within = 3 * sizes.max() / sum(tokens for _, tokens in stretch)
            assert shares(stretch) == pytest.approx(SHARES, abs=within)


def test_ranks_of_batches_by_tokens_share_the_mixture(corpus: Any) -> None:
    folders, sizes = corpus
    seen: list[tuple[str, int]] = []
    for rank in range(3):
        data = IndexedWebDataModule(
            {"train": folders},
            sampler=partial(WeightedDistributedSampler, weights=SHARES, per="token", sizes=sizes, epoch_length=3000),
            batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=BUDGET),
            sizes="txt",
            collate_fn=keys_and_tokens,
            seed=3,
            num_replicas=3,
            rank=rank,
        )
        data.setup("fit")
        for batch in data.train_dataloader():
            seen += zip(batch["source"], batch["tokens"].int().tolist(), strict=True)
    assert len(seen) == 3000
    total = sum(tokens for _, tokens in seen)
    assert shares(seen) == pytest.approx(SHARES, abs=2 * sizes.max() / total)
