"""Predictions and the batch-size finder of a real trainer; what holds for every data module is in test_trainer_laws."""

from pathlib import Path
from typing import Any

import pytest
from indexed_runs import (
    TRAIN,
    VAL,
    Model,
    data,
    fit,
    make_shards,
    trainer,
)
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.tuner.tuning import Tuner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    train, val = (make_shards(tmp_path_factory.mktemp(name), name, count) for name, count in (("t", TRAIN), ("v", VAL)))
    return train, val


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
