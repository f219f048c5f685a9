"""The data modules under a real trainer."""

import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import webdataset as wds

from headrace.webdatamodule import PickledDataWDS, ShardError, Split, UnsafePickleError, WebDataModule, write_tars

N = {Split.train: 22, Split.val: 9, Split.test: 7}
FIRST = {Split.train: 0, Split.val: 100, Split.test: 200}


class Model(lightning.LightningModule):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list[list[int]]] = {"fit": [], "validate": [], "test": [], "predict": []}

    def step(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        self.seen[stage].append(batch[:, 0].int().tolist())
        return torch.Tensor(self.layer(batch).mean())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.step("fit", batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.step("validate", batch)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.step("test", batch)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.step("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[Split, str]:
    folders = {split: str(tmp_path_factory.mktemp(split.name)) for split in N}
    for split, folder in folders.items():
        data = [pickle.dumps(torch.tensor([float(FIRST[split] + i)])) for i in range(N[split])]
        write_tars([(f"s{i}", {"tensor.pyd": d}) for i, d in enumerate(data)], folder, n_shards=3)
    return folders


def untuple(source: Any) -> Any:
    return (sample for (sample,) in source)


def module(places: dict[Split, str], splits: Any = tuple(N), workers: int = 0, **options: Any) -> WebDataModule:
    return WebDataModule(
        {split: N[split] for split in splits},
        "tensor.pyd",
        {split: places[split] for split in splits},
        4,
        pipeline_wds=dict.fromkeys(splits, untuple),
        pipeline_prebatch_wld=dict.fromkeys(splits, wds.batched(4, collation_fn=torch.stack)),
        kwargs_wld={split: {"num_workers": workers} for split in splits},
        **options,
    )


def trainer(**options: Any) -> lightning.Trainer:
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(accelerator="cpu", logger=False, **{**silent, **options})


def expected(split: Split, epochs: int = 1) -> list[int]:
    return sorted(list(range(FIRST[split], FIRST[split] + N[split])) * epochs)


def flat(batches: list[list[int]]) -> list[int]:
    return sorted(sample for batch in batches for sample in batch)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_fit_validate_test_and_predict(places: dict[Split, str], workers: int) -> None:
    model, data = Model(), module(places, workers=workers)
    run = trainer(max_epochs=2, num_sanity_val_steps=0)
    run.fit(model, datamodule=data)
    assert flat(model.seen["fit"]) == expected(Split.train, 2)
    assert (run.num_training_batches, run.num_val_batches) == (6, [3])
    assert run.global_step == 12
    assert flat(model.seen["validate"]) == expected(Split.val, 2)
    for stage in ("validate", "test", "predict"):
        model.seen[stage] = []
        getattr(run, stage)(model, datamodule=data)
    assert flat(model.seen["validate"]) == expected(Split.val)
    assert flat(model.seen["test"]) == expected(Split.test)
    assert flat(model.seen["predict"]) == expected(Split.test)


def test_fit_without_a_val_split(places: dict[Split, str]) -> None:
    model = Model()
    trainer(max_epochs=1).fit(model, datamodule=module(places, [Split.train]))
    assert flat(model.seen["fit"]) == expected(Split.train)
    assert model.seen["validate"] == []
    data = module(places, [Split.train])
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match=r"validate\(\) needs 'val'"):
        trainer().validate(model, datamodule=data)


def test_fit_with_the_sanity_check_and_limits(places: dict[Split, str]) -> None:
    model = Model()
    trainer(max_epochs=2, limit_train_batches=2, limit_val_batches=1).fit(model, datamodule=module(places))
    assert [len(model.seen[stage]) for stage in ("fit", "validate")] == [4, 3]


def test_the_progress_bar_knows_the_length(places: dict[Split, str], capsys: pytest.CaptureFixture[str]) -> None:
    trainer(max_epochs=1, enable_progress_bar=True).fit(Model(), datamodule=module(places))
    assert "6/6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "missing"), [("fit", "train"), ("validate", "val"), ("test", "test"), ("predict", "predict")]
)
def test_a_split_that_is_missing(places: dict[Split, str], stage: str, missing: str) -> None:
    data = module(
        places, [split for split in N if split.name != missing and (stage, split.name) != ("predict", "test")]
    )
    instead = " or 'test'" if stage == "predict" else ""
    message = rf"{stage}\(\) needs '{missing}'{instead}, but n_samples has '.*': add n_samples\['{missing}'\]"
    with pytest.raises(ValueError, match=message):
        getattr(trainer(max_epochs=1), stage)(Model(), datamodule=data)


def test_a_split_without_a_directory(places: dict[Split, str]) -> None:
    data = WebDataModule(N, "tensor.pyd", {Split.val: places[Split.val]}, 4)
    with pytest.raises(ValueError, match=r"but dirs_tars_wds has 'val': add dirs_tars_wds\['train'\]"):
        data.setup("fit")
    data.setup("validate")


def test_the_order_goes_on_with_the_trainers_epoch(places: dict[Split, str], tmp_path: Path) -> None:
    """A second fit of the same trainer, and one resumed from a checkpoint, begin where the first ended."""
    options: Any = {"kwargs_wds": {Split.train: {"shardshuffle": True, "seed": 4}}}
    whole, parts = Model(), Model()
    trainer(max_epochs=3, limit_val_batches=0).fit(whole, datamodule=module(places, **options))
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(parts, datamodule=module(places, **options))
    run.fit_loop.max_epochs = 3
    run.fit(parts, datamodule=module(places, **options))
    assert parts.seen["fit"] == whole.seen["fit"]
    first, rest = Model(), Model()
    run = trainer(max_epochs=2, limit_val_batches=0)
    run.fit(first, datamodule=module(places, **options))
    run.save_checkpoint(tmp_path / "two.ckpt")
    resumed, data = trainer(max_epochs=3, limit_val_batches=0), module(places, **options)
    resumed.fit(rest, datamodule=data, ckpt_path=str(tmp_path / "two.ckpt"))
    assert first.seen["fit"] + rest.seen["fit"] == whole.seen["fit"]
    assert len({tuple(map(tuple, whole.seen["fit"][i : i + 6])) for i in (0, 6, 12)}) == 3


def test_setup_is_optional_when_loaders_are_used_by_hand(places: dict[Split, str]) -> None:
    data = module(places)
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
    assert [len(loader) for loader in loaders] == [6, 3, 2, 2]
    assert [len(list(loader)) for loader in loaders] == [6, 3, 2, 2]


def test_unknown_stages(places: dict[Split, str]) -> None:
    with pytest.raises(ValueError, match="stage must be one of 'fit', 'validate', 'test', 'predict', got 'train'"):
        module(places).setup("train")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_shards(places: dict[Split, str]) -> None:
    model = Model()
    with pytest.warns(UserWarning, match=r"3 shards cannot be shared by 4 readers"):
        trainer(max_epochs=1).fit(model, datamodule=module(places, workers=4))
    assert flat(model.seen["fit"]) == expected(Split.train)


def test_a_directory_without_shards(places: dict[Split, str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no shard named wdshards-\*.tar"):
        trainer(max_epochs=1).fit(Model(), datamodule=module({**places, Split.train: str(tmp_path)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_samples": {Split.train: 0}}, r"n_samples\['train'\] must be an int >= 1, got 0"),
        ({"n_samples": {"training": 5}}, "keys must be 'train', .* got 'training'"),
        ({"dirs_tars_wds": "/data"}, "dirs_tars_wds must be a mapping from Split"),
        ({"global_batch_size": 2.5}, "global_batch_size must be an int >= 1, got 2.5"),
        ({"global_batch_size": -1}, "global_batch_size must be an int >= 1, got -1"),
        ({"suffix_keys_wds": []}, "suffix_keys_wds"),
        ({"pipeline_wds": {Split.train: 5}}, r"pipeline_wds\['train'\] must be"),
        ({"pipeline_prebatch_wld": untuple}, "pipeline_prebatch_wld must be a mapping"),
        ({"kwargs_wds": {"val": {}, Split.val: {}}}, "kwargs_wds has 'val' twice"),
        ({"kwargs_wld": {"num_workers": 2}}, "kwargs_wld: keys .* got 'num_workers'"),
        ({"invoke_wds": {Split.train: ["with_epoch"]}}, r"invoke_wds\['train'\] must list pairs"),
        ({"invoke_wld": [("with_epoch", {})]}, "invoke_wld must be a mapping"),
    ],
)
def test_arguments_are_checked_where_they_enter(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "n_samples": {Split.train: 5},
        "suffix_keys_wds": "json",
        "dirs_tars_wds": {Split.train: "/data"},
        "global_batch_size": 4,
    }
    WebDataModule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        WebDataModule(**{**good, **change})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "suffix_keys_wds must be a str or several"),
        ([b"a"], "suffix_keys_wds must be a str or several"),
        (None, "suffix_keys_wds must be a str or several"),
        ([], "at least one member key"),
        ("", "at least one member key"),
        (["a", ""], "at least one member key"),
        ([".pkl"], r"has no leading dot: write 'pkl', got '\.pkl'"),
    ],
)
def test_member_keys(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        WebDataModule({Split.train: 5}, given, {Split.train: "/data"}, 4)


def test_directories_in_the_place_of_counts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"n_samples\['train'\] must be an int >= 1, got '/data'"):
        WebDataModule({Split.train: "/data"}, {Split.train: 5}, "json", 4)  # type: ignore[dict-item, arg-type] # the earlier order


class Mine:
    def __init__(self) -> None:
        self.value = 5


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    for i in range(8):
        (tmp_path / f"sample{i}.mydata.pt").write_bytes(pickle.dumps(torch.tensor([float(i)])))
    return tmp_path


def pickled(pickles: Path, **options: Any) -> PickledDataWDS:
    names = {Split.train: [f"sample{i}" for i in range(6)], Split.val: ["sample6", "sample7"]}
    places = {split: str(pickles / split.name) for split in Split}
    return PickledDataWDS(
        str(pickles),
        names,
        "mydata.pt",
        places,
        2,
        pipeline_wds=dict.fromkeys(Split, untuple),
        pipeline_prebatch_wld=dict.fromkeys(Split, wds.batched(2, collation_fn=torch.stack)),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_pickles_are_packed_and_trained_on(pickles: Path, workers: int) -> None:
    model = Model()
    kwargs_wld = {split: {"num_workers": workers} for split in Split}
    data = pickled(pickles, n_tars_wds=5, prefix_tars_wds="myshards", kwargs_wld=kwargs_wld)
    trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=data)
    assert flat(model.seen["fit"]) == [0, 1, 2, 3, 4, 5]
    assert flat(model.seen["validate"]) == [6, 7]
    assert len(list((pickles / "train").glob("myshards-*.tar"))) == 5
    assert len(list((pickles / "val").glob("myshards-*.tar"))) == 2  # no shard is empty
    trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, datamodule=data)
    assert flat(model.seen["fit"]) == sorted([0, 1, 2, 3, 4, 5] * 2)


