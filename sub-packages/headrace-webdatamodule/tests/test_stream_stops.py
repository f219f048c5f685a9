"""Runs that fail, are stopped or begin anew, at moments when the trainer and the loader count differently."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import webdataset as wds
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from headrace.webdatamodule import Split, WebDataModule, index_shards, write_tars

N, STEPS, EPOCHS = 20, 5, 3
WHOLE = STEPS * EPOCHS
pytestmark = [
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


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:02}", {"json": b"%d" % i}) for i in range(N)], place, n_shards=3)
    index_shards(place)
    return place


def tensor(sample: Any) -> torch.Tensor:
    return torch.tensor([float(sample[0])])


def module(place: Path, *, kind: type[WebDataModule] = WebDataModule, workers: int = 0, **more: Any) -> WebDataModule:
    splits = (Split.train, Split.val)
    given: dict[str, Any] = {
        "pipeline_wds": dict.fromkeys(splits, wds.map(tensor)),
        "pipeline_prebatch_wld": dict.fromkeys(splits, wds.batched(N // STEPS, collation_fn=torch.stack)),
        "kwargs_wds": {Split.train: {"shardshuffle": True, "seed": 5}},
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


@pytest.mark.parametrize(("fails", "workers"), [*((at, 0) for at in range(WHOLE)), (7, 2)])
def test_the_batch_of_a_step_that_failed_comes_again(
    shards: Path, tmp_path: Path, whole: list[list[int]], fails: int, workers: int
) -> None:
    failed, resumed = Model(fail=fails), Model()
    with pytest.raises(KeyError, match="fail"):
        fit(failed, module(shards, workers=workers), None, OnExceptionCheckpoint(tmp_path, "failed"))
    fit(resumed, module(shards, workers=workers), tmp_path / "failed.ckpt")
    expected = Model()
    fit(expected, module(shards, workers=workers))
    assert failed.seen + resumed.seen == expected.seen
    assert workers or expected.seen == whole


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


@pytest.mark.parametrize("stop", [1, 3, 5, 7, 14])
@pytest.mark.parametrize("how", ["should_stop", "max_steps"])
@pytest.mark.parametrize(
    "more", [{}, {"reload_dataloaders_every_n_epochs": 1}, {"limit_val_batches": 2, "val_check_interval": 2}]
)
def test_what_is_left_of_an_epoch_that_was_stopped(
    shards: Path, tmp_path: Path, whole: list[list[int]], stop: int, how: str, more: dict[str, Any]
) -> None:
    first, resumed = Model(stop=stop if how == "should_stop" else -1), Model()
    options: dict[str, Any] = {**more, **({"max_steps": stop} if how == "max_steps" else {})}
    fit(first, module(shards), **options).save_checkpoint(tmp_path / "a.ckpt")
    trainer = fit(resumed, module(shards), tmp_path / "a.ckpt", **more)
    assert first.seen + resumed.seen == whole
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


def untuple(source: Iterator[Any]) -> Iterator[Any]:
    return (sample for (sample,) in source)


UNSEEDED: dict[str, Any] = {
    "inside": {"pipeline_wds": {Split.train: [untuple, wds.shuffle(9, initial=9)]}},
    "two": {"pipeline_wds": {Split.train: [untuple, wds.shuffle(9, 9, None, None), wds.shuffle(7, initial=7)]}},
    "outside": {
        "pipeline_wds": {Split.train: [untuple]},
        "pipeline_prebatch_wld": {Split.train: [wds.shuffle(9, initial=9), wds.batched(4, collation_fn=None)]},
    },
    "invoked": {
        "pipeline_wds": {Split.train: [untuple]},
        "invoke_wds": {Split.train: [("shuffle", {"size": 9, "initial": 9})]},
    },
}


def unseeded(place: Path, where: str, seed: int | None = None, workers: int = 0) -> Any:
    batched = {Split.train: [wds.batched(4, collation_fn=None)]}
    options: Any = {"kwargs_wds": {} if seed is None else {Split.train: {"seed": seed}}}
    made = module(place, workers=workers, **{"pipeline_prebatch_wld": batched, **options, **UNSEEDED[where]})
    made.setup("fit")
    return made.train_dataloader()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", UNSEEDED)
def test_a_shuffle_without_a_seed_goes_on_in_its_order(shards: Path, where: str, workers: int) -> None:
    whole = unseeded(shards, where, workers=workers)
    epochs = [list(whole) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert all(sorted(sample for batch in epoch for sample in batch) == list(range(N)) for epoch in epochs)
    first, resumed = unseeded(shards, where, workers=workers), unseeded(shards, where, workers=workers)
    running = iter(first)
    taken = [next(running), next(running)]
    resumed.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="read again and thrown away"):
        rest = list(resumed)
    assert taken + rest + list(resumed) == epochs[0] + epochs[1]


@pytest.mark.parametrize("where", UNSEEDED)
def test_another_seed_is_another_order_and_does_not_fit_in_mid_epoch(shards: Path, where: str) -> None:
    first, other = unseeded(shards, where), unseeded(shards, where, seed=1)
    at_begin = first.state_dict()
    running = iter(first)
    next(running)
    with pytest.raises(ValueError, match="the seed of stages that shuffle without one was 0 in it and is 1 here"):
        other.load_state_dict(first.state_dict())
    other.load_state_dict(at_begin)
    assert list(other) != list(unseeded(shards, where))


@pytest.mark.parametrize("name", ["epoch", "position", "ranks", "workers", "version"])
def test_numbers_that_no_run_reaches_are_refused(shards: Path, name: str) -> None:
    loader = unseeded(shards, "inside")
    with pytest.raises(ValueError, match=f"{name} of the state must be at most .*, got 1{'0' * 30}: the checkpoint is"):
        loader.load_state_dict({**loader.state_dict(), name: 10**30})
    for epoch in (-1, 10**30):
        with pytest.raises(ValueError, match="train: epoch must be 0 to"):
            loader.set_epoch(epoch)
    assert len(list(loader)) == STEPS
