"""What a trainer lends to a data module for a fit, and what callbacks change meanwhile."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from indexed_runs import RESTORE, TRAIN, Model, Save, Seen, Stateful, keys, trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from streams import module as stream_module
from streams import number, write
from torch.utils.data import DataLoader

from headrace.webdatamodule import MapDataModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
SAMPLES = [{"__key__": f"t{i:02d}", "txt": "x" * (1 + i * 7 % 10)} for i in range(TRAIN)]
SIZES = [len(sample["txt"]) for sample in SAMPLES]


def data(kind: str, folder: Path) -> lightning.LightningDataModule:
    if kind == "stream":
        place = write(folder / "stream", [TRAIN])
        module: lightning.LightningDataModule = stream_module(
            place, TRAIN, 3, pipeline_wds=number, kwargs_wds={"shardshuffle": True}
        )
        return module
    by_size: dict[str, Any] = {"batch_sampler": Stateful, "sizes": SIZES} if kind == "uneven" else {"batch_size": 3}
    return MapDataModule({"train": SAMPLES}, collate_fn=keys, **by_size)


def epochs_of(seen: Seen) -> list[tuple[int, int]]:
    """The trainer's number of each epoch, and its samples."""
    return [
        (epoch, sum(len(batch) for at, batch in seen if at == epoch)) for epoch in dict.fromkeys(at for at, _ in seen)
    ]


class Raise(Callback):
    """Raises the number of epochs to five, in one hook of one epoch."""

    def __init__(self, hook: str, epoch: int, *, by: int = 0) -> None:
        self.epoch, self.by = epoch, by
        setattr(self, hook, self.change)

    def change(self, trainer: Any, *rest: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.fit_loop.max_epochs = trainer.max_epochs + self.by if self.by else 5


KINDS = ["plain", "uneven", "stream"]
CHANGES = [  # the hook, its epoch, and whether by a number or to one
    *((hook, epoch, by) for hook, epoch in (("start", 0), ("epoch_start", 1), ("epoch_end", 1)) for by in (0, 3)),
    ("batch_end", 1, 0),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hook", "epoch", "by"), CHANGES)
def test_a_callback_raises_the_number_of_epochs(tmp_path: Path, kind: str, hook: str, epoch: int, by: int) -> None:
    model = Model()
    running = trainer(Raise(f"on_train_{hook}", epoch, by=by), max_epochs=2)
    running.fit(model, datamodule=data(kind, tmp_path))
    assert epochs_of(model.seen) == [(number, TRAIN) for number in range(5)]
    assert (running.current_epoch, running.max_epochs) == (5, 5)


RESUMED = [
    pytest.param(
        *(kind, stop, hook, epoch, by, asks),
        marks=()
        if (kind, epoch, by) in (("plain", 0, 0), ("uneven", 1, 3), ("stream", 1, 0))
        and asks == (place + number) % 2
        and (kind == "plain" or place == (number + turn) % 3)
        else pytest.mark.nightly,
    )
    for turn, kind in enumerate(KINDS)
    for place, stop in enumerate((3, 7, 10))  # in the first epoch, at its end unless batches are uneven, in the second
    for number, (hook, epoch, by) in enumerate(CHANGES)
    for asks in (False, True)
]


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Seen]:
    """What a fit of so many epochs sees that nothing interrupts."""

    @cache
    def seen(kind: str, epochs: int) -> Seen:
        model = Model()
        trainer(max_epochs=epochs).fit(model, datamodule=data(kind, tmp_path_factory.mktemp("whole")))
        return model.seen

    return seen


@pytest.mark.parametrize(("kind", "stop", "hook", "epoch", "by", "asks"), RESUMED)
def test_a_callback_raises_the_number_of_epochs_of_a_resumed_fit(
    tmp_path: Path,
    whole_of: Callable[[str, int], Seen],
    kind: str,
    stop: int,
    hook: str,
    epoch: int,
    by: int,
    asks: bool,
) -> None:
    whole = whole_of(kind, 5)
    stopped, path = trainer(max_epochs=2, max_steps=stop), tmp_path / "stopped.ckpt"
    first = Model(asks=asks)
    stopped.fit(first, datamodule=data(kind, tmp_path))
    stopped.save_checkpoint(path)  # the trainer takes the epoch that max_steps ended for a whole one
    model = Model(asks=asks)
    at = whole[stop][0] if hook == "start" else epoch
    running = trainer(Raise(f"on_train_{hook}", at, by=by), max_epochs=2)
    running.fit(model, datamodule=data(kind, tmp_path), ckpt_path=path, **RESTORE)
    assert first.seen + model.seen == whole
    assert (running.current_epoch, running.max_epochs) == (5, 5)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_counts_an_epoch_once_however_often_max_steps_ended_it(
    tmp_path: Path, whole_of: Callable[[str, int], Seen], kind: str, asks: bool
) -> None:
    path, seen = None, Seen()
    for stop in (1, 3, 5, -1):
        model, running = Model(asks=asks), trainer(max_epochs=2, max_steps=stop)
        running.fit(model, datamodule=data(kind, tmp_path), ckpt_path=path, **RESTORE)
        seen += model.seen
        assert running.max_epochs == 2
        path = tmp_path / f"{stop}.ckpt"
        running.save_checkpoint(path)
    assert seen == whole_of(kind, 2)  # the trainer's numbers of the epochs, too
    assert (running.current_epoch, running.max_epochs) == (2, 2)


ENDED = [
    pytest.param(
        *(epochs, kind, asks),
        marks=()
        if (epochs, kind, asks) in ((1, "plain", False), (1, "stream", False), (2, "uneven", True), (2, "stream", True))
        else pytest.mark.nightly,
    )
    for epochs in (1, 2)
    for kind in KINDS
    for asks in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "kind", "asks"), ENDED)
