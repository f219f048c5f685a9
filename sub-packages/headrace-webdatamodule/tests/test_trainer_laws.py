"""What every data module promises in a Lightning trainer: one law, every kind of data module."""

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from indexed_runs import RESTORE, TRAIN, VAL, Model, Save, Seen, data, make_shards, trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from webdataset import batched, shuffle

from headrace.webdatamodule import WebDataModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:You requested to overfit"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    # Of OnExceptionCheckpoint.
    pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint"),
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
]
KINDS = ("plain", "uneven", "bare", "stream")  # uneven and bare: epochs of different lengths, with a state and without
EVERY = pytest.mark.parametrize("kind", KINDS)
EPOCHS = 3


def _named(letter: str) -> Any:
    """Samples by the keys that other data modules give."""
    return lambda source: (f"{letter}{number:02d}" for (number,) in source)


def _stream(folders: tuple[Path, Path], num_workers: int = 0) -> WebDataModule:
    places = {"train": folders[0], "val": folders[1], "test": folders[1]}
    return WebDataModule(
        {"train": TRAIN, "val": VAL, "test": VAL},
        "json",
        places,
        3,
        pipeline_wds={"train": [_named("t"), shuffle(9)], "val": _named("v"), "test": _named("v")},
        pipeline_prebatch_wld=dict.fromkeys(places, batched(3, collation_fn=None)),
        kwargs_wds={"train": {"shardshuffle": True, "seed": 5}},
        kwargs_wld={"train": {"num_workers": num_workers, "persistent_workers": num_workers > 0}},
    )


Make = Callable[..., lightning.LightningDataModule]
Whole = Callable[..., Model]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a data module with the splits train, val and test."""
    folders = tuple(
        make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL))
    )

    def module(kind: str, num_workers: int = 0) -> lightning.LightningDataModule:
        if kind == "stream":
            return _stream(folders, num_workers)  # type: ignore[arg-type]
        return data(folders, kind, num_workers=num_workers)  # type: ignore[arg-type]

    return module


def fit(module: Any, *callbacks: Callback, model: Model | None = None, path: Any = None, **options: Any) -> Model:
    model = Model() if model is None else model
    trainer(*callbacks, **options).fit(model, datamodule=module, ckpt_path=path, **RESTORE)
    return model


@pytest.fixture(scope="module")
def whole_of(new: Make) -> Whole:
    """A fit that nothing interrupts."""

    @cache
    def fitted(kind: str, **options: Any) -> Model:
        return fit(new(kind), **options)

    return fitted


def counted(seen: Seen, done: int, group: int = 1) -> int:
    """Of some steps, those whose gradients have reached the optimizer: the others of a group come again."""
    if done == 0:
        return 0
    epoch = seen[done - 1][0]
    begin = min(step for step, (at, _) in enumerate(seen) if at == epoch)
    last = done == len(seen) or seen[done][0] != epoch
    return done if last else done - (done - begin) % group


def by_night(values: Any, default: Callable[..., bool]) -> list[Any]:
    """Cases, of which the `default` ones run by day."""
    return [pytest.param(*value, marks=() if default(*value) else pytest.mark.nightly) for value in values]


# Whole runs


@pytest.mark.parametrize("workers", [0, 2])
@EVERY
def test_epochs_are_whole_and_their_lengths_known(new: Make, kind: str, workers: int) -> None:
    model = fit(new(kind, workers), num_sanity_val_steps=0)
    lengths = Counter(epoch for epoch, _ in model.seen)
    assert model.lengths == lengths
    assert len(set(lengths.values())) == (3 if kind in ("uneven", "bare") else 1)
    for epoch in range(EPOCHS):
        batches = [batch for at, batch in model.seen if at == epoch]
        assert sorted(key for batch in batches for key in batch) == [f"t{i:02d}" for i in range(TRAIN)]
    assert model.val == [f"v{i:02d}" for i in range(VAL)] * EPOCHS


@EVERY
def test_a_fit_begins_anew_whatever_was_read_by_hand(new: Make, whole_of: Whole, kind: str) -> None:
    module = new(kind, 1)
    module.setup("fit")
    assert next(iter(module.train_dataloader())) == list(whole_of(kind).seen[0][1])
    assert fit(module).seen == whole_of(kind).seen
    list(module.train_dataloader())
    assert fit(module).seen == whole_of(kind).seen


# Checkpoints

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
BY_DAY = {
    ("plain", "plain"),
    ("uneven", "plain"),
    ("uneven", "half, val twice"),
    ("bare", "accumulate"),
    ("uneven", "overfit"),
    ("stream", "plain"),
    ("stream", "accumulate and limit"),
    ("stream", "val often"),
}
HOOKS = {"start", "epoch start", "batch start", "batch end", "epoch end", "end"}


@pytest.mark.parametrize(
    ("kind", "name"), by_night([(kind, name) for kind in KINDS for name in OPTIONS], lambda *case: case in BY_DAY)
)
def test_a_checkpoint_of_any_moment_goes_on_exactly(
    new: Make, tmp_path: Path, kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    saving, options = Save(tmp_path), OPTIONS[name]
    model = fit(new(kind), saving, **options)
    assert {hook for _, hook, _ in saving.saved} >= HOOKS
    first_of_each = {(hook, done): path for path, hook, done in saving.saved}
    chosen = list(first_of_each.items())
    wrong = []
    for (hook, done), path in chosen if request.node.get_closest_marker("nightly") else chosen[::5]:
        done = counted(model.seen, done, options.get("accumulate_grad_batches", 1))
        resumed = fit(new(kind), path=path, **options)
        if resumed.seen != model.seen[done:]:
            wrong.append((hook, done, resumed.seen[:2], model.seen[done : done + 2]))
    assert wrong == []


@EVERY
def test_with_workers_it_goes_on_exactly(new: Make, tmp_path: Path, kind: str) -> None:
    saving = Save(tmp_path)
    model = fit(new(kind, 2), saving, limit_val_batches=0)
    then = 2 if kind == "stream" else 1
    for path, _, done in saving.saved[4::9]:
        assert fit(new(kind, then), path=path, limit_val_batches=0).seen == model.seen[done:]


@pytest.mark.parametrize("save_at", ["epoch end", "step 5", "step 8"])
@EVERY
def test_checkpoints_of_lightning_go_on_exactly(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, save_at: str
) -> None:
    often: dict[str, Any] = {"every_n_train_steps": int(save_at[-1])} if "step" in save_at else {"every_n_epochs": 1}
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **often)
    fit(new(kind), saving, enable_checkpointing=True)
    paths = list(tmp_path.glob("*.ckpt"))
    assert len(paths) >= 2
    for path in paths:
        done = int(path.stem.partition("step=")[2])
        assert fit(new(kind), path=path).seen == whole_of(kind).seen[done:]


class Stopping(Callback):
    """Stops a fit after some steps, as early stopping and a signal of SLURM do."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        trainer.should_stop |= len(pl_module.seen) == self.steps


