"""`IndexedWebDataModule`: its arguments, loaders, predictions and reports."""

import copy
import logging
import pickle
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from indexed_runs import TRAIN, VAL, Bare, Mesh, Model, Save, Stateful, data, fit, keys, make_shards, trainer
from lightning.pytorch.callbacks import Callback

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedWebDataModule,
    SharedShardsWarning,
    Split,
    index_shards,
    write_tars,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    train, val = (make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL)))
    return train, val


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("plain", {"seed": 1}, "checkpoint has seed=0, got seed=1; resume with the options it was saved with"),
        ("plain", {"batch_size": 4}, "checkpoint has batch_size=3, got batch_size=4"),
        ("uneven", {"seed": 1}, "checkpoint has seed=0, got seed=1"),
        ("plain", {"shards": 1}, "of other train data.*resume with the data it was saved with"),
        ("plain", {"sampler": 1}, r"checkpoint has sampler=None, got sampler=.*lambda> \(\w+\)"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_with_the_cure(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, change: dict[str, Any], told: str
) -> None:
    saving = Save(tmp_path)
    fit(data(folders, kind), saving, max_steps=3)
    if "shards" in change:
        folders, change = (folders[1], folders[0]), {}
    if "sampler" in change:
        change = {"sampler": {Split.train: lambda dataset, **options: list(range(len(dataset)))}}
    with pytest.raises(ValueError, match=told):
        fit(data(folders, kind, **change), path=saving.saved[-1][0])


def test_another_seed_is_told_once(folders: tuple[Path, Path]) -> None:
    saved = data(folders)
    saved.setup("fit")
    next(iter(saved.train_dataloader()))
    other = data(folders, seed=1)
    other.load_state_dict(saved.state_dict())
    other.setup("fit")
    told = "the checkpoint does not fit: checkpoint has seed=0, got seed=1; resume with the options it was saved with, "
    with pytest.raises(ValueError, match=f"^{told}or start without the checkpoint$"):
        other.train_dataloader()


def test_a_val_loader_without_its_split_says_what_is_missing(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({"train": folders[0], "test": folders[1]}, batch_size=5)
    told = r"val_dataloader\(\) needs 'val', but shards has 'train', 'test': add shards\['val'\]"
    for one in (module, pickle.loads(pickle.dumps(module)), copy.copy(module), copy.deepcopy(module)):
        with pytest.raises(ValueError, match=told):
            one.val_dataloader()


class Odd:
    """An order that says nothing of what decides it."""

    def __init__(self, dataset: Any, *, num_replicas: int, rank: int, seed: int, by: int = 0) -> None:
        self.order = [(index * 7 + by) % len(dataset) for index in range(len(dataset))]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


@pytest.mark.parametrize(
    ("kind", "before", "now", "told"),
    [
        ("bare", {"seed": 1}, {"seed": 2}, "checkpoint has seed=1, got seed=2"),
        ("bare", {}, {"sizes": "json"}, "checkpoint has sizes='txt', got sizes='json'"),
        ("plain", {"sampler": partial(Odd, by=1)}, {"sampler": partial(Odd, by=2)}, r"checkpoint has sampler=.*by=1"),
    ],
)
@pytest.mark.slow
def test_options_without_a_fingerprint_are_compared_as_they_read(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, before: Any, now: Any, told: str
) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, kind, **before), saving)
    for path, _, done in saving.saved[3::25]:
        with pytest.raises(
            ValueError, match=rf"the checkpoint does not fit: {told}.*; resume with the options it was saved with"
        ):
            fit(data(folders, kind, **now), path=path)
        assert fit(data(folders, kind, **before), path=path).seen == model.seen[done:]


def test_a_checkpoint_of_another_version_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="has version 9, this release reads 1: resume with the data module and"):
        data(folders).load_state_dict({"version": 9})


