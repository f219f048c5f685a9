"""An epoch that comes a second time because nobody chose the next one: a warning under torch's ``DataLoader``."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from headrace.webdatamodule import DistributedBatchSampler, MapDataModule, ResumableLoader

WARNING = r"epoch 0 of the DistributedBatchSampler came a second time, in the same order: call its set_epoch"
DATA = [float(number) for number in range(24)]


def loader(workers: int = 0, **options: Any) -> Any:
    batches = DistributedBatchSampler(24, 4, **options)
    return DataLoader(DATA, batch_sampler=batches, num_workers=workers)  # type: ignore[arg-type]


def of_epochs(shuffle: bool) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=shuffle)  # type: ignore[arg-type]


# Python 3.12 and newer warn where torch forks its workers; what is caught below is raised again.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (1, {}), (0, {"sampler": of_epochs(True)})])
def test_an_epoch_that_comes_twice_warns_once(workers: int, options: dict[str, Any]) -> None:
    batches = loader(workers, **options)
    first = [batch.tolist() for batch in batches]
    with pytest.warns(UserWarning, match=WARNING) as caught:
        again = [batch.tolist() for batch in batches]
    assert again == first
    assert [one.filename for one in caught if one.category is UserWarning] == [__file__]
    assert list(batches)  # no warning for the third time


def with_epochs() -> None:
    batches = loader()
    for epoch in range(3):
        batches.batch_sampler.set_epoch(epoch)
        list(batches)


def in_order() -> None:
    for batches in (loader(shuffle=False), loader(sampler=range(24)), loader(sampler=of_epochs(False))):
        for _ in range(3):
            list(batches)


def in_a_resumable_loader() -> None:
    for options in ({}, {"fixed_epoch": True}, {"num_workers": 1}):
        batches = ResumableLoader(DATA, DistributedBatchSampler(24, 4), **options)
        for _ in range(3):
            assert len(list(batches)) == 6
        batches.close()


class Model(lightning.LightningModule):
    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch.float()[:, None]).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.layer(batch.float()[:, None])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)


def in_a_fit() -> None:
    module = MapDataModule({"train": DATA, "val": DATA}, batch_size=4, num_replicas=1, rank=0)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(max_epochs=3, accelerator="cpu", **options).fit(Model(), datamodule=module)


def test_a_fit_with_a_plain_loader_says_that_all_its_epochs_are_the_first() -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", limit_val_batches=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Model(), loader())
    assert any("epoch 0 of the DistributedBatchSampler came a second time" in str(one.message) for one in caught)


def by_hand() -> None:
    module = MapDataModule({"train": DATA, "val": DATA}, batch_size=4)
    module.setup("fit")
    for _ in range(3):
        list(module.train_dataloader())
        list(module.val_dataloader())


@pytest.mark.parametrize("use", [with_epochs, in_order, in_a_resumable_loader, in_a_fit, by_hand])
def test_where_epochs_are_chosen_or_all_alike_there_is_no_warning(use: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="epoch .* came a second time")
        use()
