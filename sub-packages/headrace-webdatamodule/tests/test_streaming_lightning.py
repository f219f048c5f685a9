"""Checkpoints of a real trainer, at moments when the trainer and the loader count differently: the stream goes on as if
nothing had happened."""

import contextlib
import itertools
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning
import pytest
import torch
import webdataset as wds
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
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

    def __init__(self, *, fail: int = -1, stop: int = -1, early: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.began: list[int] = []
        self.fail, self.stop, self.early = fail, stop, early

    def on_train_epoch_start(self) -> None:
        self.began.append(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch["stream"] if isinstance(batch, dict) else batch
        if len(self.seen) == self.fail:
            raise KeyError("fail")
        self.seen.append(batch[:, 0].int().tolist())
        self.trainer.should_stop |= len(self.seen) == self.stop
        return torch.Tensor(self.layer(batch).mean())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:  # as a schedule of the learning rate asks
            _ = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SavingAt(Callback):
    """A checkpoint in one hook, when the trainer stands at some number."""

    def __init__(self, path: Path, hook: str, when: Callable[[lightning.Trainer], bool]) -> None:
        def save(trainer: lightning.Trainer, *_: Any) -> None:
            if when(trainer):
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


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


STEP = [(step, False) for step in range(1, WHOLE)] + [(step, True) for step in (2, 5, 7, 10)]


@pytest.mark.parametrize(("step", "early"), STEP)
def test_a_checkpoint_after_each_step(
    shards: Path, whole: list[list[int]], saved: Path, step: int, early: bool
) -> None:
    model = Model(early=early)
    trainer = fit(model, module(shards), saved / f"step{step}.ckpt")
    assert model.seen == whole[step:]
    assert trainer.global_step == WHOLE


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


def test_a_fit_begins_anew_whatever_was_read_by_hand(shards: Path, whole: list[list[int]]) -> None:
    model, data = Model(), module(shards)
    assert len(list(data.train_dataloader())) == STEPS
    fit(model, data)
    assert model.seen == whole


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("step", range(6))
def test_overfitting_takes_the_same_batches_in_every_epoch(shards: Path, tmp_path: Path, step: int) -> None:
    model, resumed = Model(), Model()
    fit(model, module(shards), None, Saving(tmp_path), overfit_batches=2)
    assert len(model.seen) == 6
    assert model.seen[:2] == model.seen[2:4] == model.seen[4:]
    assert model.seen[0] != model.seen[1]
    fit(resumed, module(shards), tmp_path / f"step{step}.ckpt" if step else None, overfit_batches=2)
    assert resumed.seen == model.seen[step:]


AT_EDGES = (0, 1, 4, 5, 9, 10, 14)  # of the epochs, and one within


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "workers"),
    [*(pytest.param(at, 0, marks=() if at in AT_EDGES else pytest.mark.nightly) for at in range(WHOLE)), (7, 1)],
)
def test_the_batch_of_a_step_that_failed_comes_again(
    shards: Path, tmp_path: Path, whole: list[list[int]], fails: int, workers: int
) -> None:
    failed, resumed = Model(fail=fails), Model()
    with pytest.raises(KeyError, match="fail"):
        fit(failed, module(shards, workers=workers), None, OnExceptionCheckpoint(tmp_path, "failed"))
    fit(resumed, module(shards, workers=workers), tmp_path / "failed.ckpt")
    if workers:
        expected = Model()
        fit(expected, module(shards, workers=workers))
        whole = expected.seen
    assert failed.seen + resumed.seen == whole


LIMITS: list[dict[str, Any]] = [{}, {"limit_train_batches": 4}, {"limit_val_batches": 1.0, "val_check_interval": 2}]


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first, second, marks=() if (first, second) == (4, 3) else pytest.mark.nightly)
        for first in (0, 1, 3, 4, 5, 7)
        for second in (1, 2, 3, 4)
    ],
)
def test_a_failed_step_and_then_a_checkpoint_of_the_resumed_run(
    shards: Path, tmp_path: Path, first: int, second: int, options: dict[str, Any]
) -> None:
    whole = Model()
    fit(whole, module(shards), **options)
    crash, steps = (
        OnExceptionCheckpoint(tmp_path / "1", "a"),
        ModelCheckpoint(tmp_path / "2", "b", every_n_train_steps=1),
    )
    models = [Model(fail=first), Model(fail=second), Model()]
    with pytest.raises(KeyError):
        fit(models[0], module(shards), None, crash, **options)
    with pytest.raises(KeyError):
        fit(models[1], module(shards), tmp_path / "1" / "a.ckpt", steps, **options)
    trainer = fit(models[2], module(shards), tmp_path / "2" / "b.ckpt", **options)
    assert [batch for model in models for batch in model.seen] == whole.seen
    assert (trainer.global_step, trainer.current_epoch) == (len(whole.seen), EPOCHS)


