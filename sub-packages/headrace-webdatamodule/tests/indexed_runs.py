"""Runs of a trainer over an `IndexedWebDataModule`, for the tests of both."""

import random
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from headrace.webdatamodule import IndexedWebDataModule, Split, index_shards, write_tars

# Lightning 2.5 does not have the argument.
RESTORE: dict[str, Any] = (
    {"weights_only": False} if "weights_only" in signature(lightning.Trainer.fit).parameters else {}
)
Seen = list[tuple[int, tuple[str, ...]]]
TRAIN, VAL = 20, 7


def make_shards(folder: Path, name: str, count: int) -> Path:
    """Indexed shards of `count` samples, whose sizes differ."""
    members = [{"txt": b"x" * (1 + i * 7 % 10), "json": b"%d" % i} for i in range(count)]
    write_tars([(f"{name}{i:02d}", own) for i, own in enumerate(members)], folder, n_shards=3)
    index_shards(folder)
    return folder


class Bare:
    """Batches by size, another number of them in each epoch; without a state, for one rank."""

    def __init__(self, sizes: Any, /, *, sampler: Any, num_replicas: int, rank: int, seed: int, most: int = 20) -> None:
        self.sizes, self.seed, self.most, self.epoch = [int(size) for size in sizes], seed, most, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batches(self) -> list[list[int]]:
        order = list(range(len(self.sizes)))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        made: list[list[int]] = [[]]
        for index in order:
            if made[-1] and sum(self.sizes[i] for i in made[-1]) + self.sizes[index] > self.most - 5 * (self.epoch % 3):
                made.append([])
            made[-1].append(index)
        return made

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())


class Stateful(Bare):
    """The same, with a state."""

    start = position = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.start = self.position = 0
        self.epoch = epoch

    @property
    def remaining(self) -> int:
        return len(self) - self.position

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        for number, batch in enumerate(self.batches()[start:], start + 1):
            self.position = number
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "fingerprint": f"{self.seed} {self.most}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self.state_dict()["fingerprint"]:
            raise ValueError("it was saved with another seed or budget; make the data module with those, or begin anew")
        self.set_epoch(state["epoch"])
        self.start = self.position = state["position"]


class Mesh:
    """Data-parallel ranks as a `DeviceMesh` gives them."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank


def keys(samples: list[Any]) -> list[str]:
    return [sample["__key__"] for sample in samples]


BATCHES: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 3},
    "uneven": {"batch_sampler": {"train": Stateful}, "batch_size": {"val": 3, "test": 3}, "sizes": {"train": "txt"}},
    "bare": {"batch_sampler": {"train": Bare}, "batch_size": {"val": 3, "test": 3}, "sizes": {"train": "txt"}},
}


def data(folders: tuple[Path, Path], kind: str = "plain", **options: Any) -> IndexedWebDataModule:
    shards = {Split.train: folders[0], Split.val: folders[1], Split.test: folders[1]}
    return IndexedWebDataModule(shards, **{"collate_fn": keys, **BATCHES[kind], **options})


class Model(lightning.LightningModule):
    """Notes what it sees, and fails at a step if asked to."""

    def __init__(self, fail_at: int | None = None, *, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks
        self.layer = torch.nn.Linear(1, 1)
        self.seen: Seen = []
        self.lengths: dict[int, float] = {}
        self.val: list[str] = []
        self.validated: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def on_train_epoch_start(self) -> None:
        self.lengths[self.trainer.current_epoch] = self.trainer.num_training_batches

    def training_step(self, batch: list[str], batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.fail_at:
            raise RuntimeError("no such luck")
        self.seen.append((self.trainer.current_epoch, tuple(batch)))
        return torch.Tensor(self.layer(torch.ones(1, 1)).sum())

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.current_epoch, self.trainer.global_step))

    def validation_step(self, batch: list[str], batch_idx: int) -> None:
        self.val += batch

    def test_step(self, batch: list[str], batch_idx: int) -> None:
        self.val += batch

    def predict_step(self, batch: list[str], batch_idx: int) -> Any:
        return {"key": batch, "length": torch.tensor([len(key) for key in batch])}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            _ = self.trainer.estimated_stepping_batches  # has the loader made before the loops are restored
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    """Saves a checkpoint at every hook, with the number of steps that were seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[tuple[str, str, int]] = []

    def save(self, trainer: lightning.Trainer, model: Any, hook: str) -> None:
        if not trainer.sanity_checking:
            path = f"{self.folder}/{len(self.saved)}-{hook}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, hook, len(model.seen)))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "epoch start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, pl_module, "batch start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, pl_module, "batch end")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.save(trainer, pl_module, "val batch end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "val end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "epoch end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.save(trainer, pl_module, "end")


def trainer(*callbacks: Callback, **options: Any) -> lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen = {"max_epochs": 3, **quiet, **options}
    return lightning.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **chosen)


def fit(
    module: lightning.LightningDataModule,
    *callbacks: Callback,
    path: Any = None,
    fail_at: int | None = None,
    **options: Any,
) -> Model:
    model = Model(fail_at)
    trainer(*callbacks, **options).fit(model, datamodule=module, ckpt_path=path, **RESTORE)
    return model