@pytest.mark.parametrize("how", ["max_steps", "should_stop", "overfit"])
@pytest.mark.parametrize("asks", [False, True])
@EVERY
def test_a_fit_that_was_stopped_again_and_again_is_whole(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, asks: bool, how: str
) -> None:
    """A trainer takes an epoch that was stopped for a whole one; its rest comes first when the run resumes."""
    more: dict[str, Any] = {"overfit_batches": 3, "limit_val_batches": 0} if how == "overfit" else {}
    whole, path, seen = whole_of(kind, **more).seen, None, Seen()
    for stop in (1, 3, 5, len(whole) - 3, len(whole)):
        stopping = [Stopping(stop - len(seen))] if how == "should_stop" else []
        steps = {} if stopping or stop == len(whole) else {"max_steps": stop}
        running, model = trainer(*stopping, **more, **steps), Model(asks=asks)
        running.fit(model, datamodule=new(kind), ckpt_path=path, **RESTORE)
        assert (len(seen) + len(model.seen), running.max_epochs) == (stop, EPOCHS)
        seen += model.seen
        path = tmp_path / f"{stop}.ckpt"
        running.save_checkpoint(path)
    assert seen == whole  # the trainer's numbers of the epochs, too
    assert (running.global_step, running.current_epoch) == (len(whole), EPOCHS)


# Steps that fail


@pytest.mark.parametrize("workers", [0, 1])
@EVERY
def test_the_batch_of_a_step_that_failed_comes_again(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, workers: int
) -> None:
    whole = whole_of(kind).seen
    for number in (0, len(whole) // 3, len(whole) - 1):
        failing = Model(fail_at=number)
        with pytest.raises(RuntimeError, match="no such luck"):
            fit(
                new(kind, workers),
                OnExceptionCheckpoint(tmp_path, f"{number}"),
                model=failing,
                enable_checkpointing=True,
            )
        assert failing.seen == whole[:number]
        assert fit(new(kind, workers), path=tmp_path / f"{number}.ckpt").seen == whole[number:]


def test_validations_between_steps_come_as_planned_after_a_step_that_failed(new: Make, tmp_path: Path) -> None:
    options: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 3}
    whole, saving = fit(new("plain"), **options), OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="no such luck"):
        fit(new("plain"), saving, model=Model(fail_at=4), enable_checkpointing=True, **options)
    assert fit(new("plain"), path=tmp_path / "failed.ckpt", **options).validated == whole.validated[1:]


