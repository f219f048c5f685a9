"""`IndexedWebDataModule` inside a real trainer: whole epochs, and exact resume from a checkpoint of any moment."""

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from headrace.webdatamodule import IndexedWebDataModule, SharedShardsWarning, Split, index_shards, write_tars

Seen = list[tuple[int, tuple[str, ...]]]
TRAIN, VAL = 20, 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = []
    for name, count in (("t", TRAIN), ("v", VAL)):
        folder = tmp_path_factory.mktemp(name)
        members = [{"txt": b"x" * (1 + i * 7 % 10), "json": b"%d" % i} for i in range(count)]
        write_tars([(f"{name}{i:02d}", own) for i, own in enumerate(members)], folder, n_shards=3)
        index_shards(folder)
        made.append(folder)
    return made[0], made[1]


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
    module: IndexedWebDataModule, *callbacks: Callback, path: Any = None, fail_at: int | None = None, **options: Any
) -> Model:
    model = Model(fail_at)
    trainer(*callbacks, **options).fit(model, datamodule=module, ckpt_path=path, weights_only=False)
    return model


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
BY_DEFAULT = {
    ("plain", "plain"),
    ("uneven", "plain"),
    ("uneven", "half, val twice"),
    ("bare", "accumulate"),
    ("uneven", "overfit"),
}
MATRIX = [
    pytest.param(kind, name, marks=() if (kind, name) in BY_DEFAULT else pytest.mark.nightly)
    for kind in BATCHES
    for name in OPTIONS
]


def counted(model: Model, done: int, options: dict[str, Any]) -> int:
    """The steps whose gradients have reached the optimizer: those of a group come again."""
    if done == 0:
        return 0
    epoch = model.seen[done - 1][0]
    begin = min(step for step, (at, _) in enumerate(model.seen) if at == epoch)
    last = done == len(model.seen) or model.seen[done][0] != epoch
    return done if last else done - (done - begin) % options.get("accumulate_grad_batches", 1)


HOOKS = {"start", "epoch start", "batch start", "batch end", "val batch end", "val end", "epoch end", "end"}


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(("kind", "name"), MATRIX)
def test_a_checkpoint_of_any_moment_goes_on_exactly(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, name: str
) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, kind), saving, **OPTIONS[name])
    assert {hook for _, hook, _ in saving.saved} >= HOOKS - {"val batch end", "val end"}
    nightly = (kind, name) not in BY_DEFAULT
    first_of_each = {(hook, done): path for path, hook, done in saving.saved}
    chosen = list(first_of_each.items()) if nightly else list(first_of_each.items())[::3]
    wrong = []
    for (hook, done), path in chosen:
        done = counted(model, done, OPTIONS[name])
        rest = fit(data(folders, kind), path=path, **OPTIONS[name]).seen
        if rest != model.seen[done:]:
            wrong.append((hook, done, rest[:2], model.seen[done : done + 2]))
    assert wrong == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", list(BATCHES))
def test_epochs_are_whole_and_their_lengths_known(folders: tuple[Path, Path], kind: str, workers: int) -> None:
    model = fit(data(folders, kind, num_workers=workers), num_sanity_val_steps=0)
    lengths = Counter(epoch for epoch, _ in model.seen)
    assert model.lengths == lengths
    assert len(set(lengths.values())) == (1 if kind == "plain" else 3)
    for epoch in range(3):
        assert sorted(key for at, batch in model.seen if at == epoch for key in batch) == [
            f"t{i:02d}" for i in range(TRAIN)
        ]
    assert model.val == [f"v{i:02d}" for i in range(VAL)] * 3


def test_workers_go_on_exactly(folders: tuple[Path, Path], tmp_path: Path) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, "uneven", num_workers=2), saving, limit_val_batches=0)
    for path, _, done in saving.saved[4::9]:
        assert fit(data(folders, "uneven", num_workers=1), path=path, limit_val_batches=0).seen == model.seen[done:]


@pytest.mark.parametrize("asks", [False, True])
def test_resumed_again_and_again(folders: tuple[Path, Path], tmp_path: Path, asks: bool) -> None:
    whole = fit(data(folders, "uneven")).seen
    seen: Seen = []
    path = None
    for stop in (2, 3, len(whole) - 3, -1):
        options = {"max_epochs": 3, "max_steps": stop}
        model = Model(asks=asks)
        running = trainer(**options)
        running.fit(model, datamodule=data(folders, "uneven"), ckpt_path=path, weights_only=False)
        seen += model.seen
        path = str(tmp_path / f"{stop}.ckpt")
        running.save_checkpoint(path)  # after the end of fit
    # The trainer takes an epoch that max_steps ended for a whole one, and counts its rest as another.
    assert [batch for _, batch in seen] == [batch for _, batch in whole]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint")  # of OnExceptionCheckpoint