def test_a_failure_after_a_resume(shards: Path, tmp_path: Path, whole: list[list[int]]) -> None:
    models, ckpt = [Model(fail=at) for at in (7, 0, 2, -1)], None
    for run, model in enumerate(models):
        try:
            fit(model, module(shards), ckpt, OnExceptionCheckpoint(tmp_path, f"run{run}"))
        except KeyError:
            ckpt = tmp_path / f"run{run}.ckpt"
    assert [batch for model in models for batch in model.seen] == whole


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"])
@pytest.mark.parametrize("at", [0, 3, 4, 5, 14])
def test_checkpoints_around_a_step(shards: Path, tmp_path: Path, whole: list[list[int]], hook: str, at: int) -> None:
    saving = SavingAt(tmp_path / "a.ckpt", hook, lambda trainer: trainer.global_step == at + hook.endswith("end"))
    fit(Model(), module(shards), None, saving)
    resumed = Model()
    fit(resumed, module(shards), tmp_path / "a.ckpt")
    assert resumed.seen == whole[at + hook.endswith("end") :]


def test_an_endless_loader_which_the_trainer_reads_ahead(shards: Path, tmp_path: Path) -> None:
    endless: Any = {"invoke_wld": {Split.train: [("repeat", {})]}}
    uninterrupted, failed, resumed = Model(), Model(fail=7), Model()
    options: dict[str, Any] = {"max_steps": 12, "max_epochs": -1, "limit_train_batches": 6}
    fit(uninterrupted, module(shards, **endless), **options)
    with pytest.raises(KeyError, match="fail"):
        fit(failed, module(shards, **endless), None, OnExceptionCheckpoint(tmp_path, "failed"), **options)
    fit(resumed, module(shards, **endless), tmp_path / "failed.ckpt", **options)
    assert failed.seen + resumed.seen == uninterrupted.seen


STOPS = [
    pytest.param(more, how, stop, marks=() if (number + place) % 2 == (how == "max_steps") else pytest.mark.nightly)
    for number, more in enumerate(
        [{}, {"reload_dataloaders_every_n_epochs": 1}, {"limit_val_batches": 2, "val_check_interval": 2}]
    )
    for how in ("should_stop", "max_steps")
    for place, stop in enumerate((1, 3, 5, 7, 14))
]


@pytest.mark.parametrize(("more", "how", "stop"), STOPS)
def test_what_is_left_of_an_epoch_that_was_stopped(
    shards: Path, tmp_path: Path, whole: list[list[int]], more: dict[str, Any], how: str, stop: int
) -> None:
    first, resumed = Model(stop=stop if how == "should_stop" else -1), Model()
    options: dict[str, Any] = {**more, **({"max_steps": stop} if how == "max_steps" else {})}
    fit(first, module(shards), **options).save_checkpoint(tmp_path / "a.ckpt")
    trainer = fit(resumed, module(shards), tmp_path / "a.ckpt", **more)
    assert first.seen + resumed.seen == whole
    # The trainer takes an epoch that was stopped for a whole one, until its rest comes.
    assert (trainer.global_step, trainer.current_epoch) == (WHOLE, EPOCHS)


@pytest.mark.parametrize("early", [False, True])
def test_the_last_epoch_was_stopped(shards: Path, tmp_path: Path, whole: list[list[int]], early: bool) -> None:
    """The trainer takes its epochs for done, unless it is told in time."""
    first, resumed = Model(stop=12), Model(early=early)
    fit(first, module(shards), None, ModelCheckpoint(tmp_path, filename="a", save_on_train_epoch_end=True))
    fit(resumed, module(shards), tmp_path / "a.ckpt")
    assert first.seen + resumed.seen == whole


