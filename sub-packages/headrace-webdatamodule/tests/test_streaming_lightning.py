"""A stream in a real trainer, beside what holds for every data module; see test_trainer_laws."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import webdataset as wds
from lightning.pytorch.callbacks import Callback, Checkpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from headrace.webdatamodule import Split, WebDataModule, index_shards, write_tars

N, STEPS, EPOCHS = 20, 5, 3
WHOLE = STEPS * EPOCHS
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path="),  # of OnExceptionCheckpoint, which has no last one
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]


class Model(lightning.LightningModule):
    """Notes the samples of each step; fails at one, or asks to stop after one."""

    def __init__(self, *, fail: int = -1, stop: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.fail, self.stop = fail, stop

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch["stream"] if isinstance(batch, dict) else batch
        if len(self.seen) == self.fail:
            raise KeyError("fail")
        self.seen.append(batch[:, 0].int().tolist())
        self.trainer.should_stop |= len(self.seen) == self.stop
        return torch.Tensor(self.layer(batch).mean())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SavingAt(Callback):
    """A checkpoint in one hook."""

    def __init__(self, path: Path, hook: str) -> None:
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint(path))


class Saving(Callback):
    """A checkpoint after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")
        trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")  # twice does no harm


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:02}", {"json": b"%d" % i}) for i in range(N)], place, n_shards=3)
    index_shards(place)
    return place


def tensor(sample: Any) -> torch.Tensor:
    return torch.tensor([float(sample[0])])


def module(
    place: Path, *, kind: type[WebDataModule] = WebDataModule, workers: int = 0, seed: int = 5, **more: Any
) -> WebDataModule:
    splits = (Split.train, Split.val)
    given: dict[str, Any] = {
        "pipeline_wds": dict.fromkeys(splits, wds.map(tensor)),
        "pipeline_prebatch_wld": dict.fromkeys(splits, wds.batched(N // STEPS, collation_fn=torch.stack)),
        "kwargs_wds": {Split.train: {"shardshuffle": True, "seed": seed}},
        "kwargs_wld": {Split.train: {"num_workers": workers}},
        **more,
    }
    return kind(dict.fromkeys(splits, N), "json", dict.fromkeys(splits, place), N // STEPS, **given)


def fit(model: Model, data: Any, ckpt: Path | None = None, *callbacks: Any, **options: Any) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options},
    )
    trainer.fit(model, datamodule=data, ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


@pytest.fixture(scope="module")
def whole(shards: Path) -> list[list[int]]:
    model = Model()
    fit(model, module(shards))
    for epoch in range(EPOCHS):
        seen = model.seen[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(sample for batch in seen for sample in batch) == list(range(N))
    return model.seen


@pytest.fixture(scope="module")
def saved(shards: Path, whole: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after each step of a fit."""
    model, folder = Model(), tmp_path_factory.mktemp("checkpoints")
    fit(model, module(shards), None, Saving(folder))
    assert model.seen == whole
    return folder


class Planning(Model):
    """Asks for the number of steps before the trainer has restored any state."""

    def setup(self, stage: str) -> None:
        self.steps = self.trainer.estimated_stepping_batches


def test_a_loader_that_was_asked_for_before_the_state_came_resumes(
    shards: Path, whole: list[list[int]], saved: Path
) -> None:
    for step in (2, 7):
        model = Planning()
        fit(model, module(shards), saved / f"step{step}.ckpt")
        assert (model.steps, model.seen) == (WHOLE, whole[step:])


def test_an_endless_loader_which_the_trainer_reads_ahead(shards: Path, tmp_path: Path) -> None:
    endless: Any = {"invoke_wld": {Split.train: [("repeat", {})]}}
    uninterrupted, failed, resumed = Model(), Model(fail=7), Model()
    options: dict[str, Any] = {"max_steps": 12, "max_epochs": -1, "limit_train_batches": 6}
    fit(uninterrupted, module(shards, **endless), **options)
    with pytest.raises(KeyError, match="fail"):
        fit(failed, module(shards, **endless), None, OnExceptionCheckpoint(tmp_path, "failed"), **options)
    fit(resumed, module(shards, **endless), tmp_path / "failed.ckpt", **options)
    assert failed.seen + resumed.seen == uninterrupted.seen


def test_a_checkpoint_before_the_first_batch_of_another_fit(
    shards: Path, tmp_path: Path, whole: list[list[int]]
) -> None:
    """What the fit before it left is not where this one stands."""
    data, resumed = module(shards), Model()
    fit(Model(stop=3), data)
    fit(Model(), data, None, SavingAt(tmp_path / "a.ckpt", "on_fit_start"))
    fit(resumed, module(shards), tmp_path / "a.ckpt")
    assert resumed.seen == whole


def test_a_checkpoint_as_a_resumed_fit_starts(shards: Path, tmp_path: Path, whole: list[list[int]]) -> None:
    ckpt, resumed = tmp_path / "0.ckpt", Model()
    fit(Model(stop=7), module(shards)).save_checkpoint(ckpt)
    saving = SavingAt(tmp_path / "1.ckpt", "on_train_start")
    fit(Model(), module(shards), ckpt, saving)
    fit(resumed, module(shards), tmp_path / "1.ckpt")
    assert resumed.seen == whole[7:]


class Beside(WebDataModule):
    """Trains with another loader beside the stream, which ends the epochs after three batches."""

    def train_dataloader(self) -> Any:
        other: Any = DataLoader([0.0, 1.0, 2.0])  # type: ignore[arg-type] # a list is a dataset
        return CombinedLoader({"stream": super().train_dataloader(), "other": other}, "min_size")


class Holding(lightning.LightningDataModule):
    """Trains with the loader of a module that the trainer does not know."""

    def __init__(self, held: WebDataModule) -> None:
        super().__init__()
        self.held = held

    def train_dataloader(self) -> Any:
        return self.held.train_dataloader()


def test_of_several_loaders_epochs_are_the_trainers_affair(shards: Path, tmp_path: Path) -> None:
    whole, first, resumed = Model(), Model(), Model()
    fit(whole, module(shards, kind=Beside))
    fit(first, module(shards, kind=Beside), max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    fit(resumed, module(shards, kind=Beside), tmp_path / "a.ckpt")
    assert len(whole.seen) == 3 * EPOCHS
    assert first.seen + resumed.seen == whole.seen


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_module_within_another_one_is_refused(shards: Path) -> None:
    held = module(shards)
    held.setup("fit")
    with pytest.raises(ValueError, match="train_dataloaders must not hold the train loader"):
        fit(Model(), Holding(held))


@pytest.mark.parametrize("step", [5, 7])
def test_a_checkpoint_of_another_seed_is_refused(shards: Path, saved: Path, step: int) -> None:
    with pytest.raises(ValueError, match="train: checkpoint has seed=5, got seed=6"):
        fit(Model(), module(shards, seed=6), saved / f"step{step}.ckpt")


def test_other_workers(shards: Path, saved: Path) -> None:
    with pytest.raises(ValueError, match="checkpoint has num_workers=0, got num_workers=2: it is at batch 2"):
        fit(Model(), module(shards, workers=2), saved / "step7.ckpt")


def test_validating_with_a_checkpoint_of_a_fit(shards: Path, saved: Path) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(Model(), datamodule=module(shards), ckpt_path=str(saved / "step7.ckpt"))