def test_pickles_of_own_classes_are_refused_unless_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.pyd").write_bytes(pickle.dumps(Mine()))
    arguments: Any = (str(tmp_path), {Split.test: ["a"]}, "pyd", {Split.test: str(tmp_path / "t")}, 1)
    data = PickledDataWDS(*arguments)
    data.prepare_data()
    with pytest.raises(UnsafePickleError, match=r"Mine.*allowed_classes"):
        list(data.test_dataloader())
    [[thing]] = PickledDataWDS(*arguments, allowed_classes=[Mine]).test_dataloader()
    assert thing.value == 5


def test_names_and_directories_are_checked(pickles: Path) -> None:
    places = {Split.train: str(pickles / "t")}
    for names, message in [
        ({Split.train: "sample1"}, "must be a list of names, got 'sample1'"),
        ({Split.train: [1]}, "must be a list of names"),
        ({Split.train: []}, r"names_subset\['train'\] is empty"),
        ({Split.val: ["sample1"]}, "names_subset has 'val', dirs_tars_wds has not"),
        ({"training": ["sample1"]}, "got 'training'"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            PickledDataWDS(str(pickles), names, "mydata.pt", places, 2)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ValueError, match="n_tars_wds must be an int >= 1, got 0"):
        pickled(pickles, n_tars_wds=0)
    with pytest.raises(ShardError, match="get the same sample key 'a-b'"):
        PickledDataWDS(str(pickles), {Split.train: ["a.b", "a-b"]}, "pt", places, 2).prepare_data()
