"""A real trainer: whole epochs, and exact resume from a checkpoint of any moment."""

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from indexed_runs import (
    BATCHES,
    RESTORE,
    TRAIN,
    VAL,
    Model,
    Save,
    Seen,
    Stateful,
    data,
    fit,
    make_shards,
    trainer,
)
from lightning.pytorch.callbacks import BasePredictionWriter, Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException

from headrace.webdatamodule import IndexedWebDataModule

pytestmark = pytest.mark.slow
# Lightning 2.5 has no such option.
AT_AN_ERROR = "save_on_exception" in signature(ModelCheckpoint).parameters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    train, val = (make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL)))
    return train, val


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_steps": {"max_epochs": -1, "max_steps": 17},
    "accumulate": {"accumulate_grad_batches": 2},
    "limit": {"limit_train_batches": 4},
    "half, val twice": {"limit_train_batches": 0.5, "val_check_interval": 0.5},
    "val often": {"val_check_interval": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "val by steps": {"check_val_every_n_epoch": None, "val_check_interval": 3},
    "no val": {"limit_val_batches": 0},
    "accumulate and limit": {"accumulate_grad_batches": 3, "limit_train_batches": 4},
    "overfit": {"overfit_batches": 3, "limit_val_batches": 0},
}
BY_DEFAULT = {
    ("plain", "plain"),
    ("uneven", "plain"),
    ("uneven", "half, val twice"),
    ("bare", "accumulate"),
    ("uneven", "overfit"),
}
MATRIX = [
    pytest.param(kind, name, marks=() if (kind, name) in BY_DEFAULT else pytest.mark.nightly)
    for kind in BATCHES
    for name in OPTIONS
]


def counted(model: Model, done: int, options: dict[str, Any]) -> int:
    """The steps whose gradients have reached the optimizer: those of a group come again."""
    if done == 0:
        return 0
    epoch = model.seen[done - 1][0]
    begin = min(step for step, (at, _) in enumerate(model.seen) if at == epoch)
    last = done == len(model.seen) or model.seen[done][0] != epoch
    return done if last else done - (done - begin) % options.get("accumulate_grad_batches", 1)


HOOKS = {"start", "epoch start", "batch start", "batch end", "val batch end", "val end", "epoch end", "end"}


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(("kind", "name"), MATRIX)
def test_a_checkpoint_of_any_moment_goes_on_exactly(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, name: str
) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, kind), saving, **OPTIONS[name])
    assert {hook for _, hook, _ in saving.saved} >= HOOKS - {"val batch end", "val end"}
    nightly = (kind, name) not in BY_DEFAULT
    first_of_each = {(hook, done): path for path, hook, done in saving.saved}
    chosen = list(first_of_each.items()) if nightly else list(first_of_each.items())[::5]
    wrong = []
    for (hook, done), path in chosen:
        done = counted(model, done, OPTIONS[name])
        rest = fit(data(folders, kind), path=path, **OPTIONS[name]).seen
        if rest != model.seen[done:]:
            wrong.append((hook, done, rest[:2], model.seen[done : done + 2]))
    assert wrong == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", list(BATCHES))
def test_epochs_are_whole_and_their_lengths_known(folders: tuple[Path, Path], kind: str, workers: int) -> None:
    model = fit(data(folders, kind, num_workers=workers), num_sanity_val_steps=0)
    lengths = Counter(epoch for epoch, _ in model.seen)
    assert model.lengths == lengths
    assert len(set(lengths.values())) == (1 if kind == "plain" else 3)
    for epoch in range(3):
        assert sorted(key for at, batch in model.seen if at == epoch for key in batch) == [
            f"t{i:02d}" for i in range(TRAIN)
        ]
    assert model.val == [f"v{i:02d}" for i in range(VAL)] * 3


def test_workers_go_on_exactly(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, "uneven", num_workers=2), saving, limit_val_batches=0)
    for path, _, done in saving.saved[4::9]:
        assert fit(data(folders, "uneven", num_workers=1), path=path, limit_val_batches=0).seen == model.seen[done:]


