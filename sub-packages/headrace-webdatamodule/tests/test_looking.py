"""Whoever only looks at an object moves no position, and a copy has a position of its own."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from indexed_runs import RESTORE, TRAIN, Stateful, keys, make_shards, trainer
from lightning.pytorch.callbacks import Callback
from streams import untuple, write
from webdataset import batched, shuffle

from headrace.webdatamodule import (
    DistributedBatchSampler,
    IndexedWebDataModule,
    MapDataModule,
    ResumableLoader,
    WebDataModule,
)

SAMPLES = [{"__key__": f"t{i:02d}", "txt": "x" * (1 + i * 7 % 10)} for i in range(TRAIN)]
SIZES = [len(sample["txt"]) for sample in SAMPLES]
Batches = Iterator[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("shards"), "t", TRAIN)


def batch_sampler(folder: Path, workers: int) -> DistributedBatchSampler:
    return DistributedBatchSampler(TRAIN, 3, num_replicas=2, rank=1, seed=4)


def ordered_batch_sampler(folder: Path, workers: int) -> DistributedBatchSampler:
    return DistributedBatchSampler(TRAIN, 3, sampler=list(range(TRAIN))[::-1])


def loader(folder: Path, workers: int) -> ResumableLoader:
    return ResumableLoader(SAMPLES, DistributedBatchSampler(TRAIN, 3), collate_fn=keys, num_workers=workers)


def loader_of_lists(folder: Path, workers: int) -> ResumableLoader:
    return ResumableLoader(SAMPLES, [[i] for i in range(9)], collate_fn=keys, num_workers=workers)


def loader_by_factory(folder: Path, workers: int) -> ResumableLoader:
    made = partial(DistributedBatchSampler, TRAIN, 3)
    return ResumableLoader(
        SAMPLES, lambda_of_ranks(made), collate_fn=keys, num_workers=workers, sizes=SIZES, on_error="skip"
    )


class lambda_of_ranks:  # noqa: N801 - a function that can be pickled
    def __init__(self, made: Callable[..., Any]) -> None:
        self.made = made

    def __call__(self, num_replicas: int, rank: int) -> Any:
        return self.made(num_replicas=num_replicas, rank=rank)


def stream_module(folder: Path, workers: int) -> WebDataModule:
    more = {"persistent_workers": True} if workers else {}
    return WebDataModule(
        {"train": TRAIN},
        "json",
        {"train": write(folder.parent / "stream", [8, 12])},
        3,
        pipeline_wds={"train": [untuple, shuffle(9)]},
        pipeline_prebatch_wld={"train": batched(3, collation_fn=None)},
        kwargs_wds={"train": {"shardshuffle": True}},
        kwargs_wld={"train": {"num_workers": workers, **more}},
        invoke_wld={"train": [("with_epoch", {"nbatches": 6})]},
    )


def stream_loader(folder: Path, workers: int) -> Any:
    return stream_module(folder, workers).train_dataloader()


def map_module(folder: Path, workers: int) -> MapDataModule:
    by_size = {"batch_sampler": Stateful, "sizes": {"train": SIZES}}
    return MapDataModule({"train": SAMPLES}, collate_fn=keys, num_workers=workers, **by_size)  # type: ignore[arg-type]


def indexed_module(folder: Path, workers: int) -> IndexedWebDataModule:
    return IndexedWebDataModule({"train": folder, "val": folder}, batch_size=3, collate_fn=keys, num_workers=workers)


Make = Callable[[Path, int], Any]
MAKERS: list[tuple[Make, int]] = [
    (batch_sampler, 0),
    (ordered_batch_sampler, 0),
    *(
        (make, workers)
        for make in (loader, loader_by_factory, stream_loader, map_module, indexed_module, stream_module)
        for workers in (0, 2)
    ),
    (loader_of_lists, 0),
]


@pytest.fixture
def closing(folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes or copies an object, and ends its workers at last."""
    made: list[Any] = []

    def keep(make: Callable[..., Any], *given: Any) -> Any:
        made.append(make(*given))
        return made[-1]

    yield keep
    for one in made:
        if hasattr(one, "teardown"):
            one.teardown("fit")
        elif hasattr(one, "close"):
            one.close()


