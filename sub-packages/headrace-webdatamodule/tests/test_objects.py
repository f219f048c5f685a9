"""What objects say of themselves: their text, their table in a notebook, their signatures, and a keyword gone wrong."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pytest
from streams import loader as stream_loader
from streams import write

import headrace.webdatamodule as package
from headrace.webdatamodule import (
    DistributedBatchSampler,
    Fault,
    IndexedShards,
    IndexedWebDataModule,
    LoaderReport,
    Manifest,
    MapDataModule,
    PickledDataWDS,
    Remote,
    ResumableLoader,
    RetryPolicy,
    ShardIndex,
    WebDataModule,
    index_shards,
    write_tars,
)
from headrace.webdatamodule.loading.batch_reading import SkippedSample

EVIL = "<script>alert(1)</script>&\"'"
N = 1200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:04d}", {"json": b"%d" % i}) for i in range(N)], place, n_shards=3)
    index_shards(place)
    return place


def loader(*_: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(N, 5, num_replicas=2, rank=1)
    return ResumableLoader(range(N), batches, collate_fn=list, check_ranks=False)


def report() -> LoaderReport:
    skipped = (SkippedSample(3, f"the sample {EVIL} is damaged"),)
    counts = {"web": 1100, EVIL: 45}
    return LoaderReport("train", 72, counts, 0.912, 2, skipped, (4, 1), 2, (f"sample 7 of {EVIL}", "sample 9"))


def grain(name: str) -> Any:
    pytest.importorskip("grain")
    module = __import__("headrace.webdatamodule.integrations.grain", fromlist=[name])
    return getattr(module, name)(loader())


MAKE: dict[str, Callable[[Path], Any]] = {
    "DistributedBatchSampler": lambda _: DistributedBatchSampler(N, 5, num_replicas=2, rank=1),
    "Fault": lambda _: Fault("the header is damaged", "a.tar", offset=512),
    "GrainDataset": lambda _: grain("GrainDataset"),
    "GrainIterator": lambda _: grain("GrainIterator"),
    "IndexedShards": IndexedShards,
    "IndexedWebDataModule": lambda folder: IndexedWebDataModule(folder, batch_size=4),
    "LoaderReport": lambda _: report(),
    "Manifest": Manifest.load,
    "MapDataModule": lambda _: MapDataModule({"train": list(range(10))}, batch_size=4),
    "PickledDataWDS": lambda folder: PickledDataWDS(folder, {"train": ["a", "b"]}, "pyd", {"train": folder}, 4),
    "Remote": lambda _: Remote("s3://bucket/train", {"key": "secret"}),
    "ResumableLoader": loader,
    "RetryPolicy": lambda _: RetryPolicy(),
    "ShardIndex": lambda folder: ShardIndex.open(next(folder.glob("*.tar"))),
    "StreamLoader": lambda folder: stream_loader(write(folder.parent / "stream", [8, 12]), 20, 4),
    "WebDataModule": lambda folder: WebDataModule({"train": 20}, "json", {"train": folder}, 4),
}
OF_A_DATACLASS = ("Fault", "Remote", "RetryPolicy")


def test_every_public_class_has_an_example_here() -> None:
    objects = {name: getattr(package, name) for name in package.__all__}
    public = {name: value for name, value in objects.items() if inspect.isclass(value)}
    shown = {name for name, value in public.items() if not issubclass(value, BaseException | Enum)}
    interfaces = {name for name, value in public.items() if Protocol in value.__bases__ or inspect.isabstract(value)}
    missing = shown - interfaces - MAKE.keys()
    assert not missing, "add to MAKE how to make one, and give it a repr of one to three lines"


@pytest.mark.parametrize("name", MAKE)
def test_a_repr_says_what_an_object_is_in_one_to_three_lines(name: str, folder: Path) -> None:
    text = repr(MAKE[name](folder))
    assert name in text
    assert " object at 0x" not in text
    assert len(text.splitlines()) <= 3
    assert len(text) <= 400


@pytest.mark.parametrize("name", [name for name in MAKE if name not in OF_A_DATACLASS])
def test_a_repr_of_a_half_made_object_names_its_class(name: str, folder: Path) -> None:
    assert repr(object.__new__(type(MAKE[name](folder)))) == f"<{name}, not complete>"


@pytest.mark.parametrize("name", [name for name in MAKE if name not in ("GrainIterator", "StreamLoader")])
def test_a_repr_is_the_same_after_pickling(name: str, folder: Path) -> None:
    made = MAKE[name](folder)
    assert repr(pickle.loads(pickle.dumps(made))) == repr(made)


class Watched:
    """A batch sampler of the user's own."""

    def __iter__(self) -> Any:
        raise AssertionError("a repr planned")

    def __len__(self) -> int:
        raise AssertionError("a repr planned")


def test_a_repr_of_a_loader_plans_nothing() -> None:
    watched = ResumableLoader(range(3), Watched())
    assert repr(watched) == (
        "ResumableLoader(train: range of 3, epoch 0, 0 batches delivered, num_workers=0, seed 0,\n  Watched)"
    )
    factory = ResumableLoader(range(3), partial(DistributedBatchSampler, 3, 1))
    assert repr(factory).endswith("\n  partial)")
    assert repr(ResumableLoader(range(3), [[0], [1]])).endswith("\n  list of 2)")


def test_a_repr_says_the_main_figures(folder: Path) -> None:
    made = loader()
    next(iter(made))
    assert repr(made).splitlines() == [
        "ResumableLoader(train: range of 1,200, epoch 0, 1 batch delivered, num_workers=0, seed 0,",
        "  DistributedBatchSampler(1,200 samples, batch_size 5, shuffled, rank 1 of 2, epoch 0 at 10, seed 0))",
    ]
    made.close()
    assert repr(made).startswith("ResumableLoader(train: ")  # of a closed one
    assert repr(MAKE["Manifest"](folder)) == "Manifest(1,200 samples in 3 shards, members json)"
    assert "400 samples, 400 members (json), " in repr(MAKE["ShardIndex"](folder))
    assert repr(report()) == ("LoaderReport(train, rank 1 of 4: 1,145 samples in 72 batches, 1 skipped as damaged)")


def test_the_version_is_that_of_the_distribution() -> None:
    assert package.__version__ == version("headrace-webdatamodule")


def test_the_version_is_looked_up_when_it_is_asked_for() -> None:
    code = "import sys, headrace.webdatamodule as w; assert '__version__' not in vars(w); assert w.__version__"
    subprocess.run([sys.executable, "-c", code], check=True)


# The module for shards has 30 arguments, whose names and defaults alone take 600 characters.
BOUNDS = {"IndexedWebDataModule": 1020}
CALLABLES = [
    name
    for name in package.__all__
    if callable(value := getattr(package, name)) and not (inspect.isclass(value) and issubclass(value, BaseException))
]


@pytest.mark.parametrize("name", CALLABLES)
def test_signatures_fit_on_a_screen(name: str) -> None:
    text = str(inspect.signature(getattr(package, name)))
    assert len(text) < BOUNDS.get(name, 900)
    assert "numpy.ndarray[" not in text