@pytest.mark.parametrize("early", [False, True])
def test_stopped_again_and_again(shards: Path, tmp_path: Path, whole: list[list[int]], early: bool) -> None:
    models, ckpt = [Model(stop=stop, early=early) for stop in (2, 2, 3, 4, -1)], None
    for run, model in enumerate(models):
        fit(model, module(shards), ckpt).save_checkpoint(tmp_path / f"{run}.ckpt")
        ckpt = tmp_path / f"{run}.ckpt"
    assert [batch for model in models for batch in model.seen] == whole


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_a_checkpoint_as_an_epoch_starts(shards: Path, tmp_path: Path, whole: list[list[int]], epoch: int) -> None:
    saving = SavingAt(tmp_path / "a.ckpt", "on_train_epoch_start", lambda trainer: trainer.current_epoch == epoch)
    fit(Model(), module(shards), None, saving)
    resumed = Model()
    trainer = fit(resumed, module(shards), tmp_path / "a.ckpt")
    assert resumed.seen == whole[epoch * STEPS :]
    assert resumed.began == list(range(epoch, EPOCHS))
    assert (trainer.global_step, trainer.current_epoch) == (WHOLE, EPOCHS)


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_after_a_validation_with_a_checkpoint(
    shards: Path, tmp_path: Path, whole: list[list[int]], fails: bool
) -> None:
    fit(Model(stop=3), module(shards)).save_checkpoint(tmp_path / "a.ckpt")

    class Failing(Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            if fails:
                raise KeyError("validation")

    data, model = module(shards), Model()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, callbacks=[Failing()]
    )
    try:
        trainer.validate(Model(), datamodule=data, ckpt_path=str(tmp_path / "a.ckpt"), verbose=False)
    except KeyError:
        assert fails
    fit(model, data)
    assert model.seen == whole


def test_a_checkpoint_before_the_first_batch_of_another_fit(
    shards: Path, tmp_path: Path, whole: list[list[int]]
) -> None:
    """What the fit before it left is not where this one stands."""
    data, resumed = module(shards), Model()
    fit(Model(stop=3), data)
    fit(Model(), data, None, SavingAt(tmp_path / "a.ckpt", "on_fit_start", lambda _: True))
    fit(resumed, module(shards), tmp_path / "a.ckpt")
    assert resumed.seen == whole


def test_a_checkpoint_as_a_resumed_fit_starts(shards: Path, tmp_path: Path, whole: list[list[int]]) -> None:
    ckpt, resumed = tmp_path / "0.ckpt", Model()
    fit(Model(stop=7), module(shards)).save_checkpoint(ckpt)
    saving = SavingAt(tmp_path / "1.ckpt", "on_train_start", lambda _: True)
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
def test_a_module_within_another_one_leaves_the_trainer_alone(shards: Path, whole: list[list[int]]) -> None:
    model, held = Model(), module(shards)
    held.setup("fit")
    fit(model, Holding(held))
    assert model.seen == whole


@pytest.mark.parametrize(
    ("options", "validate", "extra"),
    [
        pytest.param(
            options, validate, extra, marks=pytest.mark.nightly if (place + bool(validate) + bool(extra)) % 2 else ()
        )
        for place, options in enumerate(
            [{"save_on_train_epoch_end": True}, {"every_n_train_steps": 5}, {"every_n_train_steps": 7}]
        )
        for validate in ({}, {"limit_val_batches": 2, "val_check_interval": 2})
        for extra in ({}, {"reload_dataloaders_every_n_epochs": 1})
    ],
)
def test_checkpoints_of_lightning(
    shards: Path, tmp_path: Path, options: dict[str, Any], validate: dict[str, Any], extra: dict[str, Any]
) -> None:
    uninterrupted, resumed = Model(), Model()
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **options)
    fit(uninterrupted, module(shards), None, saving, **validate, **extra)
    checkpoints = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("step=")[2]))
    step = int(checkpoints[0].stem.partition("step=")[2])
    assert step in (5, 7)
    again = ModelCheckpoint(tmp_path / "again", save_top_k=-1, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The dirpath has changed")
        fit(resumed, module(shards), checkpoints[0], again, **validate, **extra)
    assert resumed.seen == uninterrupted.seen[step:]


def test_a_checkpoint_in_the_middle_of_a_validation(shards: Path, tmp_path: Path) -> None:
    class InValidation(Callback):
        def on_validation_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"step{trainer.global_step}.ckpt")

    uninterrupted, resumed = Model(), Model()
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 2}
    fit(uninterrupted, module(shards), None, InValidation(), **options)
    fit(resumed, module(shards), tmp_path / "step7.ckpt", **options)
    assert resumed.seen == uninterrupted.seen[7:]


def test_epochs_cut_short_by_the_trainer(shards: Path, tmp_path: Path) -> None:
    uninterrupted = Model()
    fit(uninterrupted, module(shards), None, Saving(tmp_path), limit_train_batches=3)
    for step in (2, 3, 4):
        resumed = Model()
        fit(resumed, module(shards), tmp_path / f"step{step}.ckpt", limit_train_batches=3)
        assert resumed.seen == uninterrupted.seen[step:]