NAMES = [f"{make.__name__}-{workers}" for make, workers in MAKERS]


def batches(of: Any) -> Batches:
    return iter(of.train_dataloader() if hasattr(of, "train_dataloader") else of)


def position(of: Any) -> Any:
    state = of.state_dict()
    return state.get("train", state)


def every_attribute(of: Any) -> None:
    for name in dir(of):
        getattr(of, name, None)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "str": str,
    "format": "{}".format,
    "len": lambda of: len(of) if hasattr(of, "__len__") else None,
    "state_dict": lambda of: of.state_dict(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "every attribute": every_attribute,
    "getmembers": inspect.getmembers,
    "bool": bool,
    "hash": hash,
    "equality": lambda of: of == of,
}


AT_FIRST = ("str", "deepcopy", "every attribute")
IN_WORKERS = (loader, stream_loader, indexed_module, stream_module)  # the others have their workers from these
LOOKED = [
    pytest.param(
        *(make, workers, look),
        id=f"{name}-{look}",
        marks=() if not workers or (make in IN_WORKERS and look == AT_FIRST[place % 3]) else pytest.mark.nightly,
    )
    for place, ((make, workers), name) in enumerate(zip(MAKERS, NAMES, strict=True))
    for look in LOOKS
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "workers", "look"), LOOKED)
def test_a_look_moves_nothing(folder: Path, closing: Callable[..., Any], make: Make, workers: int, look: str) -> None:
    looks = LOOKS[look]
    plain = closing(make, folder, workers)
    first, second = list(batches(plain)), list(batches(plain))
    looked = closing(make, folder, workers)
    looks(looked)
    under_way = batches(looked)
    seen = []
    for batch in under_way:
        seen.append(batch)
        if len(seen) in (1, 3):
            before = position(looked)
            looks(looked)
            assert position(looked) == before
    assert seen == first
    looks(looked)
    assert list(batches(looked)) == second

    partly = closing(make, folder, workers)
    assert list(islice(batches(partly), 3)) == first[:3]
    resumed = closing(make, folder, workers)
    looks(resumed)
    resumed.load_state_dict(partly.state_dict())
    looks(resumed)
    rest = batches(resumed)
    looks(resumed)
    assert list(rest) == first[3:]


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda of: pickle.loads(pickle.dumps(of)),
}


COPIED = [
    pytest.param(
        *(make, workers, how),
        id=f"{name}-{how}",
        marks=() if not workers or (make in IN_WORKERS and how == list(COPIES)[place % 3]) else pytest.mark.nightly,
    )
    for place, ((make, workers), name) in enumerate(zip(MAKERS, NAMES, strict=True))
    for how in COPIES
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "workers", "how"), COPIED)
def test_a_copy_continues_at_the_position_and_leaves_the_original_its_own(
    folder: Path, closing: Callable[..., Any], make: Make, workers: int, how: str
) -> None:
    copied = partial(closing, COPIES[how])
    plain = closing(make, folder, workers)
    first, second = list(batches(plain)), list(batches(plain))
    original = closing(make, folder, workers)
    fresh = copied(original)
    assert list(batches(fresh)) == first
    assert list(batches(fresh)) == second
    under_way = batches(original)
    seen = list(islice(under_way, 2))
    copies = [copied(original), copied(copied(original))]
    for one in copies:
        assert position(one) == position(original)
        assert [*seen, *batches(one)] == first
        assert list(batches(one)) == second
    seen.append(next(under_way))
    later = copied(original)
    taken = batches(later)
    ahead = next(taken)
    seen.append(next(under_way))
    assert ahead == seen[-1]
    assert [*seen, *taken] == first
    assert [*seen, *under_way] == first
    assert list(batches(original)) == second
    assert list(batches(copied(closing(make, folder, workers)))) == first


