"""A real trainer that is given a loader without a data module of headrace: refused to train, welcome to evaluate."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
from indexed_runs import TRAIN, Model, keys, trainer
from lightning.pytorch.utilities import CombinedLoader
from streams import module as stream_module
from streams import number, write
from torch.utils.data import DataLoader

from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no", "ignore:.*does not have many workers"
)
SAMPLES = [{"__key__": f"t{i:02d}"} for i in range(TRAIN)]
KEYS = [sample["__key__"] for sample in SAMPLES]


def loader(*, fixed_epoch: bool = False) -> ResumableLoader:
    batches = DistributedBatchSampler(TRAIN, 3, num_replicas=1, rank=0, shuffle=not fixed_epoch)
    return ResumableLoader(SAMPLES, batches, collate_fn=keys, fixed_epoch=fixed_epoch)


def plain() -> DataLoader[Any]:
    return DataLoader(SAMPLES, batch_size=3, collate_fn=keys)  # type: ignore[arg-type]  # a list is a dataset


def of_a_module(_: Path) -> Any:
    module = MapDataModule({"train": SAMPLES}, batch_size=3, collate_fn=keys, num_replicas=1, rank=0)
    module.setup("fit")
    return module.train_dataloader()


def of_a_stream(folder: Path) -> Any:
    module = stream_module(write(folder / "stream", [TRAIN]), TRAIN, 3, pipeline_wds=number)
    module.setup("fit")
    return module.train_dataloader()


def of_a_fit_before(_: Path) -> Any:
    module = MapDataModule({"train": SAMPLES}, batch_size=3, collate_fn=keys)
    kept: list[Any] = []
    callback = lightning.Callback()
    callback.on_train_start = lambda trainer, pl_module: kept.append(trainer.train_dataloader)  # type: ignore[method-assign]
    trainer(callback, max_steps=1).fit(Model(), datamodule=module)
    return kept[0]


class OfOneself(lightning.LightningDataModule):
    """A data module that is not of headrace."""

    def train_dataloader(self) -> Any:
        return loader()


ALONE: dict[str, Callable[[Path], Any]] = {
    "a loader": lambda _: loader(),
    "a loader of a data module": of_a_module,
    "a loader of a stream": of_a_stream,
    "a loader of a fit before": of_a_fit_before,
    "a data module of one's own": lambda _: OfOneself(),
    "several loaders": lambda _: {"ours": loader(), "torch's": plain()},
    "several combined": lambda _: CombinedLoader([plain(), loader()], "max_size_cycle"),
}


@pytest.mark.parametrize("what", list(ALONE))
def test_a_trainer_is_refused_before_its_first_step(tmp_path: Path, what: str) -> None:
    model, refused = Model(), ALONE[what](tmp_path)
    name = "datamodule" if isinstance(refused, lightning.LightningDataModule) else "train_dataloaders"
    with pytest.raises(ValueError, match=r"train_dataloaders must not hold the train loader.*datamodule="):
        trainer().fit(model, **{name: refused})
    assert model.seen == []


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_fixed_loader_evaluates_and_another_one_is_refused(stage: str) -> None:
    model, fixed = Model(), loader(fixed_epoch=True)
    for _ in range(2):
        outputs = getattr(trainer(), stage)(model, fixed)
    predicted = [key for output in outputs for key in output["key"]] if stage == "predict" else KEYS
    assert (predicted, model.val[TRAIN:]) == (KEYS, [] if stage == "predict" else KEYS)
    with pytest.raises(ValueError, match=r"or to evaluate, give the loader fixed_epoch=True"):
        getattr(trainer(), stage)(model, loader())


def test_a_fixed_loader_validates_a_fit() -> None:
    model = Model()
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, plain(), loader(fixed_epoch=True))
    assert model.val == 2 * KEYS


def test_a_loop_of_ones_own_chooses_epochs_where_lightning_is_imported() -> None:
    """Lightning calls the method of `sampler`, and so do loops where it is not imported."""
    ours = loader()
    ours.set_epoch(1)
    assert ours.epoch == 1
    with pytest.raises(ValueError, match=r"In a loop of your own call loader.set_epoch\(epoch\)"):
        ours.sampler.set_epoch(2)
    assert ours.epoch == 1


def test_without_lightning_the_sampler_chooses_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    ours = loader()
    ours.sampler.set_epoch(2)
    assert ours.epoch == 2