@pytest.mark.parametrize("workers", [0, 2])
def test_fit_validate_test_predict(folders: tuple[Path, Path], workers: int) -> None:
    module, model = data(folders, num_workers=workers), Model()
    running = trainer(max_epochs=1, num_sanity_val_steps=0)
    running.fit(model, datamodule=module)
    expected = [f"v{i:02d}" for i in range(VAL)]
    for stage in (running.validate, running.test):
        model.val.clear()
        stage(model, datamodule=module, verbose=False)
        assert model.val == expected
    for _ in range(2):
        outputs = running.predict(model, datamodule=module)
        assert isinstance(outputs, list)
        found = module.predictions(outputs)
        assert [key for key, _ in found] == expected
        assert all(row["key"] == key and int(row["length"]) == 3 for key, row in found)
    with pytest.raises(ValueError, match=r"what Trainer\.predict returned last"):
        module.predictions([])


def test_predictions_come_in_order_whatever_the_batches(folders: tuple[Path, Path]) -> None:
    module = data(folders, batch_size=None, batch_sampler=Stateful, sizes="txt")
    outputs = trainer().predict(Model(), datamodule=module)
    assert outputs is not None
    assert [key for key, _ in module.predictions(outputs)] == [f"v{i:02d}" for i in range(VAL)]