class Looking(Callback):
    """Looks at the data module and its loader in every hook of a fit."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look
        for hook in ("setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_epoch_end"):
            setattr(self, hook, self.looks)

    def looks(self, trainer: Any, *rest: Any, **more: Any) -> None:
        self.look(trainer.datamodule)
        if trainer.train_dataloader is not None:
            self.look(trainer.train_dataloader)


class Seeing(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return torch.Tensor(self.layer(torch.ones(1, 1)).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODULES: list[Make] = [map_module, indexed_module, stream_module]
LOOKED_IN_A_FIT = [
    pytest.param(
        *(make, look),
        id=f"{make.__name__}-{look}",
        marks=() if look in AT_FIRST or number % 3 == place else pytest.mark.nightly,
    )
    for number, look in enumerate(LOOKS)
    for place, make in enumerate(MODULES)
]


@pytest.fixture(scope="module")
def whole_of(folder: Path) -> Callable[[Make], list[Any]]:
    """What a fit over a data module sees that nobody looks at."""

    @cache
    def seen(make: Make) -> list[Any]:
        model = Seeing()
        trainer(max_epochs=2).fit(model, datamodule=make(folder, 0))
        return model.seen

    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no")
@pytest.mark.parametrize(("make", "look"), LOOKED_IN_A_FIT)
def test_a_look_in_a_fit_moves_nothing(
    folder: Path, tmp_path: Path, whole_of: Callable[[Make], list[Any]], make: Make, look: str
) -> None:
    whole, stopped, model = whole_of(make), Seeing(), Seeing()
    running, path = trainer(Looking(LOOKS[look]), max_epochs=2, max_steps=3), tmp_path / "stopped.ckpt"
    running.fit(stopped, datamodule=make(folder, 0))
    running.save_checkpoint(path)
    module = make(folder, 0)
    LOOKS[look](module)
    trainer(Looking(LOOKS[look]), max_epochs=2).fit(model, datamodule=module, ckpt_path=path, **RESTORE)
    assert stopped.seen + model.seen == whole


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no")
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.slow
def test_a_fit_with_a_copy_is_that_with_the_original(folder: Path, make: Make, how: str) -> None:
    """Which begins anew, unless a state was loaded: what was iterated by hand before counts for nothing."""
    seen, module = [], make(folder, 0)
    module.setup("fit")
    list(islice(batches(module), 2))
    for one in (COPIES[how](module), module, COPIES[how](module)):  # the last one is of a trainer that is done
        model = Seeing()
        trainer(max_epochs=2).fit(model, datamodule=one)
        seen.append(model.seen)
    assert seen == seen[:1] * 3
    loaded, model = make(folder, 0), Seeing()
    partly = make(folder, 0)
    list(islice(batches(partly), 2))
    loaded.load_state_dict(partly.state_dict())
    trainer(max_epochs=2).fit(model, datamodule=COPIES[how](loaded))
    assert model.seen == seen[0][2:]


def test_what_a_data_module_is_in_a_few_lines(folder: Path) -> None:
    module = indexed_module(folder, 2)
    for _ in range(2):
        text = repr(module)
        assert str(module) == text
        assert 1 <= len(text.splitlines()) <= 3
        assert text.startswith("<IndexedWebDataModule: train ")
        assert "batch_size=3, num_workers=2, seed=0" in text
        loader = module.train_dataloader()
    assert text.endswith("train loader at epoch 0, step 0>")
    next(iter(loader))
    assert repr(module).endswith("train loader at epoch 0, step 1>")
    assert repr(map_module(folder, 0)).startswith("<MapDataModule: train 20 samples; batch_sampler=Stateful")
    assert repr(stream_module(folder, 2)).startswith("<WebDataModule: train 20 samples of ")
    given = {"train": {"books": "none/books", "web": "none/web"}, "val": ["none.tar"] * 99, "test": "s3://none"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = repr(IndexedWebDataModule(given, batch_size={"train": 3, "val": 4, "test": 5}))  # nothing is opened
    assert "train of books, web, val of a list, test of s3://none; " in text
    assert "batch_size={train: 3, val: 4, test: 5}, num_workers=0, seed=0" in text
    assert max(map(len, text.splitlines())) < 400