@pytest.mark.parametrize(
    ("kind", "name", "first", "second"),
    by_night(
        [
            (kind, name, first, second)
            for kind in KINDS
            for name in ("plain", "accumulate", "limit", "half, val twice", "val often")
            for first in (0, 1, 3, 4, 5, 7)
            for second in (1, 2, 3, 4)
            if (name, second) != ("accumulate", 1)  # which saves nothing
        ],
        lambda kind, name, first, second: (first, second) == (4, 3),
    ),
)
def test_a_failed_step_and_then_a_checkpoint_of_the_resumed_run(
    new: Make, tmp_path: Path, kind: str, name: str, first: int, second: int
) -> None:
    whole = fit(new(kind), **OPTIONS[name])
    models = [Model(fail_at=first), Model(fail_at=second), Model()]
    savings: list[list[Callback]] = [
        [OnExceptionCheckpoint(tmp_path / "1", "a")],
        [ModelCheckpoint(tmp_path / "2", "b", every_n_train_steps=1)],
        [],
    ]
    path: Any = None
    for model, saving, left in zip(models, savings, ("1/a.ckpt", "2/b.ckpt", ""), strict=True):
        running = trainer(*saving, **{**OPTIONS[name], "enable_checkpointing": bool(saving)})
        with contextlib.suppress(RuntimeError):
            running.fit(model, datamodule=new(kind), ckpt_path=path, **RESTORE)
        path = tmp_path / left
    # Where steps are accumulated, the batches of the group that failed come again.
    begin = counted(whole.seen, len(models[0].seen), OPTIONS[name].get("accumulate_grad_batches", 1))
    seen = models[0].seen[:begin] + models[1].seen
    assert models[0].seen == whole.seen[: len(models[0].seen)]
    assert models[2].seen == whole.seen[len(whole.seen) - len(models[2].seen) :]
    assert seen == whole.seen[: len(seen)]
    if name != "accumulate":
        assert seen + models[2].seen == whole.seen
        assert [one for model in models for one in model.validated] == whole.validated
    assert running.current_epoch == EPOCHS


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


@pytest.mark.parametrize(
    ("kind", "workers"),
    by_night(
        [(kind, workers) for kind in KINDS for workers in (0, 2)], lambda *case: case in {("plain", 0), ("stream", 0)}
    ),
)
def test_a_signal_within_a_group_of_accumulated_batches_loses_none(
    new: Make, tmp_path: Path, kind: str, workers: int
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2, "limit_val_batches": 0}

    def run(model: Weighing, *callbacks: Callback, path: Any = None) -> Weighing:
        with contextlib.suppress(SIGTERMException):
            torch.nn.init.constant_(model.layer.weight, 1.0)
            torch.nn.init.constant_(model.layer.bias, 0.5)
            fit(
                new(kind, workers),
                *callbacks,
                model=model,
                path=path,
                **{**options, "enable_checkpointing": bool(callbacks)},
            )
        return model

    whole = run(Weighing())
    for stop_at in range(len(whole.seen)):
        killed = run(Weighing(stop_at), OnExceptionCheckpoint(tmp_path, str(stop_at)))
        path = tmp_path / f"{stop_at}.ckpt"
        if not path.exists():  # the last batch: nothing was left to stop
            assert stop_at == len(whole.seen) - 1
            continue
        resumed = run(Weighing(), path=path)
        assert resumed.seen == whole.seen[counted(whole.seen, len(killed.seen), 4) :]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


# Other iterators, other stages


class Peek(Callback):
    """Takes batches beside the trainer in one hook, and keeps an iterator."""

    def __init__(self, hook: str) -> None:
        self.kept: list[Any] = []
        self.taken: list[Any] = []
        setattr(self, hook, self.peek)

    def peek(self, trainer: Any, *rest: Any) -> None:
        module = trainer.datamodule
        before = module.state_dict()
        for number, loader in enumerate((trainer.train_dataloader, module.train_dataloader())):
            iterator = iter(loader)
            self.taken.append(next(iterator))
            self.kept += [iterator] * number  # the other one ends at once
        if (
            len(module.train_dataloader()) != place_of(before)[1]
        ):  # else the end of an epoch may be the next one's start
            assert place_of(module.state_dict()) == place_of(before)


