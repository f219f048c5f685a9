"""What a loader takes: datasets, batch samplers, sizes and options."""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loaders import COUNT, WORKERS, Bare, Squares, make, numbered_shards, plain
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler, RandomSampler

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


def test_batches_of_all_ranks_are_refused_where_nothing_distributes_them(folder: Path) -> None:
    class OfAllRanks(Bare):
        rank = "all"

    assert len(list(make(folder, OfAllRanks(), num_replicas=1, rank=0))) == len(OfAllRanks())
    loader = make(folder, OfAllRanks(), num_replicas=2, rank=0, check_ranks=False)
    with pytest.raises(ValueError, match=r"rank='all', so that each of 2 ranks would train on all .*: leave out rank"):
        next(iter(loader))


def test_where_nothing_names_a_rank_every_rank_would_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    data = list(range(20))
    batches = BatchSampler(RandomSampler(data), 4, drop_last=False)
    with pytest.warns(UserWarning, match="the train loader has 2 ranks, and its BatchSampler names none") as caught:
        next(iter(ResumableLoader(data, batches)))
    assert [warning.filename for warning in caught] == [__file__]
    of_rank = BatchSampler(DistributedSampler(data, num_replicas=2, rank=1), 4, drop_last=False)  # type: ignore[arg-type]
    for named in (
        ResumableLoader(data, of_rank),
        ResumableLoader(data, batches, num_replicas=2, rank=1),
        ResumableLoader(data, batches, num_replicas=1, rank=0),
        ResumableLoader(data, lambda num_replicas, rank: batches),
        ResumableLoader(data, DistributedBatchSampler(20, 4)),
    ):
        next(iter(named))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    next(iter(ResumableLoader(data, batches)))


def test_it_is_no_loader_that_trainers_take_apart(folder: Path) -> None:
    loader = make(folder, batches := DistributedBatchSampler(COUNT, 4))
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader.sampler, torch.utils.data.SequentialSampler)  # none that trainers would replace
    assert loader.batch_sampler is batches
    assert len(loader.dataset) == COUNT