def test_a_checkpoint_of_any_hook_of_a_fit_that_max_steps_ended_goes_on(
    tmp_path: Path, whole_of: Callable[[str, int], Seen], epochs: int, kind: str, asks: bool
) -> None:
    whole, saving = whole_of(kind, epochs), Save(tmp_path)
    trainer(saving, max_epochs=epochs, max_steps=3).fit(Model(asks=asks), datamodule=data(kind, tmp_path))
    assert {"epoch end", "end"} < {hook for _, hook, _ in saving.saved}
    for path, hook, done in saving.saved:
        for more in ({}, {"max_steps": 5}):
            model, running = Model(asks=asks), trainer(max_epochs=epochs, **more)
            running.fit(model, datamodule=data(kind, tmp_path), ckpt_path=path, **RESTORE)
            assert model.seen == whole[done : more.get("max_steps")], (hook, done)
            assert (running.current_epoch, running.max_epochs) == (1 if more else epochs, epochs), (hook, done)


class Scheduled(Model):
    """Its learning rate goes down to the last step, whose number it asks the trainer for."""

    def configure_optimizers(self) -> Any:
        self.expected = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(self.expected))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_the_estimated_steps_of_a_resumed_fit_are_those_of_the_first(tmp_path: Path, kind: str) -> None:
    stopped, model, path = trainer(max_epochs=2, max_steps=3), Scheduled(), tmp_path / "stopped.ckpt"
    stopped.fit(model, datamodule=data(kind, tmp_path))
    stopped.save_checkpoint(path)
    for _ in range(2):
        model, running = Scheduled(), trainer(max_epochs=2)
        running.fit(model, datamodule=data(kind, tmp_path), ckpt_path=path, **RESTORE)
        assert model.expected == 2 * 7
        assert running.global_step == 2 * 7
        stopped, path = trainer(max_epochs=2, max_steps=5), tmp_path / "again.ckpt"
        stopped.fit(Scheduled(), datamodule=data(kind, tmp_path), ckpt_path=tmp_path / "stopped.ckpt", **RESTORE)
        stopped.save_checkpoint(path)


