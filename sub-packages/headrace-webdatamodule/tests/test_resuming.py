"""Resuming from every place, and what happens when an argument changed."""

import inspect
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, write_shards
from headrace.webdatamodule.testing import check_resumes

# The rule of epochs is tried with earlier epochs than that of a state, too.
pytestmark = pytest.mark.filterwarnings("ignore:the train loader has loaded a state of epoch:UserWarning")
COUNT = 61


class Seeded:
    """Somebody's sampler: an order of each epoch, no state."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(COUNT, generator=generator).tolist())


class Repeated:
    """Somebody's batch sampler, without a state, in which samples repeat."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number, number // 2 + self.epoch, 7] for number in range(10)])


class Random:
    """Samples with random transforms."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def batches(**options: Any) -> DistributedBatchSampler:
    arguments: dict[str, Any] = {"n_samples": COUNT, "batch_size": 4} | options
    return DistributedBatchSampler(**arguments)


def loader(batch_sampler: Any = None, **options: Any) -> ResumableLoader:
    arguments: dict[str, Any] = {"dataset": list(range(COUNT)), "collate_fn": list} | options
    dataset = arguments.pop("dataset")
    return ResumableLoader(dataset, batches() if batch_sampler is None else batch_sampler, **arguments)


def of_rank(num_replicas: int, rank: int) -> DistributedBatchSampler:
    return batches(num_replicas=num_replicas, rank=rank)


CASES: dict[str, Any] = {
    "batches": batches,
    "batches of a rank of three": lambda: batches(num_replicas=3, rank=2),
    "batches in order, dropped": lambda: batches(num_replicas=2, rank=0, shuffle=False, drop_last=True),
    "batches of somebody's order": lambda: batches(sampler=Seeded()),
    "loader": loader,
    "loader seeded by sample": lambda: loader(Repeated(), dataset=Random(), seed_per="sample"),
    "loader of a rank": lambda: loader(of_rank, num_replicas=3, rank=1),
    "loader of torch's batch sampler": lambda: loader(BatchSampler(Seeded(), 4, drop_last=False)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case.startswith("loader ") else ()) for case in CASES]
)
def test_it_resumes_everywhere(case: str) -> None:
    check_resumes(CASES[case])


@pytest.mark.slow
def test_it_resumes_with_workers() -> None:
    made: deque[ResumableLoader] = deque()

    def closing() -> ResumableLoader:
        while len(made) > 4:  # older ones are done; left to the garbage collection, some take 5 seconds
            made.popleft().close()
        made.append(loader(num_workers=1))
        return made[-1]

    check_resumes(closing, most_cuts=1)
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards([(f"s{number:02d}", {"txt": b"%d" % number}) for number in range(COUNT)], folder, n_shards=3)
    return folder


@pytest.mark.slow
def test_a_loader_of_shards_resumes_everywhere(shards: Path) -> None:
    check_resumes(lambda: loader(dataset=IndexedShards(shards)), most_cuts=8)


def test_an_order_that_cannot_be_read_again_is_found() -> None:
    """The check itself notices what it is for."""
    with pytest.raises(AssertionError, match="epoch 0, two new objects: item 0 must be"):
        check_resumes(lambda: loader(BatchSampler(RandomSampler(range(COUNT)), 4, drop_last=False)))


# By the class and the argument: other options, and the argument's other value.
REFUSED: dict[Any, dict[str, list[tuple[dict[str, Any], Any]]]] = {
    batches: {
        "n_samples": [({}, COUNT + 1)],
        "batch_size": [({}, 5)],
        "sampler": [({}, Seeded())],
        "shuffle": [({}, False)],
        "drop_last": [({}, True)],
        "seed": [({}, 1)],
    },
    loader: {
        "dataset": [({}, list(range(1, COUNT + 1)))],
        "batch_sampler": [({}, batches(batch_size=5)), ({}, BatchSampler(Seeded(), 4, drop_last=False))],
        "seed": [({}, 1)],
        "seed_per": [({}, "sample"), ({"seed_per": "sample"}, "step")],
        "fingerprint": [({"fingerprint": "one"}, "two")],
    },
}
ACCEPTED: dict[Any, dict[str, Any]] = {
    batches: {"num_replicas": 2, "rank": 0, "mesh": None},
    loader: {
        # What a batch is made into, and who makes it, where and how fast.
        "collate_fn": tuple,
        "num_workers": 1,
        "prefetch_factor": 3,
        "pin_memory": False,
        "timeout": 60.0,
        "multiprocessing_context": "fork",
        "on_error": "skip",
        "sizes": [1] * COUNT,  # for the report alone
        # Ranks, when the batch sampler can: see the tests of ranks.
        "num_replicas": 1,
        "rank": 0,
        "mesh": None,
        "name": "other",
        "fixed_epoch": True,
        "check_ranks": False,
    },
}
CLASSES = {batches: DistributedBatchSampler, loader: ResumableLoader}


@pytest.mark.parametrize("make", CLASSES)
def test_every_argument_is_refused_or_accepted_when_it_changes(make: Any) -> None:
    assert set(inspect.signature(CLASSES[make]).parameters) == REFUSED[make].keys() | ACCEPTED[make].keys()


@pytest.mark.parametrize(
    ("make", "name", "case"),
    [(make, name, case) for make, names in REFUSED.items() for name in names for case in range(len(names[name]))],
)
def test_another_value_of_an_argument_that_decides_the_order_is_refused(make: Any, name: str, case: int) -> None:
    options, value = REFUSED[make][name][case]
    saved, other = make(**options), make(**options | {name: value})
    list(islice(saved, 3))
    with pytest.raises((TypeError, ValueError), match=r"checkpoint|state"):
        other.load_state_dict(saved.state_dict())
    assert len(list(other)) == len(other)  # a refusal leaves it as it was


@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in ACCEPTED.items() for name in names])
def test_what_does_not_decide_the_order_may_change(make: Any, name: str) -> None:
    saved = make()
    begun = [list(batch) for batch in islice(saved, 3)]
    more = {"num_workers": 1} if name in ("prefetch_factor", "multiprocessing_context") else {}
    more |= {"num_replicas": {"rank": 0}, "rank": {"num_replicas": 1}}.get(name, {})
    resumed = make(**{name: ACCEPTED[make][name]} | more)
    resumed.load_state_dict(saved.state_dict())
    rest = [list(batch) for batch in resumed]
    if name == "num_replicas" and make is batches:
        return  # half of the rest
    assert begun + rest == [list(batch) for batch in make()]


def test_a_loader_is_for_the_ranks_of_its_batch_sampler() -> None:
    one = loader(batches(num_replicas=2, rank=1))
    assert (one.ranks, len(one)) == ((2, 1), len(list(one)))
    wrapped = loader(BatchSampler(DistributedSampler(range(COUNT), num_replicas=2, rank=1), 4, drop_last=False))  # type: ignore[arg-type]  # anything with a length
    assert wrapped.ranks == (2, 1)


@pytest.mark.parametrize("given", [{"num_replicas": 1, "rank": 0}, {"num_replicas": 2, "rank": 0}])
def test_a_loader_and_a_batch_sampler_for_other_ranks_are_an_error(given: dict[str, int]) -> None:
    one = loader(batches(num_replicas=2, rank=1), **given)
    with pytest.raises(ValueError, match=r"the train loader is for rank 0 of ., and its .* for rank 1 of 2"):
        next(iter(one))
    alone = loader(num_replicas=2, rank=1)  # its batch sampler knows of one rank
    with pytest.raises(ValueError, match=r"is for rank 1 of 2, and its DistributedBatchSampler for rank 0 of 1"):
        next(iter(alone))


class Keyed:
    """Samples of a class of one's own, which are read one by one, and a key for each."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> int:
        return self.order[index]

    def key(self, index: int) -> str:
        return f"k{self.order[index]}"


def test_a_dataset_with_keys_that_was_shuffled_anew_is_refused() -> None:
    def loader(order: list[int]) -> ResumableLoader:
        return ResumableLoader(Keyed(order), DistributedBatchSampler(len(order), 4), collate_fn=list)

    saved = loader(list(range(100)))
    next(iter(saved))
    loader(list(range(100))).load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="checkpoint is of other train data"):
        loader(random.Random(0).sample(range(100), 100)).load_state_dict(saved.state_dict())
    loader(list(range(130))).load_state_dict(saved.state_dict(), accept={"data"})
