"""A Trainer over a `TrainerLoader` in one process: its epochs, its checkpoints at their ends, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import DATA, SIZES, Change, Model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.size_aware_batching.integrations import TrainerLoader
from headrace.webdatamodule import ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def trainer_of(
    folder: Path,
    epochs: int = 2,
    path: Path | None = None,
    strategy: Any = "stratified",
    n: int = len(DATA),
    **options: Any,
) -> Any:
    batches = DistributedSizeAwareBatchSampler(SIZES[:n], 500, strategy=strategy)
    loader = TrainerLoader(ResumableLoader(DATA[:n], batches), accept={"data"})
    arguments = TrainingArguments(
        str(folder),
        **{
            "max_steps": loader.max_steps(epochs, path),
            "ignore_data_skip": True,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    trainer: Any = Trainer(Model(), arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=[loader])
    trainer.get_train_dataloader = lambda: loader
    return trainer


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next_one(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, 1, save_strategy="epoch")
    first.train()
    assert first.model.seen.tolist() == [1] * len(DATA)
    path = tmp_path / f"checkpoint-{first.state.global_step}"
    second = trainer_of(tmp_path, 3, path, save_strategy="epoch", eval_strategy="epoch")
    second.train(resume_from_checkpoint=str(path))
    assert second.model.seen.tolist() == [3] * len(DATA)
    assert second.state.global_step == second.state.max_steps == 3 * first.state.global_step
    assert [entry["epoch"] for entry in second.state.log_history if "eval_runtime" in entry] == [2, 3]


def test_epochs_of_different_lengths_are_whole(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 4, strategy="sequential", save_steps=7)
    assert trainer.args.max_steps % 4
    trainer.train()
    assert trainer.model.seen.tolist() == [4] * len(DATA)
    resumed = trainer_of(tmp_path, 4, tmp_path / "checkpoint-28", strategy="sequential")
    assert resumed.args.max_steps == trainer.args.max_steps
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-28"))
    assert resumed.model.seen.tolist() == [4] * len(DATA)


def test_max_steps_of_ones_own_end_the_training_inside_an_epoch(tmp_path: Path) -> None:
    steps = trainer_of(tmp_path, 1).args.max_steps
    trainer = trainer_of(tmp_path, max_steps=steps + 2)
    trainer.train()
    assert trainer.state.epoch == pytest.approx(1 + 2 / steps)
    assert set(trainer.model.seen.tolist()) == {1, 2}


@pytest.mark.parametrize("at", [5, "last of an epoch", "last"])
@pytest.mark.parametrize("save", [3, 8])
def test_a_training_ends_with_its_epochs_where_samples_are_left_out(tmp_path: Path, at: Any, save: int) -> None:
    out, whole = list(range(0, 203, 4)), trainer_of(tmp_path, 1).args.max_steps
    at = {"last of an epoch": whole, "last": 2 * whole}.get(at, at)
    trainer = trainer_of(tmp_path, 2, save_steps=save)
    loader = trainer.get_train_dataloader()._loader
    trainer.add_callback(Change(loader, at, lambda loader: loader.exclude(out)))
    trainer.train()
    seen = trainer.model.seen
    kept = [number for number in range(len(DATA)) if number not in out]
    assert seen[kept].tolist() == [2] * len(kept)
    assert max(seen.tolist()) <= 2
    assert trainer.state.epoch == 2
    assert trainer.state.global_step == trainer.state.max_steps == loader.run_steps
    assert sum(map(len, (loader.step(number)[0] for number in range(loader.run_steps)))) == seen.sum()
    path = max(tmp_path.glob("checkpoint-*"), key=lambda one: int(one.name.split("-")[1]))
    resumed = trainer_of(tmp_path, 3, path)
    resumed.train(resume_from_checkpoint=str(path))
    assert resumed.model.seen[kept].tolist() == [3] * len(kept)
    assert resumed.state.global_step == resumed.get_train_dataloader()._loader.run_steps


def test_a_training_ends_with_its_epochs_where_steps_are_skipped(tmp_path: Path) -> None:
    trainer, skipped = trainer_of(tmp_path, 2), list[int]()
    loader = trainer.get_train_dataloader()._loader
    trainer.add_callback(Change(loader, 4, lambda loader: skipped.extend(loader.skip(3).tolist())))
    trainer.train()
    assert trainer.model.seen.tolist() == [2 - (number in skipped) for number in range(len(DATA))]
    assert trainer.state.global_step == trainer.args.max_steps - 3


def test_a_training_ends_with_its_epochs_where_weights_change(tmp_path: Path) -> None:
    by_size: list[int] = np.argsort(SIZES).tolist()
    data = NamedConcatDataset({"short": by_size[:100], "long": by_size[100:]})
    drawn, steps = SIZES[[int(data[number]) for number in range(len(DATA))]], list[int]()
    for change in (None, {"short": 1, "long": 9}, {"short": 1, "long": 0}):
        order = WeightedDistributedSampler(data, {"short": 1, "long": 1}, epoch_length=6000, num_replicas=1, rank=0)
        batches = DistributedSizeAwareBatchSampler(drawn, 5000, sampler=order, window=512)
        loader = TrainerLoader(ResumableLoader(DATA, batches))
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=loader.max_steps(2),
            ignore_data_skip=True,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer: Any = Trainer(Model(), arguments, train_dataset=DATA, callbacks=[loader])
        trainer.get_train_dataloader = partial(lambda given: given, loader)
        if change:
            trainer.add_callback(Change(loader._loader, 5, partial(lambda to, given: given.reweight(to), change)))
        trainer.train()
        assert trainer.model.seen.sum() == 2 * 6000
        assert trainer.state.epoch == 2
        steps.append(trainer.state.global_step)
    assert steps[2] < steps[0] < steps[1]


def test_what_would_lose_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ignore_data_skip must be True, got False"):
        trainer_of(tmp_path, ignore_data_skip=False).train()
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be 1, got 2: .* use a SizeAware"):
        trainer_of(tmp_path, gradient_accumulation_steps=2).train()
    other = trainer_of(tmp_path)
    other.get_train_dataloader = lambda: DataLoader(DATA)  # type: ignore[arg-type]  # a list is a dataset
    with pytest.raises(ValueError, match="the trainer's loader must be this TrainerLoader, got another one"):
        other.train()


def test_a_checkpoint_of_another_trainer_has_no_position(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=3, report_to=[], disable_tqdm=True, use_cpu=True)
    Trainer(Model(), arguments, train_dataset=DATA).train()
    path = tmp_path / "checkpoint-3"
    with pytest.raises(ValueError, match="the checkpoint must be one of a TrainerLoader, got one without"):
        trainer_of(tmp_path, 2, path)
    with pytest.raises(ValueError, match="the checkpoint must be one of a TrainerLoader, got one without"):
        trainer_of(tmp_path, 2).train(resume_from_checkpoint=str(path))


def test_steps_of_several_batches_are_refused(tmp_path: Path) -> None:
    batches = OptimizerStepBatchSampler(SIZES, 500, tokens_per_step=2000)
    loader = TrainerLoader(ResumableLoader(DATA, batches))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, ignore_data_skip=True, report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer: Any = Trainer(Model(), arguments, train_dataset=DATA, callbacks=[loader])
    trainer.get_train_dataloader = lambda: loader
    with pytest.raises(ValueError, match="the optimizer steps of tokens_per_step must have 1 batch each, got more"):
        trainer.train()


def test_samples_that_were_appended_are_taken_in(tmp_path: Path) -> None:
    trainer_of(tmp_path, 2, n=150, max_steps=5).train()
    path = tmp_path / "checkpoint-5"
    grown = trainer_of(tmp_path, 2, path)
    grown.train(resume_from_checkpoint=str(path))
    assert grown.model.seen.tolist() == [2] * len(DATA)
    assert grown.state.global_step == grown.state.max_steps
    assert grown.state.epoch == 2