@pytest.mark.filterwarnings("ignore:.*was called without a model")  # the same
@pytest.mark.parametrize("kind", list(BATCHES))
@pytest.mark.parametrize("how", ["exception", "model"])
def test_the_batch_of_a_step_that_failed_comes_again(
    folders: tuple[Path, Path], tmp_path: Path, how: str, kind: str
) -> None:
    whole = fit(data(folders, kind)).seen
    saving: Callback = (
        OnExceptionCheckpoint(tmp_path) if how == "exception" else ModelCheckpoint(tmp_path, save_on_exception=True)
    )
    failing = Model(fail_at=9)
    with pytest.raises(RuntimeError, match="no such luck"):
        trainer(saving, enable_checkpointing=True).fit(failing, datamodule=data(folders, kind))
    path = max(tmp_path.glob("*.ckpt"), key=lambda one: ("exception" in one.name, one.stat().st_mtime))
    assert failing.seen == whole[:9]
    assert fit(data(folders, kind), path=path).seen == whole[9:]


CHAINS = [
    pytest.param(name, first, second, marks=() if (first, second) == (4, 3) else pytest.mark.nightly)
    for name in ("plain", "accumulate", "limit", "half, val twice", "val often")
    for first in (0, 1, 3, 4, 5, 7)
    for second in (1, 2, 3, 4)
    if (name, second) != ("accumulate", 1)  # which saves nothing
]


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("asks", [False, True])
def test_overfitting_that_max_steps_stopped_goes_on(folders: tuple[Path, Path], tmp_path: Path, asks: bool) -> None:
    whole = fit(data(folders, "uneven"), overfit_batches=3).seen
    seen: Seen = []
    path = None
    for stop in (1, 3, 5, 8, -1):
        model = Model(asks=asks)
        running = trainer(max_steps=stop, overfit_batches=3)
        running.fit(model, datamodule=data(folders, "uneven"), ckpt_path=path, weights_only=False)
        seen += model.seen
        path = str(tmp_path / f"{stop}.ckpt")
        running.save_checkpoint(path)
    assert [batch for _, batch in seen] == [batch for _, batch in whole]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.filterwarnings("ignore:.*ckpt_path=.*is set, but there is no last checkpoint")
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize("kind", ["plain", "uneven"])
@pytest.mark.parametrize(("name", "first", "second"), CHAINS)
def test_a_failed_step_and_then_a_checkpoint_of_the_resumed_run(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, name: str, first: int, second: int
) -> None:
    whole = Model()
    trainer(**OPTIONS[name]).fit(whole, datamodule=data(folders, kind))
    models = [Model(fail_at=first), Model(fail_at=second), Model()]
    crash = OnExceptionCheckpoint(tmp_path / "1", "a")
    savings: list[list[Callback]] = [[crash], [ModelCheckpoint(tmp_path / "2", "b", every_n_train_steps=1)], []]
    path: Any = None
    for model, saving, left in zip(models, savings, ("1/a.ckpt", "2/b.ckpt", ""), strict=True):
        running = trainer(*saving, **{**OPTIONS[name], "enable_checkpointing": bool(saving)})
        with contextlib.suppress(RuntimeError):
            running.fit(model, datamodule=data(folders, kind), ckpt_path=path, weights_only=False)
        path = tmp_path / left
    # Where steps are accumulated, the last checkpoint may be of an earlier batch than the one that failed.
    seen = models[0].seen + models[1].seen
    assert models[2].seen == whole.seen[len(whole.seen) - len(models[2].seen) :]
    assert seen == whole.seen[: len(seen)]
    if name != "accumulate":
        assert seen + models[2].seen == whole.seen
        assert [one for model in models for one in model.validated] == whole.validated
    assert running.current_epoch == 3


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
def test_options_without_a_fingerprint_are_compared_as_they_read(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, before: Any, now: Any, told: str
) -> None:
    saving = Save(tmp_path)
    model = fit(data(folders, kind, **before), saving)
    for path, _, done in saving.saved[::6]:
        with pytest.raises(
            ValueError, match=rf"the checkpoint does not fit: {told}.*; resume with the options it was saved with"
        ):
            fit(data(folders, kind, **now), path=path)
        assert fit(data(folders, kind, **before), path=path).seen == model.seen[done:]


def test_a_checkpoint_of_another_version_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="data state has version 9, this release reads 1"):
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
        ({"batch_size": {Split.train: 2}}, ValueError, "no batch_size for Split.val"),
        ({"batch_size": None}, ValueError, "no batch_size for Split.train"),
        ({"batch_sampler": Bare}, ValueError, "has both batch_size=3 and batch_sampler: give one"),
        ({"batch_size": None, "batch_sampler": Bare}, ValueError, "train has no sizes: give sizes="),
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
        ({"num_workers": {"val": -1}}, ValueError, r"num_workers\[Split.val\] must be an int >= 0, got -1"),
        ({"timeout": -1}, ValueError, "timeout must be seconds"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be an int >= 1, got 0"),
        ({"verify": "never"}, ValueError, "verify must be one of"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank must be an int from 0 to num_replicas - 1"),
        ({"num_replicas": 2, "mesh": Mesh()}, ValueError, "drop num_replicas and rank, or drop mesh"),
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
