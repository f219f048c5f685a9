"""A Trainer over torch's `DataLoader` with a `TrainerGuard`, in one process: changes of the run, and resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import DATA, SIZES, Change, Model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching.integrations import TrainerGuard
from headrace.weighted_sampler import WeightedDistributedSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def trainer_of(folder: Path, batches: Any, epochs: int = 2) -> Any:
    arguments = TrainingArguments(
        str(folder), num_train_epochs=epochs, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer: Any = Trainer(Model(), arguments, train_dataset=DATA, callbacks=[TrainerGuard(batches)])
    trainer.get_train_dataloader = lambda: DataLoader(DATA, batch_sampler=batches)  # type: ignore[arg-type]
    return trainer


def sampler(excluded: list[int] | None = None) -> DistributedSizeAwareBatchSampler:
    batches = DistributedSizeAwareBatchSampler(SIZES, 500)
    batches.exclude(excluded or [])
    return batches


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda batches: batches.exclude([3]), "exclude"),
        (lambda batches: batches.exclude(range(40)), "exclude"),
        (lambda batches: batches.skip(2), "skip"),
        (lambda batches: (batches.exclude([3]), batches.skip(2)), "exclude and skip"),
    ],
)
def test_a_change_in_mid_epoch_ends_training_before_a_checkpoint_holds_it(
    tmp_path: Path, change: Callable[[Any], object], names: str
) -> None:
    batches = sampler()
    trainer = trainer_of(tmp_path, batches)
    trainer.add_callback(Change(batches, 4, change))
    with pytest.raises(ValueError, match=f"{names} of the sampler must not be called in a run of a Trainer.* A Tr"):
        trainer.train()
    assert trainer.state.global_step == 5
    resumed = trainer_of(tmp_path, sampler())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.seen.tolist() == [2] * len(DATA)


def test_a_change_between_two_epochs_is_named(tmp_path: Path) -> None:
    batches = sampler()
    trainer = trainer_of(tmp_path, batches)
    trainer.add_callback(Change(batches, len(batches), lambda batches: batches.exclude(range(40))))
    with pytest.raises(ValueError, match="exclude of the sampler must not be called in a run of a Trainer"):
        trainer.train()


def test_samples_that_are_left_out_before_training_stay_so_in_a_resumed_run(tmp_path: Path) -> None:
    out = list(range(0, len(DATA), 4))
    first = trainer_of(tmp_path, sampler(out))
    first.add_callback(Change(None, 7, id, end=7))
    first.train()
    for excluded in ([], out[1:], [*out, 1]):
        with pytest.raises(ValueError, match=r"exclude of the sampler must not be called .* before each train"):
            trainer_of(tmp_path, sampler(excluded)).train(resume_from_checkpoint=True)
    resumed = trainer_of(tmp_path, sampler(out))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.seen.tolist() == [2 * (number % 4 > 0) for number in range(len(DATA))]


def mixture() -> WeightedDistributedSampler:
    return WeightedDistributedSampler(DATA, {(0, 100): 2, (100, 203): 1}, epoch_length=400, num_replicas=1, rank=0)


def of_mixture(folder: Path, mixed: WeightedDistributedSampler) -> Any:
    trainer = trainer_of(folder, mixed)
    trainer.get_train_dataloader = lambda: DataLoader(DATA, sampler=mixed, batch_size=8)  # type: ignore[arg-type]
    return trainer


def test_a_mixture_without_a_batch_sampler_resumes_exactly(tmp_path: Path) -> None:
    mixed = mixture()
    drawn = list(mixed)
    mixed.set_epoch(1)
    wanted = torch.bincount(torch.tensor(drawn + list(mixed)), minlength=len(DATA))
    first = of_mixture(tmp_path, mixed)
    first.add_callback(Change(None, 57, id, end=57))
    first.train()
    resumed = of_mixture(tmp_path, mixture())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.seen.tolist() == wanted.tolist()


def test_weights_that_change_in_a_run_end_training(tmp_path: Path) -> None:
    batches = DistributedSizeAwareBatchSampler(SIZES, 500, sampler=mixture(), window=64, num_replicas=1, rank=0)
    trainer = trainer_of(tmp_path, batches, 1)
    trainer.add_callback(Change(batches, 3, lambda batches: batches.reweight({(0, 100): 1, (100, 203): 1})))
    with pytest.raises(ValueError, match="reweight of the sampler must not be called in a run of a Trainer"):
        trainer.train()


def test_steps_that_are_skipped_before_training_are_refused(tmp_path: Path) -> None:
    batches = sampler()
    batches.skip(2)
    with pytest.raises(ValueError, match="skip of the sampler must not be called in a run of a Trainer"):
        trainer_of(tmp_path, batches).train()
