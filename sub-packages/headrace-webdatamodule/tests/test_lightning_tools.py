"""Lightning's own tools with the data modules: batch-size finder, learning-rate finder, throughput."""

import csv
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from indexed_runs import TRAIN, VAL, Model, keys, make_shards
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner

from headrace.webdatamodule import IndexedWebDataModule, MapDataModule

EVERY = [f"t{i:02d}" for i in range(TRAIN)]


@pytest.fixture(params=["shards", "list"])
def module(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "shards":
        places = {"train": make_shards(tmp_path / "t", "t", TRAIN), "val": make_shards(tmp_path / "v", "v", VAL)}
        return IndexedWebDataModule(places, batch_size=2, collate_fn=keys)
    given = {"train": [{"__key__": key} for key in EVERY], "val": [{"__key__": f"v{i}"} for i in range(VAL)]}
    return MapDataModule(given, batch_size=2, collate_fn=keys)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    chosen = {"max_epochs": 2, "logger": False, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **quiet, **chosen)


class Learning(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.flops_per_batch = 1  # for the monitor

    def training_step(self, batch: list[str], batch_idx: int) -> torch.Tensor:
        super().training_step(batch, batch_idx)
        return torch.Tensor(self.layer(torch.tensor([[float(len(batch))]])).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def whole_epochs(model: Model, epochs: int) -> None:
    for epoch in range(epochs):
        assert sorted(key for at, batch in model.seen if at == epoch for key in batch) == EVERY


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "method"), [("power", "fit"), ("binsearch", "validate")])
def test_the_batch_size_finder(module: Any, tmp_path: Path, mode: str, method: Any) -> None:
    running = trainer(tmp_path)
    found = Tuner(running).scale_batch_size(
        Learning(), datamodule=module, mode=mode, method=method, steps_per_trial=1, max_trials=2
    )
    assert found is not None
    assert module.batch_size == found > 2
    model = Learning()
    running.fit(model, datamodule=module)
    assert len(model.seen) == 2 * -(-TRAIN // found)
    whole_epochs(model, 2)


def test_the_learning_rate_finder_leaves_no_trace(module: Any, tmp_path: Path) -> None:
    running, model = trainer(tmp_path), Learning()
    finder = Tuner(running).lr_find(model, datamodule=module, num_training=15)
    assert finder is not None
    assert len(finder.results["loss"]) >= 15
    model.seen.clear()
    running.fit(model, datamodule=module)
    assert {at for at, _ in model.seen} == {0, 1}
    whole_epochs(model, 2)


def test_the_throughput_monitor_counts_samples(module: Any, tmp_path: Path) -> None:
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=5, separator="|")
    if hasattr(monitor, "_samples"):  # before, Lightning took all batches for as large as the present one
        module.batch_size = 3
    model, logger = Learning(), CSVLogger(tmp_path)
    options: dict[str, Any] = {"logger": logger, "callbacks": [monitor], "limit_val_batches": 2}
    trainer(tmp_path, log_every_n_steps=1, **options).fit(model, datamodule=module)
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        seen = [float(row["train|samples"]) for row in csv.DictReader(file) if row["train|samples"]]
    assert seen[-1] == 2 * TRAIN
    whole_epochs(model, 2)
