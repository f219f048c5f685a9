"""Checkpoints of a real trainer: the stream goes on as if nothing had happened."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import webdataset as wds
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from headrace.webdatamodule import Split, WebDataModule, index_shards, write_tars

N, STEPS = 20, 5


class Model(lightning.LightningModule):
    """Notes the samples of each step; stops the fit, as a crash would, after some."""

    def __init__(self, *, crash: int = -1, early: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.crash, self.early = crash, early

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash:
            raise KeyError("crash")
        self.seen.append(batch[:, 0].int().tolist())
        return torch.Tensor(self.layer(batch).mean())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:  # as a schedule of the learning rate asks
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=1e-3)


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


def module(place: Path, *, seed: int = 5, workers: int = 0, own: bool = False) -> WebDataModule:
    splits = (Split.train, Split.val)
    batched = wds.batched(N // STEPS, collation_fn=torch.stack)
    tensor = wds.map(lambda sample: torch.tensor([float(sample[0])]))
    return WebDataModule(
        dict.fromkeys(splits, N),
        "json",
        dict.fromkeys(splits, place),
        N // STEPS,
        pipeline_wds={split: [tensor, *([wds.shuffle(9, seed=2)] if own else [])] for split in splits},
        pipeline_prebatch_wld=dict.fromkeys(splits, batched),
        kwargs_wds={Split.train: {"shardshuffle": True, "seed": seed}},
        kwargs_wld={Split.train: {"num_workers": workers}},
    )


def fit(model: Model, data: WebDataModule, ckpt: Path | None = None, **options: Any) -> lightning.Trainer:
    given: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in given.get("callbacks", []))
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=checkpointing,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    trainer.fit(model, datamodule=data, ckpt_path=None if ckpt is None else str(ckpt))
    return trainer


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Path]:
    """A fit without a crash, and a checkpoint after each of its steps."""
    model, folder = Model(), tmp_path_factory.mktemp("checkpoints")
    fit(model, module(shards), callbacks=[Saving(folder)])
    epochs = [model.seen[i : i + STEPS] for i in range(0, 3 * STEPS, STEPS)]
    assert [sorted(sample for batch in epoch for sample in batch) for epoch in epochs] == [list(range(N))] * 3
    return model.seen, folder


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("step", range(1, 3 * STEPS))
def test_a_checkpoint_after_each_step(
    shards: Path, whole: tuple[list[list[int]], Path], step: int, early: bool
) -> None:
    seen, folder = whole
    if early and step % STEPS not in (0, 2):
        return
    model = Model(early=early)
    trainer = fit(model, module(shards), folder / f"step{step}.ckpt")
    assert model.seen == seen[step:]
    assert trainer.global_step == 3 * STEPS


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("step", range(6))
def test_overfitting_takes_the_same_batches_in_every_epoch(shards: Path, tmp_path: Path, step: int) -> None:
    model, resumed = Model(), Model()
    fit(model, module(shards), overfit_batches=2, callbacks=[Saving(tmp_path)])
    assert len(model.seen) == 6
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]
    assert model.seen[0] != model.seen[1]
    fit(resumed, module(shards), tmp_path / f"step{step}.ckpt" if step else None, overfit_batches=2)
    assert resumed.seen == model.seen[step:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [False, True])
def test_a_crash(shards: Path, tmp_path: Path, workers: int, own: bool) -> None:
    """With stages that cannot be counted, what was delivered is read again, and that is said."""
    uninterrupted, crashed, resumed = Model(), Model(crash=8), Model()
    fit(uninterrupted, module(shards, workers=workers, own=own))
    with pytest.raises(KeyError, match="crash"):
        fit(crashed, module(shards, workers=workers, own=own), callbacks=[Saving(tmp_path)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(resumed, module(shards, workers=workers, own=own), tmp_path / "step8.ckpt")
    assert crashed.seen + resumed.seen == uninterrupted.seen
    messages = [str(one.message) for one in said if "thrown away" in str(one.message)]
    assert len(messages) == own
    assert all("the 3 batches before it are read again" in message and "'shuffle'" in message for message in messages)


@pytest.mark.parametrize(
    "options",
    [
        {"save_on_train_epoch_end": True},
        {"every_n_train_steps": 5},
        {"every_n_train_steps": 7},
    ],
)
@pytest.mark.parametrize("validate", [{}, {"limit_val_batches": 2, "val_check_interval": 2}])
@pytest.mark.parametrize("extra", [{}, {"reload_dataloaders_every_n_epochs": 1}])
def test_checkpoints_of_lightning(
    shards: Path, tmp_path: Path, options: dict[str, Any], validate: dict[str, Any], extra: dict[str, Any]
) -> None:
    uninterrupted, resumed = Model(), Model()
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **options)
    fit(uninterrupted, module(shards), callbacks=[saving], **validate, **extra)
    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    step = int(checkpoints[0].stem.partition("step=")[2])
    assert step in (5, 7)
    again = ModelCheckpoint(tmp_path / "again", save_top_k=-1, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The dirpath has changed")
        fit(resumed, module(shards), checkpoints[0], callbacks=[again], **validate, **extra)
    assert resumed.seen == uninterrupted.seen[step:]


def test_a_checkpoint_in_the_middle_of_a_validation(shards: Path, tmp_path: Path) -> None:
    class InValidation(Callback):
        def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"step{trainer.global_step}.ckpt")

    uninterrupted, resumed = Model(), Model()
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 2}
    fit(uninterrupted, module(shards), callbacks=[InValidation()], **options)
    fit(resumed, module(shards), tmp_path / "step7.ckpt", **options)
    assert resumed.seen == uninterrupted.seen[7:]


def test_epochs_cut_short_by_the_trainer(shards: Path, tmp_path: Path) -> None:
    uninterrupted, resumed = Model(), Model()
    fit(uninterrupted, module(shards), limit_train_batches=3, callbacks=[Saving(tmp_path)])
    for step in (2, 3, 4):
        resumed = Model()
        fit(resumed, module(shards), tmp_path / f"step{step}.ckpt", limit_train_batches=3)
        assert resumed.seen == uninterrupted.seen[step:]


def test_max_steps_and_accumulation(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": -1, "accumulate_grad_batches": 2}
    uninterrupted, first, resumed = Model(), Model(), Model()
    fit(uninterrupted, module(shards), max_steps=8, **options)
    fit(first, module(shards), max_steps=5, callbacks=[Saving(tmp_path)], **options)
    fit(resumed, module(shards), tmp_path / "step5.ckpt", max_steps=8, **options)
    assert first.seen + resumed.seen == uninterrupted.seen


@pytest.mark.parametrize("step", [5, 7])
def test_a_checkpoint_of_another_seed_is_refused(shards: Path, whole: tuple[list[list[int]], Path], step: int) -> None:
    with pytest.raises(ValueError, match="train: the checkpoint is of another order: seed was 5 in it and is 6 here"):
        fit(Model(), module(shards, seed=6), whole[1] / f"step{step}.ckpt")


def test_other_workers(shards: Path, whole: tuple[list[list[int]], Path]) -> None:
    with pytest.raises(ValueError, match=r"batch 2 of epoch 1 of 1 ranks with 0 workers, here are 1 ranks with 2"):
        fit(Model(), module(shards, workers=2), whole[1] / "step7.ckpt")


def test_validating_with_a_checkpoint_of_a_fit(shards: Path, whole: tuple[list[list[int]], Path]) -> None:
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(Model(), datamodule=module(shards), ckpt_path=str(whole[1] / "step7.ckpt"))