def place_of(state: Any) -> tuple[int, int]:
    """The epoch and the delivered batches of a data module's state."""
    train = state["train"]
    return train["epoch"], train.get("steps", train.get("position"))


@pytest.mark.parametrize(
    ("kind", "hook", "workers"),
    by_night(
        [
            (kind, hook, workers)
            for kind in KINDS
            for hook in ("train_start", "train_epoch_start", "train_batch_start", "train_batch_end")
            for workers in (0, 1)
        ],
        lambda kind, hook, workers: kind in ("uneven", "stream") and (not workers or hook == "train_epoch_start"),
    ),
)
def test_batches_taken_beside_a_fit_leave_its_position(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, hook: str, workers: int
) -> None:
    whole = whole_of(kind).seen
    stopped, path = trainer(max_steps=3), tmp_path / "stopped.ckpt"
    stopped.fit(Model(), datamodule=new(kind))
    stopped.save_checkpoint(path)
    for checkpoint, done in ((None, 0), (path, 3)):
        peek, saving = Peek(f"on_{hook}"), Save(tmp_path)
        assert fit(new(kind, workers), peek, saving, path=checkpoint).seen == whole[done:]
        assert list(whole[0][1]) in peek.taken or done
        peek.kept.clear()
        assert not multiprocessing.active_children()  # what is dropped ends at once, not when garbage is collected
        for saved, _, then in saving.saved[1::11]:
            assert fit(new(kind), path=saved).seen == whole[done + then :]


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
@EVERY
def test_another_stage_with_an_older_checkpoint_leaves_the_position(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, stage: str
) -> None:
    saving, module, model = Save(tmp_path), new(kind), Model()
    running = trainer(saving, max_steps=5)
    running.fit(model, datamodule=module)
    before = module.state_dict()
    quiet = {} if stage == "predict" else {"verbose": False}
    getattr(running, stage)(model, datamodule=module, ckpt_path=saving.saved[4][0], **quiet, **RESTORE)
    assert module.state_dict() == before
    running.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)[type(module).__name__]["train"] == before["train"]
    assert model.seen + fit(module, path=tmp_path / "last.ckpt").seen == whole_of(kind).seen


@pytest.mark.parametrize("fails", [False, True])
@EVERY
def test_a_fit_after_a_validation_with_a_checkpoint_begins_anew(
    new: Make, whole_of: Whole, tmp_path: Path, kind: str, fails: bool
) -> None:
    class Failing(Callback):
        def on_validation_batch_start(self, *rest: Any) -> None:
            if fails:
                raise KeyError("validation")

    stopped, path, module = trainer(max_steps=3), tmp_path / "stopped.ckpt", new(kind)
    stopped.fit(Model(), datamodule=new(kind))
    stopped.save_checkpoint(path)
    with contextlib.suppress(KeyError):
        trainer(Failing()).validate(Model(), datamodule=module, ckpt_path=path, verbose=False, **RESTORE)
    assert fit(module).seen == whole_of(kind).seen


@pytest.mark.parametrize("workers", [0, 2])
@EVERY
def test_validation_sees_every_sample_in_one_order_every_time(new: Make, kind: str, workers: int) -> None:
    model = fit(new(kind, workers), max_epochs=4, num_sanity_val_steps=0)
    assert sorted(model.val[:VAL]) == [f"v{i:02d}" for i in range(VAL)]
    assert model.val == model.val[:VAL] * 4


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
@EVERY
def test_a_loop_of_ones_own_may_validate_with_a_trainer(new: Make, whole_of: Whole, kind: str, workers: int) -> None:
    whole = [list(batch) for epoch, batch in whole_of(kind).seen if epoch == 0]
    module, seen, states = new(kind, workers), [], []
    module.setup("fit")
    for batch in module.train_dataloader():
        seen.append(batch)
        if len(seen) == 2:
            trainer().validate(Model(), datamodule=module, verbose=False)
        states.append(module.state_dict())
    assert seen == whole
    for done in (2, 3):
        other = new(kind, workers)
        trainer().validate(Model(), datamodule=other, verbose=False)
        other.load_state_dict(states[done - 1])
        other.setup("fit")
        assert list(islice(other.train_dataloader(), len(whole))) == whole[done:]