def test_max_steps_and_accumulation(shards: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": -1, "accumulate_grad_batches": 2}
    uninterrupted, first, resumed = Model(), Model(), Model()
    fit(uninterrupted, module(shards), max_steps=8, **options)
    fit(first, module(shards), None, Saving(tmp_path), max_steps=5, **options)
    fit(resumed, module(shards), tmp_path / "step5.ckpt", max_steps=8, **options)
    assert first.seen + resumed.seen == uninterrupted.seen


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


class Grouping(Model):
    """Notes which batches each optimizer step was made of."""

    def __init__(self, *, stop_at: int = -1) -> None:
        super().__init__()
        self.group: list[list[int]] = []
        self.groups: list[list[list[int]]] = []
        self.stop_at = stop_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if sum(map(len, self.groups)) + len(self.group) == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        self.group.append(batch[:, 0].int().tolist())
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups.append(self.group)
        self.group = []


ACCUMULATING: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}


def fine(place: Path, workers: int = 0) -> WebDataModule:
    """Ten batches per epoch: groups of 4, 4 and 2."""
    return WebDataModule(
        {Split.train: N},
        "json",
        {Split.train: place},
        2,
        pipeline_wds={Split.train: wds.map(tensor)},
        pipeline_prebatch_wld={Split.train: wds.batched(2, collation_fn=torch.stack)},
        kwargs_wds={Split.train: {"shardshuffle": True}},
        kwargs_wld={Split.train: {"num_workers": workers}},
    )


@pytest.fixture(scope="module")
def grouped(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[list[int]]], Path]:
    """The groups of a fit, and a checkpoint after each batch."""

    class SavingBatches(Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, model: Any, *_: Any) -> None:
            trainer.save_checkpoint(folder / f"{len(model.seen)}.ckpt")

    model, folder = Grouping(), tmp_path_factory.mktemp("groups")
    fit(model, fine(shards), None, SavingBatches(), **ACCUMULATING)
    assert [len(group) for group in model.groups] == [4, 4, 2] * 2
    return model.groups, folder


@pytest.mark.parametrize("batch", range(1, 20))
def test_a_group_of_accumulated_gradients_begins_anew(
    shards: Path, grouped: tuple[list[list[list[int]]], Path], batch: int
) -> None:
    """Gradients that have not reached the optimizer are in no checkpoint."""
    groups, folder = grouped
    model = Grouping()
    trainer = fit(model, fine(shards), folder / f"{batch}.ckpt", **ACCUMULATING)
    counted = [batches for batches in itertools.accumulate(map(len, groups)) if batches <= batch]
    assert model.groups == groups[len(counted) :]
    assert trainer.global_step == len(groups)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "workers"), [(5, 0), (12, 2)])
def test_a_signal_to_end_in_the_middle_of_a_group(
    shards: Path, tmp_path: Path, grouped: tuple[list[list[list[int]]], Path], batch: int, workers: int
) -> None:
    stopped, resumed = Grouping(stop_at=batch), Grouping()
    with contextlib.suppress(SIGTERMException):
        fit(stopped, fine(shards, workers), None, OnExceptionCheckpoint(tmp_path, "stopped"), **ACCUMULATING)
    fit(resumed, fine(shards, workers), tmp_path / "stopped.ckpt", **ACCUMULATING)
    expected = Grouping()
    fit(expected, fine(shards, workers), **ACCUMULATING)
    assert stopped.groups + resumed.groups == expected.groups


class Looking(Callback):
    """Looks at batches in the middle of a fit, by another iterator, and saves at each step."""

    def __init__(self, loader_of: Callable[[lightning.Trainer], Any], folder: Path) -> None:
        self.loader_of, self.folder = loader_of, folder
        self.looked: list[Any] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        loader = self.loader_of(trainer)
        self.looked.append(len(list(loader)) if trainer.global_step == 6 else next(iter(loader)))
        held = trainer.datamodule.state_dict()["train"]  # type: ignore[attr-defined] # it has one
        assert held["epoch"] * STEPS + held["position"] == trainer.global_step
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "persistent"),
    [
        ("trainer", None),
        ("module", None),
        ("trainer", True),
        *(pytest.param(where, False, marks=pytest.mark.nightly) for where in ("trainer", "module")),
        pytest.param("module", True, marks=pytest.mark.nightly),
    ],
)
def test_a_second_iterator_in_the_middle_of_a_fit(
    shards: Path, tmp_path: Path, whole: list[list[int]], where: str, persistent: bool | None
) -> None:
    """Neither it nor `train_dataloader()` moves the trainer's position."""
    loader_of: Callable[[lightning.Trainer], Any] = {
        "trainer": lambda trainer: trainer.train_dataloader,
        "module": lambda trainer: trainer.datamodule.train_dataloader(),
    }[where]
    options: Any = {} if persistent is None else {"num_workers": 1, "persistent_workers": persistent}
    looking, model = Looking(loader_of, tmp_path), Model()
    fit(model, module(shards, kwargs_wld={Split.train: options}), None, looking)
    if persistent is None:
        assert model.seen == whole
    for epoch in range(EPOCHS):
        seen = model.seen[epoch * STEPS : (epoch + 1) * STEPS]
        assert sorted(sample for batch in seen for sample in batch) == list(range(N))
    assert looking.looked[5] == STEPS
    for step in (2, 7, 12):
        resumed = Model()
        fit(resumed, module(shards, kwargs_wld={Split.train: options}), tmp_path / f"{step}.ckpt")
        assert resumed.seen == model.seen[step:]