@pytest.mark.parametrize("asks", [False, True])
def test_resumed_again_and_again(folders: tuple[Path, Path], tmp_path: Path, asks: bool) -> None:
    whole = fit(data(folders, "uneven")).seen
    seen: Seen = []
    path = None
    for stop in (2, 3, len(whole) - 3, -1):
        options = {"max_epochs": 3, "max_steps": stop}
        model = Model(asks=asks)
        running = trainer(**options)
        running.fit(model, datamodule=data(folders, "uneven"), ckpt_path=path, **RESTORE)
        seen += model.seen
        path = str(tmp_path / f"{stop}.ckpt")
        running.save_checkpoint(path)  # after the end of fit
    assert seen == whole


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint")  # of OnExceptionCheckpoint
@pytest.mark.filterwarnings("ignore:.*was called without a model")  # the same
@pytest.mark.parametrize("kind", list(BATCHES))
@pytest.mark.parametrize("how", ["exception", "model"] if AT_AN_ERROR else ["exception"])
def test_the_batch_of_a_step_that_failed_comes_again(
    folders: tuple[Path, Path], tmp_path: Path, how: str, kind: str
) -> None:
    whole = fit(data(folders, kind)).seen
    saving: Callback = (
        OnExceptionCheckpoint(tmp_path) if how == "exception" else ModelCheckpoint(tmp_path, save_on_exception=True)
    )
    failing = Model(fail_at=9)
    with pytest.raises(RuntimeError, match="no such luck"):
        trainer(saving, enable_checkpointing=True).fit(failing, datamodule=data(folders, kind))
    path = max(tmp_path.glob("*.ckpt"), key=lambda one: ("exception" in one.name, one.stat().st_mtime))
    assert failing.seen == whole[:9]
    assert fit(data(folders, kind), path=path).seen == whole[9:]


CHAINS = [
    pytest.param(name, first, second, marks=() if (first, second) == (4, 3) else pytest.mark.nightly)
    for name in ("plain", "accumulate", "limit", "half, val twice", "val often")
    for first in (0, 1, 3, 4, 5, 7)
    for second in (1, 2, 3, 4)
    if (name, second) != ("accumulate", 1)  # which saves nothing
]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("asks", [False, True])
def test_overfitting_that_max_steps_stopped_goes_on(folders: tuple[Path, Path], tmp_path: Path, asks: bool) -> None:
    whole = fit(data(folders, "uneven"), overfit_batches=3).seen
    seen: Seen = []
    path = None
    for stop in (1, 3, 5, 8, -1):
        model = Model(asks=asks)
        running = trainer(max_steps=stop, overfit_batches=3)
        running.fit(model, datamodule=data(folders, "uneven"), ckpt_path=path, **RESTORE)
        seen += model.seen
        path = str(tmp_path / f"{stop}.ckpt")
        running.save_checkpoint(path)
    assert seen == whole


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint")
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize("kind", ["plain", "uneven"])
@pytest.mark.parametrize(("name", "first", "second"), CHAINS)
def test_a_failed_step_and_then_a_checkpoint_of_the_resumed_run(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, name: str, first: int, second: int
) -> None:
    whole = Model()
    trainer(**OPTIONS[name]).fit(whole, datamodule=data(folders, kind))
    models = [Model(fail_at=first), Model(fail_at=second), Model()]
    crash = OnExceptionCheckpoint(tmp_path / "1", "a")
    savings: list[list[Callback]] = [[crash], [ModelCheckpoint(tmp_path / "2", "b", every_n_train_steps=1)], []]
    path: Any = None
    for model, saving, left in zip(models, savings, ("1/a.ckpt", "2/b.ckpt", ""), strict=True):
        running = trainer(*saving, **{**OPTIONS[name], "enable_checkpointing": bool(saving)})
        with contextlib.suppress(RuntimeError):
            running.fit(model, datamodule=data(folders, kind), ckpt_path=path, **RESTORE)
        path = tmp_path / left
    # Where steps are accumulated, the batches of the group that failed come again.
    begin = counted(whole, len(models[0].seen), OPTIONS[name])
    seen = models[0].seen[:begin] + models[1].seen
    assert models[0].seen == whole.seen[: len(models[0].seen)]
    assert models[2].seen == whole.seen[len(whole.seen) - len(models[2].seen) :]
    assert seen == whole.seen[: len(seen)]
    if name != "accumulate":
        assert seen + models[2].seen == whole.seen
        assert [one for model in models for one in model.validated] == whole.validated
    assert running.current_epoch == 3