def test_a_report_is_logged_when_asked_for(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).propagate = True
    with caplog.at_level(logging.INFO):
        fit(data(folders, "uneven"), max_epochs=1)
        assert "samples in" not in caplog.text
        fit(data(folders, "uneven", log_stats=True), max_epochs=1)
    assert f"train: {TRAIN} samples in" in caplog.text
    assert "padding:" in caplog.text


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_without_a_validation_split(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({Split.train: folders[0]}, batch_size=5, collate_fn=keys)
    assert len(fit(module, max_epochs=2).seen) == 8
    assert module.state_dict()["train"]["steps"] == 4


def test_without_a_trainer(folders: tuple[Path, Path]) -> None:
    module = data(folders)
    module.setup("fit")
    loader = module.train_dataloader()
    first = list(islice(loader, 3))
    other = data(folders)
    other.load_state_dict(module.state_dict())
    other.setup("fit")
    rest = list(other.train_dataloader())
    assert sorted(key for batch in first + rest for key in batch) == [f"t{i:02d}" for i in range(TRAIN)]
    report = other.report()[Split.train]
    assert report.batches == len(rest)


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be an int >= 1, got 0"),
        ({"batch_size": True}, TypeError, "batch_size must be an int >= 1, got True"),
        ({"batch_size": {Split.train: 2}}, ValueError, "no batch_size for 'val'"),
        ({"batch_size": None}, ValueError, "no batch_size for 'train'"),
        ({"batch_sampler": Bare}, ValueError, "has both batch_size=3 and batch_sampler: give one"),
        (
            {"batch_size": None, "batch_sampler": Bare},
            ValueError,
            "'train' has no sizes: give sizes= the name of a col",
        ),
        ({"batch_size": None, "batch_sampler": "8", "sizes": "txt"}, TypeError, "max_total_size=16384"),
        ({"sizes": "txt"}, ValueError, "sizes is for batch_sampler, and there is none"),
        ({"sampler": 3}, TypeError, "sampler must be a function.*weights="),
        ({"sampler": partial(Bare, rank=1)}, ValueError, "names rank: the order is that of all ranks"),
        ({"transform": "tokens"}, TypeError, "transform must be a function"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be a function"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        ({"drop_last": "yes"}, TypeError, "drop_last must be True or False"),
        ({"seed": -1}, ValueError, "seed must be an int >= 0, got -1"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'skip', got 'ignore'"),
        ({"num_workers": -1}, ValueError, "num_workers must be an int >= 0, got -1"),
        ({"num_workers": True}, TypeError, "num_workers must be an int >= 0, got True"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an int >= 0, got 1.5"),
        ({"num_workers": {"val": -1}}, ValueError, r"num_workers\['val'\] must be an int >= 0, got -1"),
        ({"timeout": -1}, ValueError, "timeout must be seconds"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be an int >= 1, got 0"),
        ({"verify": "never"}, ValueError, "verify must be one of"),
        ({"decode": "json"}, ValueError, "decode must be a function of key and bytes, a mapping"),
        ({"keys": "txt"}, ValueError, "keys must be a list of member keys"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be an int >= 1, got 0"),
        ({"allowed_classes": "a.B"}, ValueError, "allowed_classes must be a list of classes"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank must be from 0 to 1 with num_replicas=2"),
        ({"num_replicas": 2, "mesh": Mesh()}, ValueError, "so leave out num_replicas"),
    ],
)
def test_arguments_that_are_not_allowed(
    folders: tuple[Path, Path], options: dict[str, Any], kind: type[Exception], told: str
) -> None:
    with pytest.raises(kind, match=told):
        data(folders, **options)


def test_integers_of_numpy_are_integers(folders: tuple[Path, Path]) -> None:
    numbers: dict[str, Any] = {name: np.int64(2) for name in ("batch_size", "num_workers", "prefetch_factor", "seed")}
    module = data(folders, **numbers)
    module.setup("test")
    loader = module.test_dataloader()
    assert [len(batch) for batch in loader] == [2, 2, 2, 1]
    loader.close()


def test_a_stage_without_its_split_says_so(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({Split.val: folders[1]}, batch_size=5)
    with pytest.raises(ValueError, match=r"fit\(\) needs .*train.*add shards"):
        module.setup("fit")
    with pytest.raises(ValueError, match="stage must be one of 'fit'"):
        module.setup("train")


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_sizing_function_is_asked_before_the_ranks_begin(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_tars([(f"s{i:02d}", {"txt": b"x" * (i % 5 + 1)}) for i in range(10)], folder, n_shards=2)
    index_shards(folder)

    calls = tmp_path / "calls"  # a list would be part of what the function is made of

    def length(sample: dict[str, Any]) -> int:
        with calls.open("a") as file:
            print(sample["__key__"], file=file)
        return len(sample["txt"])

    for _ in range(2):
        module = IndexedWebDataModule({Split.train: folder}, batch_sampler=Stateful, sizes=length, collate_fn=keys)
        fit(module, max_epochs=1)
    assert sorted(calls.read_text().split()) == [f"s{i:02d}" for i in range(10)]


def test_a_checkpoint_that_does_not_fit_says_what_differs(folders: tuple[Path, Path]) -> None:
    saved = IndexedWebDataModule({Split.train: folders[0]}, batch_size=5, collate_fn=keys)
    saved.setup("fit")
    next(iter(saved.train_dataloader()))
    other = IndexedWebDataModule({Split.train: folders[0]}, batch_size=4, collate_fn=keys)
    other.load_state_dict(saved.state_dict())
    other.setup("fit")
    with pytest.raises(ValueError, match="checkpoint has batch_size=5, got batch_size=4"):
        other.train_dataloader()


def test_one_set_of_shards_for_training_and_validation_is_told(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule(folders[0], batch_size=5, collate_fn=keys)
    with pytest.warns(SharedShardsWarning, match="validation reads what training reads"):
        fit(module, max_epochs=1)


def test_predictions_need_outputs(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({Split.test: folders[0]}, batch_size=5, collate_fn=keys)
    with pytest.raises(TypeError, match="return_predictions=False"):
        module.predictions(None)  # type: ignore[arg-type]  # as Trainer.predict gives it


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_overfitting_takes_the_same_batches_in_every_epoch(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({Split.train: folders[0]}, batch_size=5, collate_fn=keys)
    seen = [batch for _, batch in fit(module, max_epochs=3, overfit_batches=2).seen]
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]


def test_a_data_state_that_is_none(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule({Split.train: folders[0]}, batch_size=5, collate_fn=keys)
    with pytest.raises(TypeError, match="must be a mapping, got list"):
        module.load_state_dict([1])  # type: ignore[arg-type]  # edited by hand
    with pytest.raises(ValueError, match="this release reads"):
        module.load_state_dict({"version": 1})


class SaveAtStart(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_second_fit_does_not_save_where_the_first_one_ended(folders: tuple[Path, Path], tmp_path: Path) -> None:
    module = IndexedWebDataModule({Split.train: folders[0]}, batch_size=5, collate_fn=keys)
    fit(module, max_epochs=-1, max_steps=3)
    assert module.state_dict()["train"]["steps"] == 3
    fit(module, SaveAtStart(tmp_path / "start.ckpt"), max_epochs=1)
    saved = torch.load(tmp_path / "start.ckpt", weights_only=True)
    assert saved.get("IndexedWebDataModule", {"train": {"steps": 0}})["train"]["steps"] == 0


def loaded(module: IndexedWebDataModule, stage: str) -> list[list[str]]:
    module.setup(stage)
    name = {"fit": "train", "validate": "val"}.get(stage, stage)
    return list(getattr(module, f"{name}_dataloader")())


def test_splits_by_their_names(folders: tuple[Path, Path]) -> None:
    module = IndexedWebDataModule(
        {"train": folders[0], "val": folders[1]}, batch_size={"train": 4, "val": 7}, collate_fn=keys
    )
    assert [len(batch) for batch in loaded(module, "fit")] == [4] * 5
    assert loaded(module, "validate") == [[f"v{i:02d}" for i in range(VAL)]]
    with pytest.raises(ValueError, match=r"predict\(\) needs 'predict' or 'test', but shards has 'train', 'val'"):
        module.setup("predict")


def test_predict_has_a_split_of_its_own_or_that_of_test(folders: tuple[Path, Path]) -> None:
    both = {"test": folders[0], "predict": folders[1]}
    assert sum(map(len, loaded(IndexedWebDataModule(both, batch_size=5, collate_fn=keys), "predict"))) == VAL
    only = IndexedWebDataModule({"test": folders[0]}, batch_size=5, collate_fn=keys)
    assert sum(map(len, loaded(only, "predict"))) == TRAIN


def test_training_is_shuffled_and_whole_unless_told_otherwise(folders: tuple[Path, Path]) -> None:
    def batches(**options: Any) -> list[list[str]]:
        return loaded(IndexedWebDataModule(folders[0], batch_size=6, collate_fn=keys, **options), "fit")

    every = [f"t{i:02d}" for i in range(TRAIN)]
    assert [len(batch) for batch in batches()] == [6, 6, 6, 2]
    assert sorted(key for batch in batches() for key in batch) == every
    assert batches() != batches(seed=1) != batches(shuffle=False)
    assert [key for batch in batches(shuffle=False) for key in batch] == every
    assert [len(batch) for batch in batches(drop_last=True)] == [6, 6, 6]
    module = IndexedWebDataModule({"test": folders[1]}, batch_size=6, collate_fn=keys, drop_last=True)
    assert [len(batch) for batch in loaded(module, "test")] == [6, 1]


def test_one_sampler_orders_training_alone(folders: tuple[Path, Path]) -> None:
    module = data(folders, sampler=lambda dataset, **options: [0] * 5)
    assert [key for batch in loaded(module, "fit") for key in batch] == ["t00"] * 5
    for stage in ("validate", "test", "predict"):
        assert [key for batch in loaded(module, stage) for key in batch] == [f"v{i:02d}" for i in range(VAL)]
    module = data(folders, sampler={"val": lambda dataset, **options: [6, 5]})
    assert [key for batch in loaded(module, "validate") for key in batch] == ["v06", "v05"]


def test_a_factory_keeps_the_ranks_that_it_names(folders: tuple[Path, Path]) -> None:
    def make(**options: Any) -> IndexedWebDataModule:
        return IndexedWebDataModule(folders[0], sizes="txt", collate_fn=keys, **options)

    whole = loaded(make(batch_sampler=partial(counted_batches, num_replicas=1, rank=0)), "fit")
    shares = [loaded(make(batch_sampler=partial(counted_batches, num_replicas=2, rank=rank)), "fit") for rank in (0, 1)]
    meshed = loaded(make(batch_sampler=partial(counted_batches, mesh=Mesh(2, 1))), "fit")
    given = loaded(make(batch_sampler=counted_batches, num_replicas=2, rank=1), "fit")
    assert sorted(key for share in shares for batch in share for key in batch) == sorted(
        key for one in whole for key in one
    )
    assert shares[1] == meshed == given
    for own in ({"rank": 0, "num_replicas": 2}, {"mesh": Mesh(2, 1)}):
        with pytest.raises(ValueError, match="ranks were given twice"):
            make(batch_sampler=partial(counted_batches, **own), num_replicas=2, rank=1)
    with pytest.raises(ValueError, match=r"sampler was given twice for 'train'"):
        make(batch_sampler=partial(counted_batches, sampler=[0]), sampler=partial(Odd))


def counted_batches(sizes: Any, /, *, sampler: Any, seed: int, **ranks: Any) -> DistributedBatchSampler:
    return DistributedBatchSampler(len(sizes), 3, sampler=sampler, seed=seed, **ranks)