@pytest.mark.parametrize(
    "hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start"]
)
def test_an_iterator_between_those_of_the_trainer(
    shards: Path, tmp_path: Path, whole: list[list[int]], saved: Path, hook: str
) -> None:
    class Looks(Callback):
        pass

    def look(self: Looks, trainer: lightning.Trainer, *_: Any) -> None:
        loader: Any = trainer.train_dataloader
        next(iter(loader))
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    setattr(Looks, hook, look)
    model = Model()
    fit(model, module(shards), saved / "step7.ckpt", Looks(), limit_val_batches=1.0)
    assert model.seen == whole[7:]
    for path in tmp_path.glob("*.ckpt"):
        resumed = Model()
        fit(resumed, module(shards), path, limit_val_batches=1.0)
        assert resumed.seen == whole[int(path.stem) :]


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
def test_another_stage_with_an_older_checkpoint(
    shards: Path, tmp_path: Path, whole: list[list[int]], saved: Path, stage: str
) -> None:
    """A checkpoint that is saved afterwards holds the position of the fit."""
    splits = (Split.train, Split.val, Split.test)
    data: Any = WebDataModule(
        dict.fromkeys(splits, N),
        "json",
        dict.fromkeys(splits, shards),
        N // STEPS,
        pipeline_wds=dict.fromkeys(splits, wds.map(tensor)),
        pipeline_prebatch_wld=dict.fromkeys(splits, wds.batched(N // STEPS, collation_fn=torch.stack)),
        kwargs_wds={Split.train: {"shardshuffle": True, "seed": 5}},
    )
    model = Model(stop=8)
    trainer = fit(model, data)
    kept = data.state_dict()
    getattr(trainer, stage)(Model(), datamodule=data, ckpt_path=str(saved / "step2.ckpt"))
    assert data.state_dict() == kept
    assert (kept["train"]["epoch"], kept["train"]["position"]) == (1, 3)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = Model()
    fit(resumed, data, tmp_path / "after.ckpt")
    assert model.seen + resumed.seen == whole


def test_validation_sees_every_sample_in_the_same_order(shards: Path) -> None:
    class Validating(Model):
        validated: ClassVar[list[list[int]]] = []

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.validated.append(batch[:, 0].int().tolist())

    shuffled = {split: {"shardshuffle": True} for split in (Split.train, Split.val)}
    fit(Validating(), module(shards, kwargs_wds=shuffled), limit_val_batches=1.0)
    epochs = [Validating.validated[i : i + STEPS] for i in range(0, EPOCHS * STEPS, STEPS)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(sample for batch in epochs[0] for sample in batch) == list(range(N))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_of_ones_own_that_validates_with_a_trainer(shards: Path, workers: int) -> None:
    validator = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    whole = [batch.tolist() for batch in module(shards).train_dataloader()]
    data, came, states = module(shards, workers=workers), [], []
    for batch in data.train_dataloader():
        came.append(batch.tolist())
        if len(came) == 2:
            validator.validate(Model(), datamodule=data, verbose=False)
        states.append(data.state_dict())
    assert came == whole
    for done in (2, 3):
        again = module(shards, workers=workers)
        again.load_state_dict(states[done - 1])
        assert [batch.tolist() for batch in again.train_dataloader()] == whole[done:]


def test_a_state_that_is_loaded_by_hand_after_a_validation_counts(shards: Path) -> None:
    validator = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    data, again = module(shards), module(shards)
    running = iter(data.train_dataloader())
    next(running)
    validator.validate(Model(), datamodule=again, verbose=False)
    again.load_state_dict(data.state_dict())
    assert [batch.tolist() for batch in again.train_dataloader()] == [batch.tolist() for batch in running]