class Weighing(Model):
    """Its weights tell which batches have reached the optimizer, and when."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at

    def training_step(self, batch: list[str], batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        super().training_step(batch, batch_idx)
        return torch.Tensor(self.layer(torch.full((1, 1), float(batch[0][1:]) / 100)).square().sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint")
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("kind", ["plain", pytest.param("uneven", marks=pytest.mark.nightly)])
def test_a_signal_within_a_group_of_accumulated_batches_loses_none(
    folders: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2, "limit_val_batches": 0}

    def run(model: Weighing, *callbacks: Callback, path: Any = None) -> Weighing:
        running = trainer(*callbacks, **{**options, "enable_checkpointing": bool(callbacks)})
        with contextlib.suppress(SIGTERMException):
            torch.nn.init.constant_(model.layer.weight, 1.0)
            torch.nn.init.constant_(model.layer.bias, 0.5)
            running.fit(model, datamodule=data(folders, kind), ckpt_path=path, **RESTORE)
        return model

    whole = run(Weighing())
    for stop_at in range(len(whole.seen)):
        killed = run(Weighing(stop_at), OnExceptionCheckpoint(tmp_path, str(stop_at)))
        path = tmp_path / f"{stop_at}.ckpt"
        if not path.exists():  # the last batch: nothing was left to stop
            assert stop_at == len(whole.seen) - 1
            continue
        done = counted(whole, len(killed.seen), options)
        resumed = run(Weighing(), path=path)
        assert resumed.seen == whole.seen[done:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


class Peek(Callback):
    """Looks at the first batch of the train loader in the middle of each epoch."""

    def __init__(self, module: IndexedWebDataModule) -> None:
        self.module, self.first = module, list[Any]()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.first.append(next(iter(trainer.train_dataloader)))
            self.first.append(next(iter(self.module.train_dataloader())))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_iterator_leaves_the_first_one_alone(folders: tuple[Path, Path], tmp_path: Path, workers: int) -> None:
    plain = fit(data(folders, "uneven"), max_epochs=2)
    module = data(folders, "uneven", num_workers=workers)
    peek, saving = Peek(module), Save(tmp_path)
    model = fit(module, peek, saving, max_epochs=2)
    assert model.seen == plain.seen
    epochs = [[list(batch) for at, batch in plain.seen if at == epoch] for epoch in range(2)]
    assert peek.first == [epochs[0][0]] * 2 + [epochs[1][0]] * 2
    for path, hook, done in saving.saved[::5]:
        rest = fit(data(folders, "uneven"), path=path, max_epochs=2).seen
        assert rest == plain.seen[done:], hook


class PeekAt(Callback):
    """Looks at the first batch in one hook, and keeps the iterator that gave it."""

    def __init__(self, hook: str) -> None:
        self.held: list[Any] = []
        setattr(self, hook, self.look)

    def look(self, trainer: Any, *rest: Any) -> None:
        module = trainer.datamodule
        before = module.state_dict()
        ended = before["train"]["steps"] == len(trainer.train_dataloader)
        for number, loader in enumerate((trainer.train_dataloader, module.train_dataloader())):
            iterator = iter(loader)
            assert next(iterator)
            if ended:  # the end of an epoch is the beginning of the next
                after = module.state_dict()["train"]
                assert (after["epoch"], after["steps"]) == (before["train"]["epoch"] + 1, 0)
            else:
                assert module.state_dict() == before
            self.held += [iterator] * number  # the other one ends at once


AT_THE_START = [
    pytest.param(
        hook, workers, marks=() if (hook, workers) in (("train", 0), ("train_epoch", 2)) else pytest.mark.nightly
    )
    for hook in ("train", "train_epoch", "train_batch")
    for workers in (0, 2)
]


@pytest.mark.parametrize(("hook", "workers"), AT_THE_START)
def test_a_look_in_a_resumed_fit_leaves_the_position(
    folders: tuple[Path, Path], tmp_path: Path, hook: str, workers: int, request: pytest.FixtureRequest
) -> None:
    """`max_steps` ends an epoch early: its rest is another one to the trainer, which starts at a position."""
    whole = [batch for _, batch in fit(data(folders, "uneven")).seen]
    stopped, path = trainer(max_steps=3), tmp_path / "stopped.ckpt"
    stopped.fit(Model(), datamodule=data(folders, "uneven"))
    stopped.save_checkpoint(path)
    saved = [(str(path), 3)]
    if hook != "train_epoch":
        saving = Save(tmp_path)
        fit(data(folders, "uneven"), saving)
        nightly = any(request.node.iter_markers("nightly"))
        saved += [(path, done) for path, _, done in (saving.saved[2::6] if nightly else saving.saved[6:7])]
    for checkpoint, done in saved:
        peek = PeekAt(f"on_{hook}_start")
        rest = fit(data(folders, "uneven", num_workers=workers), peek, path=checkpoint).seen
        assert [batch for _, batch in rest] == whole[done:], done
        assert peek.held or not rest
        peek.held.clear()
        assert not multiprocessing.active_children()  # what is dropped ends at once, not when garbage is collected


def test_a_test_with_an_older_checkpoint_leaves_the_position(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saving, module, model = Save(tmp_path), data(folders), Model()
    running = trainer(saving, max_epochs=1)
    running.fit(model, datamodule=module)
    before = module.state_dict()
    assert before["train"]["steps"] == 7
    running.test(model, datamodule=module, ckpt_path=saving.saved[2][0], verbose=False, **RESTORE)
    assert module.state_dict() == before
    running.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["IndexedWebDataModule"]["train"] == before["train"]


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_sees_every_sample_in_one_order_every_time(folders: tuple[Path, Path], workers: int) -> None:
    options: dict[str, Any] = {"batch_sampler": Stateful, "batch_size": None, "sizes": "txt", "num_workers": workers}
    model = fit(data(folders, **options), max_epochs=4, num_sanity_val_steps=0)
    once = model.val[:VAL]
    assert sorted(once) == [f"v{i:02d}" for i in range(VAL)]
    assert model.val == once * 4


class Writer(BasePredictionWriter):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *rest: Any
    ) -> None:
        self.batches.append((batch_indices, batch))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = batch_indices


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("returned", [True, False])
def test_a_prediction_writer_gets_the_indices(folders: tuple[Path, Path], workers: int, returned: bool) -> None:
    writer, module = Writer(), data(folders, num_workers=workers)
    running = trainer(writer)
    outputs = running.predict(Model(), datamodule=module, return_predictions=returned)
    assert [indices for indices, _ in writer.batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(batch == [f"v{i:02d}" for i in indices] for indices, batch in writer.batches)
    assert writer.epoch == [[[0, 1, 2], [3, 4, 5], [6]]]
    if returned:
        assert outputs is not None
        assert len(module.predictions(outputs)) == VAL
    else:
        with pytest.raises(ValueError, match="one for each of its 0 batches"):  # none is kept
            module.predictions([[]])


@pytest.mark.nightly  # test_lightning_tools has the default proof
def test_the_batch_size_finder_sets_the_batch_size(folders: tuple[Path, Path], tmp_path: Path) -> None:
    module = data(folders, batch_size={"train": 2, "val": 3, "test": 3})
    running = trainer(default_root_dir=tmp_path, max_epochs=1)
    found = Tuner(running).scale_batch_size(Model(), datamodule=module, steps_per_trial=1, max_trials=2)
    assert found is not None
    assert module.batch_size == found > 2
    assert len(fit(module, max_epochs=1).seen) == -(-TRAIN // found)
    with pytest.raises(AttributeError, match="batch_sampler makes the batches"):
        data(folders, "uneven").batch_size = 3


def test_a_loader_that_was_looked_at_before_the_fit(folders: tuple[Path, Path]) -> None:
    expected = fit(data(folders, "uneven"), max_epochs=2).seen
    module = data(folders, "uneven", num_workers=1)
    module.setup("fit")
    assert next(iter(module.train_dataloader())) == list(expected[0][1])
    assert fit(module, max_epochs=2).seen == expected
