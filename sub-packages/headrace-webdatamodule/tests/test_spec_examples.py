"""The examples of the documents that describe the data modules, with the slips of the pen mended."""

import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import webdataset as wds
from webdataset import batched, shuffle

from headrace.webdatamodule import write_tars
from headrace.webdatamodule.datamodule import PickledDataWDS, Split, WebDataModule

SEED = 27193781


class Model(lightning.LightningModule):
    """Counts the rows it gets in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.rows = {"fit": 0, "validate": 0, "test": 0, "predict": 0}

    def step(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        self.rows[stage] += len(batch)
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


def trainer() -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def rows(n: int) -> list[tuple[str, dict[str, bytes]]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"sample{i}", {"tensor.pyd": pickle.dumps(torch.rand(1, 3, generator=generator))}) for i in range(n)]


def split_directories(tmp_path: Path, counts: dict[Split, int], prefix: str) -> dict[Split, str]:
    for split, n in counts.items():
        write_tars(rows(n), tmp_path / split.name, n_shards=4, prefix=prefix)
    return {split: str(tmp_path / split.name) for split in counts}


def web_data_module(dirs_of_tar_files: dict[Split, str], n_samples: dict[Split, int]) -> WebDataModule:
    """The example of both documents, in the argument order of the later one."""
    tar_file_prefix = "shards"
    suffix_keys_wds = "tensor.pyd"
    global_batch_size = local_batch_size = 16
    seed_rng_shfl = SEED

    def untuple(source: Iterable[Any]) -> Any:
        return (sample for (sample,) in source)

    pipeline_wds = {
        Split.train: [untuple, shuffle(n_samples[Split.train], rng=random.Random(seed_rng_shfl))],
        Split.val: untuple,
        Split.test: untuple,
    }
    batch = batched(local_batch_size, collation_fn=lambda list_samples: torch.vstack(list_samples))
    pipeline_prebatch_wld = {
        Split.train: [shuffle(n_samples[Split.train], rng=random.Random(seed_rng_shfl)), batch],
        Split.val: batch,
        Split.test: batch,
    }
    kwargs_wds = {
        split: {
            "shardshuffle": split == Split.train,
            "nodesplitter": wds.split_by_node,
            "seed": seed_rng_shfl,
        }
        for split in Split
    }
    kwargs_wld = {split: {"num_workers": 2} for split in Split}
    return WebDataModule(
        n_samples,
        suffix_keys_wds,
        dirs_of_tar_files,
        global_batch_size,
        prefix_tars_wds=tar_file_prefix,
        pipeline_wds=pipeline_wds,
        pipeline_prebatch_wld=pipeline_prebatch_wld,
        kwargs_wds=kwargs_wds,
        kwargs_wld=kwargs_wld,
    )


@pytest.mark.slow
def test_web_data_module_for_fit(tmp_path: Path) -> None:
    n_samples = {Split.train: 1000, Split.val: 100}
    data_module = web_data_module(split_directories(tmp_path, n_samples, "shards"), n_samples)
    model = Model()
    trainer().fit(model, datamodule=data_module)
    assert (model.rows["fit"], model.rows["validate"]) == (1000, 100)


@pytest.mark.parametrize(("stage", "split"), [("validate", Split.val), ("test", Split.test), ("predict", Split.test)])
def test_web_data_module_with_the_splits_that_a_stage_needs(tmp_path: Path, stage: str, split: Split) -> None:
    directories = split_directories(tmp_path, {split: 50}, "shards")
    data_module = web_data_module(directories, {Split.train: 1, split: 50})
    model = Model()
    getattr(trainer(), stage)(model, datamodule=data_module)
    assert model.rows[stage] == 50


def test_the_earlier_order_of_arguments_works_by_name(tmp_path: Path) -> None:
    n_samples = {Split.test: 20}
    data_module = WebDataModule(
        dirs_tars_wds=split_directories(tmp_path, n_samples, "wdshards"),
        n_samples=n_samples,
        suffix_keys_wds=("tensor.pyd",),
        global_batch_size=16,
    )
    data_module.prepare_data()
    data_module.setup("test")
    assert len(data_module.test_dataloader()) == len(data_module.predict_dataloader()) == 2


def test_pickled_data_wds(tmp_path: Path) -> None:
    dir_pickles = tmp_path / "pickles"
    dir_pickles.mkdir()
    for i in range(1, 7):
        tensor = torch.full((1, 3), float(i))
        (dir_pickles / f"sample{i}.mydata.pt").write_bytes(pickle.dumps(tensor))

    suffix_pickles = "mydata.pt"
    names_subset = {Split.train: ["sample1", "sample2"], Split.val: ["sample4", "sample5"]}
    n_tars_wds = 5
    prefix_tars_wds = "myshards"
    output_dir_tar_files = {
        Split.train: str(tmp_path / "dir-train"),
        Split.val: str(tmp_path / "dir-val"),
        Split.test: str(tmp_path / "dir-test"),
    }
    global_batch_size = 16

    def untuple(source: Iterable[Any]) -> Any:
        return (sample for (sample,) in source)

    batch = batched(16, collation_fn=torch.vstack)
    data_module = PickledDataWDS(
        str(dir_pickles),
        names_subset,
        suffix_pickles,
        output_dir_tar_files,
        global_batch_size,
        n_tars_wds=n_tars_wds,
        prefix_tars_wds=prefix_tars_wds,
        pipeline_wds={Split.train: untuple, Split.val: untuple},
        pipeline_prebatch_wld={Split.train: batch, Split.val: batch},
        kwargs_wds={Split.train: {"shardshuffle": True}, Split.val: {}},
        kwargs_wld={Split.train: {"num_workers": 2}, Split.val: {}},
    )
    model = Model()
    trainer().fit(model, datamodule=data_module)
    assert (model.rows["fit"], model.rows["validate"]) == (2, 2)
    tars = sorted(path.name for path in (tmp_path / "dir-train").glob("*.tar"))
    assert tars == ["myshards-000000.tar", "myshards-000001.tar"]  # of two samples, no more than two shards
    assert not (tmp_path / "dir-test").exists()
    [batch_of_train] = data_module.train_dataloader()
    assert sorted(batch_of_train[:, 0].tolist()) == [1.0, 2.0]


def test_methods_called_last(tmp_path: Path) -> None:
    directories = split_directories(tmp_path, {Split.train: 20}, "wdshards")
    data_module = WebDataModule(
        {Split.train: 20},
        "tensor.pyd",
        directories,
        4,
        invoke_wds={Split.train: [("with_epoch", {"nbatches": 100})]},
        invoke_wld={Split.train: [("with_epoch", {"nbatches": 100})]},
    )
    loader = data_module.train_dataloader()
    assert (len(loader), len(list(loader))) == (100, 100)
