"""Training with tokens_per_step: real trainers and ranks, whose weights are those of one rank."""

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import steps_worker
import torch
from processes import run_ranks
from torch.utils.data import DataLoader

from headrace.size_aware_batching.callbacks import BatchesOfStep, TokensPerStep


def of_two_ranks(train: Callable[[], Any], folder: Path) -> list[Any]:
    return run_ranks(partial(steps_worker.of_rank, train), 2, folder)


@pytest.mark.slow
def test_a_plain_loop_on_two_ranks_trains_the_weights_of_one(tmp_path: Path) -> None:
    alone = steps_worker.loop()
    for weights in of_two_ranks(steps_worker.loop, tmp_path):
        np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning_on_two_ranks_trains_the_weights_of_one(tmp_path: Path) -> None:
    alone, updates, accumulated = steps_worker.fit()
    sampler = steps_worker.sampler_of()
    assert updates == sum(sampler.num_optimizer_steps(epoch) for epoch in range(steps_worker.EPOCHS))
    assert len(set(accumulated)) > 2  # two stages and shorter steps at the end
    for weights, updates_of_rank, accumulated_of_rank in of_two_ranks(steps_worker.fit, tmp_path):
        np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-12)
        assert updates_of_rank == updates
        assert sum(accumulated_of_rank) < sum(accumulated)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_that_read_ahead_change_nothing() -> None:
    assert steps_worker.fit(workers=2) == steps_worker.fit()
    assert steps_worker.loop(workers=2) == steps_worker.loop()


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.parametrize("callbacks", [[], [TokensPerStep()]], ids=["without", "with"])
def test_a_fit_without_the_callback_is_warned(callbacks: list[lightning.Callback]) -> None:
    sampler = steps_worker.sampler_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trainer = trainer_of(callbacks)
        trainer.fit(steps_worker.Module(sampler))
    said = [str(one.message) for one in caught if "nothing asked which batches belong to a step" in str(one.message)]
    if callbacks:
        assert (said, trainer.global_step) == ([], sampler.num_optimizer_steps(0))
    else:
        assert len(said) == 1
        assert trainer.global_step > sampler.num_optimizer_steps(0)


def test_batches_of_a_step_are_counted_from_its_first() -> None:
    batches = BatchesOfStep(4, first=6)
    assert [number % batches for number in range(6, 12)] == [0, 1, 2, 3, 0, 1]
    assert torch.tensor(2.0) / batches == 0.5
    assert 7 % pickle.loads(pickle.dumps(batches)) == 1


class Without(steps_worker.Module):
    def train_dataloader(self) -> Any:
        return DataLoader(steps_worker.dataset(), collate_fn=torch.cat)  # type: ignore[arg-type]  # a list is a dataset


def trainer_of(callbacks: list[lightning.Callback] | None = None, **options: Any) -> lightning.Trainer:
    callbacks = [TokensPerStep()] if callbacks is None else callbacks
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=callbacks, **quiet, **options
    )


@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_what_a_trainer_cannot_follow_is_refused() -> None:
    sampler = steps_worker.sampler_of()
    with pytest.raises(ValueError, match="accumulate_grad_batches must be 1 for TokensPerStep, got 2"):
        trainer_of(accumulate_grad_batches=2).fit(steps_worker.Module(sampler))
    with pytest.raises(ValueError, match=r"must have tokens_per_step for TokensPerStep, got a DataLoader"):
        trainer_of().fit(Without(sampler))
    manual = steps_worker.Module(sampler)
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="TokensPerStep needs automatic optimization"):
        trainer_of().fit(manual)