class Normed(lightning.LightningModule):
    """A model with statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.trainer.current_epoch, batch[:, 0].tolist()))
        return torch.Tensor(self.layers(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def reloads(running: Any) -> int:
    return int(running.reload_dataloaders_every_n_epochs)


def averaged(path: Any = None, save: Any = None, **given: Any) -> tuple[Normed, lightning.Trainer]:
    model = Normed()
    running = trainer(StochasticWeightAveraging(0.01, swa_epoch_start=2), max_epochs=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        running.fit(model, ckpt_path=path, **given, **(RESTORE if path else {}))
    if save:
        running.save_checkpoint(save)
    return model, running


def test_weights_are_averaged_with_statistics_as_of_a_plain_loader(tmp_path: Path) -> None:
    numbers = [torch.tensor([float(i % 7)]) for i in range(TRAIN)]
    plain, its = averaged(train_dataloaders=DataLoader(numbers, batch_size=4))  # type: ignore[arg-type]
    saved = tmp_path / "last.ckpt"
    model, running = averaged(save=saved, datamodule=MapDataModule({"train": numbers}, batch_size=4, shuffle=False))
    assert [epoch for epoch, _ in model.seen] == [epoch for epoch in range(5) for _ in range(5)]
    assert model.seen == plain.seen
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    assert (running.max_epochs, running.current_epoch) == (its.max_epochs, its.current_epoch) == (4, 5)
    assert reloads(running) == 0
    again, running = averaged(path=saved, datamodule=MapDataModule({"train": numbers}, batch_size=4, shuffle=False))
    assert again.seen == []  # the pass for the statistics was the last one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [0, 2])
def test_a_trainer_fits_twice_and_has_its_options_back(
    tmp_path: Path, whole_of: Callable[[str, int], Seen], kind: str, every: int
) -> None:
    model = Model()
    running, module = trainer(max_epochs=2, reload_dataloaders_every_n_epochs=every), data(kind, tmp_path)
    for epochs in (2, 4):
        running.fit_loop.max_epochs = epochs
        running.fit(model, datamodule=module)
        assert (running.current_epoch, running.max_epochs) == (epochs, epochs)
        assert reloads(running) == every
    assert model.seen == whole_of(kind, 4)


class Excludes(Callback):
    """Leaves samples out behind the second step of the run."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            trainer.train_dataloader.exclude([1, 2, 3])


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("ends", ["max_epochs", "max_steps"])
def test_a_second_fit_of_a_trainer_goes_on_with_the_run(tmp_path: Path, ends: str, resized: bool) -> None:
    model, running = Model(), trainer(Excludes(), **{"max_epochs": 3, ends: 1 if ends == "max_epochs" else 4})
    module = data("plain", tmp_path)
    running.fit(model, datamodule=module)
    if resized:
        module.batch_size = 4  # type: ignore[attr-defined]  # of a `MapDataModule`
    running.fit_loop.max_epochs, running.fit_loop.epoch_loop.max_steps = 3, -1
    running.fit(model, datamodule=module)
    out, seen = {SAMPLES[number]["__key__"] for number in (1, 2, 3)}, [batch for _, batch in model.seen]
    early = {key for batch in seen[:2] for key in batch}
    for key in (sample["__key__"] for sample in SAMPLES):
        assert sum(key in batch for batch in seen) == (key in early if key in out else 3)
    assert running.current_epoch == 3
    state: Any = module.state_dict()["train"]
    assert state["batch_sampler"]["step"] == len(seen) == running.global_step
    assert max(map(len, seen)) == 3 + resized


def test_a_fit_of_another_trainer_begins_anew(tmp_path: Path, whole_of: Callable[[str, int], Seen]) -> None:
    module = data("plain", tmp_path)
    for _ in range(2):
        model = Model()
        trainer(max_epochs=1).fit(model, datamodule=module)
        assert model.seen == whole_of("plain", 1)


def at_setup(module: Any) -> Callback:
    callback = Callback()
    callback.setup = module  # type: ignore[method-assign]
    return callback


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("no such luck")


FAILING: dict[str, Callable[[], dict[str, Any]]] = {
    "a step": lambda: {"model": Model(fail_at=9)},
    "a setup": lambda: {"callbacks": [at_setup(fails)]},
    "the checkpoint": lambda: {"path": "none.ckpt"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", list(FAILING))
def test_a_fit_that_raises_gives_the_trainer_its_options_back(tmp_path: Path, kind: str, what: str) -> None:
    failing = FAILING[what]()
    running = trainer(*failing.get("callbacks", ()), max_epochs=2, reload_dataloaders_every_n_epochs=3)
    with pytest.raises((RuntimeError, FileNotFoundError)):
        running.fit(
            failing.get("model", Model()), datamodule=data(kind, tmp_path), ckpt_path=failing.get("path"), **RESTORE
        )
    assert (running.max_epochs, reloads(running)) == (2, 3)


class Reload(Callback):
    """Sets an option of the trainer in the middle of a fit."""

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.reload_dataloaders_every_n_epochs = 5


def test_what_a_callback_sets_stays(tmp_path: Path) -> None:
    running = trainer(Reload(), max_epochs=1)
    running.fit(Model(), datamodule=data("plain", tmp_path))
    assert reloads(running) == 5
