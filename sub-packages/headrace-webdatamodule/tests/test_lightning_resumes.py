"""Laws of a trainer's checkpoints: resumed again and again, or with a data module of another class."""

from pathlib import Path
from typing import Any

import pytest
from indexed_runs import RESTORE, TRAIN, Model, Save, Stateful, keys, trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from headrace.webdatamodule import MapDataModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
SAMPLES = [{"__key__": f"t{i:02d}", "txt": "x" * (1 + i * 7 % 10)} for i in range(TRAIN)]
SIZES = [len(sample["txt"]) for sample in SAMPLES]
BATCHES: dict[str, Any] = {"plain": {"batch_size": 3}, "uneven": {"batch_sampler": Stateful, "sizes": SIZES}}


def module(kind: str = "plain", of: type[MapDataModule] = MapDataModule, **options: Any) -> MapDataModule:
    chosen = {**BATCHES[kind], "collate_fn": keys, "seed": 1, "num_replicas": 1, "rank": 0, **options}
    return of({"train": SAMPLES}, **chosen)


def fit(given: Any, *callbacks: Callback, path: Any = None, asks: bool = False, **options: Any) -> Model:
    model, running = Model(asks=asks), trainer(*callbacks, **{"num_sanity_val_steps": 0, **options})
    if "val_check_interval" in options:
        given.val_dataloader = lambda: DataLoader(["v"])  # type: ignore[arg-type]
    running.fit(model, datamodule=given, ckpt_path=path, **RESTORE)
    return model


def stopped_at(steps: int, given: Any, saving: Save, *, asks: bool) -> Path:
    """The checkpoint of a fit that `max_steps` ended, saved behind it."""
    running, path = trainer(saving, max_steps=steps), Path(saving.folder) / "stopped.ckpt"
    running.fit(Model(asks=asks), given)
    running.save_checkpoint(path)
    return path


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_steps": {"max_epochs": -1, "max_steps": 17},
    "limit": {"limit_train_batches": 4},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "steps between validations": {"val_check_interval": 3},
    "share between validations": {"val_check_interval": 0.5},
    "validations over epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
}
TWICE = [
    pytest.param(
        *(kind, name, asks),
        marks=()
        if asks == ((place + turn) % 2 == 0) and (turn == 0 or name in ("plain", "steps between validations"))
        else pytest.mark.nightly,
    )
    for turn, kind in enumerate(BATCHES)
    for place, name in enumerate(OPTIONS)
    for asks in (False, True)
]


@pytest.mark.parametrize(("kind", "name", "asks"), TWICE)
def test_a_run_that_resumed_at_the_end_of_an_epoch_resumes_in_the_next(
    tmp_path: Path, kind: str, name: str, asks: bool
) -> None:
    def run(*callbacks: Callback, path: Any = None) -> Model:
        return fit(module(kind), *callbacks, path=path, asks=asks, **OPTIONS[name])

    first, second = Save(tmp_path), Save(tmp_path / "second")
    whole = run(first).seen
    end = next(number for number, (epoch, _) in enumerate(whole) if epoch == 1)
    last = {hook: path for path, hook, done in first.saved if done == end and hook in ("batch end", "val end")}
    for path in last.values():
        assert run(second, path=path).seen == whole[end:]
        middle = next(path for path, hook, done in second.saved if (hook, done) == ("batch end", 2))
        assert run(path=middle).seen == whole[end + 2 :]


class Renamed(MapDataModule):
    """The data module of the same run, after its class got another name."""


MAKERS: dict[str, Any] = {
    "module": module,
    "renamed": lambda: module(of=Renamed),
    "torch's": lambda: DataLoader(SAMPLES, batch_size=3, collate_fn=keys),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("saved", "resumed"), [("module", "renamed"), ("renamed", "module")])
def test_a_checkpoint_with_a_position_goes_on_exactly(tmp_path: Path, saved: str, resumed: str, asks: bool) -> None:
    saving = Save(tmp_path)
    whole, stopped = fit(MAKERS[saved](), asks=asks).seen, stopped_at(9, MAKERS[saved](), saving, asks=asks)
    found = {(hook, done): path for path, hook, done in saving.saved}
    for path, done in ((found["batch end", 2], 2), (found["epoch end", 7], 7), (stopped, 9)):
        assert fit(MAKERS[resumed](), path=path, asks=asks).seen == whole[done:]


@pytest.mark.parametrize("asks", [False, True])
def test_a_checkpoint_in_mid_epoch_without_a_position_is_refused(tmp_path: Path, asks: bool) -> None:
    saving = Save(tmp_path)
    stopped = stopped_at(9, MAKERS["torch's"](), saving, asks=asks)
    found = {(hook, done): path for path, hook, done in saving.saved}
    for middle in (found["batch end", 5], stopped):  # which Lightning counts as an epoch
        with pytest.raises(ValueError, match=r"ckpt_path must .* position of the train .* data module that saved it"):
            fit(module(), path=middle, asks=asks)
    whole = fit(module(), asks=asks).seen
    assert fit(module(), path=found["epoch end", 7], asks=asks).seen == whole[7:]


def test_a_validation_that_was_stopped_is_skipped_and_training_goes_on(tmp_path: Path) -> None:
    saving = Save(tmp_path)
    options: dict[str, Any] = {"val_check_interval": 3}
    whole = fit(module(), saving, **options)
    for path, hook, done in saving.saved:
        if done == 3 and hook in ("batch end", "val batch end"):
            resumed = fit(module(), path=path, **options)
            assert (resumed.seen, resumed.validated) == (whole.seen[3:], whole.validated[1:])