def test_torchs_own_collation_is_the_default(folder: Path) -> None:
    batch = next(iter(plain(folder, collate_fn=None)))
    assert isinstance(batch, Mapping)
    assert torch.is_tensor(batch["json"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seed": -1}, "seed must be"),
        ({"num_workers": -1}, "num_workers"),
        ({"timeout": -1, "num_workers": 1}, "timeout"),
    ],
)
def test_arguments_that_are_not_allowed(folder: Path, options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(folder, [[0]], **options)


def test_an_epoch_without_batches(folder: Path) -> None:
    loader = make(folder, DistributedBatchSampler(0, 4))
    assert (len(loader), list(loader), loader.steps) == (0, [], 0)


class Miscounted(Bare):
    """Its length is off."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def __len__(self) -> int:
        return super().__len__() + self.by


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("done", [0, 3])
def test_a_length_that_is_too_small_loses_no_batch_in_silence(folder: Path, workers: int, done: int) -> None:
    loader = make(folder, Miscounted(-1), num_workers=workers)
    loader.load_state_dict({**loader.state_dict(), "steps": done})
    with pytest.raises(RuntimeError, match=r"Miscounted has a length of 11, but gives more batches: .* plan by it"):
        list(islice(loader, len(loader) - done))  # as many as a trainer takes
    loader.close()


def test_a_length_of_nothing_is_too_small(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="Miscounted has a length of 0, but gives more batches"):
        list(make(folder, Miscounted(-12)))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("done", [0, 3, 12])
def test_a_length_that_is_too_large_is_an_error(folder: Path, workers: int, done: int) -> None:
    loader = make(folder, Miscounted(1), num_workers=workers)
    loader.load_state_dict({**loader.state_dict(), "steps": done})
    with pytest.raises(RuntimeError, match=r"Miscounted has a length of 13, but gave 12 batches: .* plan by it"):
        list(loader)
    loader.close()


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"timeout": -1}, ValueError, "timeout must be"),
        ({"timeout": float("nan")}, ValueError, "timeout must be"),
        ({"timeout": "x"}, ValueError, "timeout must be"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be"),
        ({"on_error": "drop"}, ValueError, "on_error must be"),
    ],
)
def test_options_that_are_not_allowed(folder: Path, options: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        plain(folder, **options)


def test_batches_need_a_length(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"have a length, got generator: .*DistributedBatchSampler\(len\(dataset\)"):
        make(folder, (batch for batch in [[1]]))


class Columns(Squares):
    """A dataset that reads a batch at a time, as Hugging Face's do."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read batch by batch")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index**2 for index in indices]


class Two(Squares):
    """A dataset of two named sources."""

    names = ("first", "second")
    cumulative_sizes = (3, COUNT)


class Database(Squares):
    """A dataset in LMDB, which each process opens for itself."""

    fingerprint = "database"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: tuple[int, Any] = (0, None)
        lmdb = pytest.importorskip("lmdb")
        with lmdb.open(str(path)) as database, database.begin(write=True) as writing:
            for index in range(COUNT):
                writing.put(b"%d" % index, b"%d" % index**2)

    def __getitem__(self, index: int) -> int:
        if self.opened[0] != os.getpid():
            import lmdb

            self.opened = os.getpid(), lmdb.open(str(self.path), readonly=True, lock=False)
        with self.opened[1].begin() as reading:
            return int(reading.get(b"%d" % index))


@pytest.mark.parametrize("kind", [list, Squares, Columns, Two, Database])
@pytest.mark.parametrize("workers", [0, 1])
def test_any_map_style_dataset(tmp_path: Path, kind: Any, workers: int) -> None:
    dataset = [i**2 for i in range(COUNT)] if kind is list else Database(tmp_path) if kind is Database else kind()

    def loader() -> ResumableLoader:
        return ResumableLoader(dataset, DistributedBatchSampler(COUNT, 4, seed=1), collate_fn=list, num_workers=workers)

    whole, killed, resumed = loader(), loader(), loader()
    batches = list(whole)
    assert sorted(number for batch in batches for number in batch) == [i**2 for i in range(COUNT)]
    assert list(islice(killed, 2)) == batches[:2]
    resumed.load_state_dict(killed.state_dict())
    assert (len(resumed), resumed.remaining) == (6, 4)
    assert list(resumed) == batches[2:]
    assert (len(resumed), resumed.remaining) == (6, 0)
    names = getattr(dataset, "names", ("train",))
    assert tuple(whole.report().samples) == names
    for one in (whole, killed, resumed):
        one.close()


@pytest.mark.parametrize("dataset", [iter([1]), 5, {1, 2}])
def test_what_is_no_map_style_dataset(dataset: Any) -> None:
    with pytest.raises(TypeError, match=r"dataset must have len\(\) and integer indices, got"):
        ResumableLoader(dataset, [[0]])


def test_a_batch_sampler_is_made_for_the_ranks_there_are(folder: Path) -> None:
    def make_batches(num_replicas: int, rank: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(COUNT, 4, num_replicas=num_replicas, rank=rank)

    loaders = [make(folder, make_batches, num_replicas=2, rank=rank, check_ranks=False) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert sorted(number for loader in loaders for batch in loader for number in batch) == list(range(COUNT))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_of_single_samples_is_refused_with_the_cure(workers: int) -> None:
    data = list(range(30))
    loader = ResumableLoader(data, RandomSampler(data), num_workers=workers)
    cure = (
        r"batch_sampler must give lists of indices, got int from RandomSampler.*BatchSampler\(RandomSampler\(\.\.\.\), "
    )
    with pytest.raises(TypeError, match=cure + r"batch_size=\.\.\."):
        next(iter(loader))


def test_a_batch_sampler_of_other_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset must have the 299 samples that DistributedBatchSampler was made for"):
        ResumableLoader(list(range(300)), DistributedBatchSampler(299, 8))
    data = list(range(300))
    sampler = RandomSampler(data, num_samples=400)
    cure = "got 300: give it len.dataset., not the length of its RandomSampler"
    with pytest.raises(ValueError, match=f"dataset must have the 400 samples that DistributedBatchSampler.*{cure}"):
        ResumableLoader(data, DistributedBatchSampler(len(sampler), 8, sampler=sampler))


class OfClasses(Bare):
    """As people write them: names that mean other things than in headrace's batch samplers."""

    n_samples, sizes = 5, (10, 20)


def test_names_of_a_batch_sampler_may_mean_something_else() -> None:
    loader = ResumableLoader(list(range(COUNT)), OfClasses(), collate_fn=list)
    assert list(loader) == list(OfClasses())


class Seekable(Bare):
    """Keeps a position, but does not say how much is left; its length is that of the whole epoch."""

    position = 0

    def __iter__(self) -> Iterator[list[int]]:
        start, self.position = self.position, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.position = number + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def test_a_batch_sampler_may_leave_the_rest_uncounted() -> None:
    killed, resumed = (ResumableLoader(list(range(COUNT)), Seekable(), collate_fn=list) for _ in range(2))
    assert len(list(islice(killed, 5))) == 5
    resumed.load_state_dict(killed.state_dict())
    assert (len(resumed), resumed.remaining) == (12, 7)
    assert list(resumed) == list(Bare())[5:]


@pytest.mark.parametrize("sizes", [list(range(COUNT)), np.arange(COUNT), np.arange(2 * COUNT).reshape(COUNT, 2)])
def test_sizes_for_the_report(sizes: Any) -> None:
    loader = ResumableLoader(list(range(COUNT)), Bare(), sizes=sizes)
    assert len(list(loader)) == 12
    assert 0 < (loader.report().fill or 0) < 1


@pytest.mark.parametrize(("cost", "padded"), [("sum", False), ("padded", True), (max, True)])
def test_packed_batches_have_no_padding_to_report(cost: Any, padded: bool) -> None:
    batches: Any = Bare()
    batches.options = SimpleNamespace(cost=cost)
    loader = ResumableLoader(list(range(COUNT)), batches, sizes=np.arange(COUNT))
    assert len(list(loader)) == 12
    assert (loader.report().fill is not None, "padding:" in str(loader.report())) == (padded, padded)


def test_sizes_of_no_samples() -> None:
    loader = ResumableLoader([], DistributedBatchSampler(0, 4), sizes=np.zeros(0, np.int64))
    assert (list(loader), loader.report().fill) == ([], None)


@pytest.mark.parametrize("sizes", [[1, 2], np.arange(COUNT + 1), 5])
def test_sizes_of_other_samples_are_refused(sizes: Any) -> None:
    with pytest.raises(ValueError, match="sizes must hold one size for each of the 23 samples, got"):
        ResumableLoader(list(range(COUNT)), Bare(), sizes=sizes)


class Asked(Seekable):
    """Tells what is left by a method."""

    def remaining(self) -> int:
        raise AssertionError("not what is asked for")


def test_a_method_named_remaining_is_left_alone() -> None:
    killed, resumed = (ResumableLoader(list(range(COUNT)), Asked(), collate_fn=list) for _ in range(2))
    assert len(list(islice(killed, 5))) == 5
    resumed.load_state_dict(killed.state_dict())
    assert (len(resumed), resumed.remaining) == (12, 7)
    assert list(resumed) == list(Bare())[5:]


class Labelled(ConcatDataset[Any]):
    """Names its classes, by a method."""

    def names(self) -> list[str]:
        raise AssertionError("not what is asked for")


def test_a_method_named_names_is_left_alone() -> None:
    loader = ResumableLoader(Labelled([[0, 1], [2]]), [[0, 1, 2]], collate_fn=list)  # type: ignore[list-item]  # lists are datasets
    assert list(loader) == [[0, 1, 2]]
    assert loader.report().samples == {"train": 3}
