"""The loader: counts what was delivered, and goes on from there."""

import json
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler

from headrace.webdatamodule import DistributedBatchSampler, IndexedShards, ResumableLoader, index_shards, write_tars
from headrace.webdatamodule.loading.trainer_epochs import Loop

COUNT = 23
WORKERS = [0, 1, 3]
# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Bare:
    """A batch sampler without a state, whose number of batches differs from epoch to epoch."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.count // self.size)

    @property
    def size(self) -> int:
        return 2 + self.epoch % 3

    def __iter__(self) -> Iterator[list[int]]:
        order = [(i * 5 + self.epoch) % self.count for i in range(self.count)]
        return (order[start : start + self.size] for start in range(0, self.count, self.size))


class Wrapped:
    """A batch sampler whose sampler is told the epoch."""

    def __init__(self) -> None:
        self.sampler = Bare()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.sampler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_tars([(f"s{i:02d}", {"json": b"%d" % i}) for i in range(COUNT)], folder, n_shards=3)
    index_shards(folder)
    return folder


def numbers(samples: list[Any]) -> list[int]:
    return [sample["json"] for sample in samples]


def make(folder: Path, batches: Any, **options: Any) -> ResumableLoader:
    return ResumableLoader(IndexedShards(folder), batches, **{"collate_fn": numbers, **options})


def plain(folder: Path, *, size: int = 4, world: tuple[int, int] = (1, 0), **options: Any) -> ResumableLoader:
    batches = DistributedBatchSampler(COUNT, size, num_replicas=world[0], rank=world[1], seed=options.get("seed", 0))
    return make(folder, batches, num_replicas=world[0], rank=world[1], **options)


def epoch_of(loader: ResumableLoader, epoch: int) -> list[Any]:
    loader.set_epoch(epoch)
    return list(loader)


KINDS = {
    "plain": lambda folder, **options: plain(folder, **options),
    "bare": lambda folder, **options: make(folder, Bare(), **options),
    "wrapped": lambda folder, **options: make(folder, Wrapped(), **options),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


@kinds
def test_the_length_is_that_of_the_epoch_whatever_was_delivered(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    for epoch in range(4):
        loader.set_epoch(epoch)
        length = len(loader)
        for number, _ in enumerate(loader, 1):
            assert (len(loader), loader.steps, loader.epoch) == (length, number, epoch)
        assert number == length == len(loader)


@kinds
def test_every_epoch_is_whole_and_the_same_again(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    epochs = [epoch_of(loader, epoch) for epoch in (0, 1, 2)]
    assert all(sorted(number for batch in batches for number in batch) == list(range(COUNT)) for batches in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(loader) == epoch_of(KINDS[kind](folder), 3)  # goes on by itself
    assert [epoch_of(loader, epoch) for epoch in (0, 1)] == epochs[:2]


@pytest.mark.parametrize("workers", WORKERS)
@kinds
def test_it_goes_on_behind_what_was_delivered(folder: Path, kind: str, workers: int) -> None:
    whole = epoch_of(KINDS[kind](folder), 2)
    loader = KINDS[kind](folder, num_workers=workers, prefetch_factor=3 if workers else None)
    other = KINDS[kind](folder, num_workers=1 if workers != 1 else 0)
    loader.set_epoch(2)
    batches = iter(loader)
    for steps in range(len(whole) + 1):
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["steps"]) == (2, steps)
        if workers == 0 or steps % 4 == 1 or steps == len(whole):
            other.load_state_dict(state)
            other.set_epoch(2)  # as a trainer does, which changes nothing
            assert (len(other), other.steps, other.epoch) == (len(whole), steps, 2)
            assert other.state_dict() == state
            assert list(other) == whole[steps:]
            other.set_epoch(3)
            assert list(other) == epoch_of(KINDS[kind](folder), 3)
        assert next(batches, None) == (whole[steps] if steps < len(whole) else None)
    loader.close()
    other.close()


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2))
def test_the_rest_is_exact_at_any_number_of_ranks(
    folder: Path, data: st.DataObject, world: int, then: int, size: int, epoch: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that come again when there are fewer than ranks
        before = [plain(folder, size=size, world=(world, rank)) for rank in range(world)]
        for loader in before:
            loader.set_epoch(epoch)
        steps = data.draw(st.integers(0, len(before[0])))
        taken = [list(islice(loader, steps)) for loader in before]
        states = [loader.state_dict() for loader in before]
        assert all(state == states[0] for state in states)
        after = [plain(folder, size=size, world=(then, rank)) for rank in range(then)]
        for loader in after:
            loader.load_state_dict(states[-1])
        lengths = {len(loader) for loader in after}
        rest = [list(loader) for loader in after]
    assert {steps + len(own) for own in rest} == lengths
    flat = [sample for own in (*taken, *rest) for batch in own for sample in batch]
    assert set(flat) == set(range(COUNT))
    left = COUNT - sum(len(batch) for own in taken for batch in own)
    if (size > 1 and left >= then) or left == 0:
        assert len(flat) == COUNT


@pytest.mark.parametrize("workers", [0, 2])
@kinds
def test_an_iteration_that_was_given_up_counts_for_nothing(folder: Path, kind: str, workers: int) -> None:
    whole = epoch_of(KINDS[kind](folder), 0)
    loader = KINDS[kind](folder, num_workers=workers)
    abandoned = iter(loader)
    assert next(abandoned) == whole[0]
    assert list(loader) == whole
    loader.set_epoch(0)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert [next(second) for _ in range(3)] == whole[:3]
    assert loader.steps == 3
    assert loader.state_dict()["steps"] == 3
    del first, abandoned
    assert loader.steps == 3
    assert list(second) == whole[3:]
    loader.close()


def test_an_iterator_that_was_made_early_takes_the_epoch_that_is_set_later(folder: Path) -> None:
    loader = plain(folder)
    batches = iter(loader)
    loader.set_epoch(3)
    assert list(batches) == epoch_of(plain(folder), 3)


def test_a_loaded_position_holds_for_its_own_epoch(folder: Path) -> None:
    loader = plain(folder)
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    saved = loader.state_dict()
    loader.load_state_dict(saved)
    assert epoch_of(loader, 1) == epoch_of(plain(folder), 1)
    loader.load_state_dict(saved)
    assert loader.epoch == 0
    rest = list(loader)
    assert len(rest) == len(loader) - 1
    loader.set_epoch(0)
    assert list(loader)[1:] == rest  # then the whole epoch


def test_going_back_behind_a_loaded_state_warns(folder: Path) -> None:
    """`for epoch in range(epochs)` after a resume would train on what was trained on."""
    loader = plain(folder)
    loader.set_epoch(1)
    next(iter(loader))
    resumed = plain(folder)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match=r"state of epoch 1, and set_epoch\(0\) drops it: .*range\(loader.epoch"):
        resumed.set_epoch(0)
    resumed.load_state_dict(loader.state_dict())
    assert len(epoch_of(resumed, 1)) == len(resumed) - 1


def test_batches_of_all_ranks_are_refused_where_nothing_distributes_them(folder: Path) -> None:
    class OfAllRanks(Bare):
        rank = "all"

    assert len(list(make(folder, OfAllRanks(), num_replicas=1, rank=0))) == len(OfAllRanks())
    loader = make(folder, OfAllRanks(), num_replicas=2, rank=0, check_ranks=False)
    with pytest.raises(ValueError, match=r"rank='all', so that each of 2 ranks would train on all .*: leave out rank"):
        next(iter(loader))


def test_it_is_no_loader_that_trainers_take_apart(folder: Path) -> None:
    loader = plain(folder)
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader.sampler, torch.utils.data.SequentialSampler)  # none that trainers would replace
    assert loader.batch_sampler is None
    assert len(loader.dataset) == COUNT
    loader.sampler.set_epoch(2)
    assert loader.epoch == 2


@pytest.mark.parametrize(("epoch", "kind"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_what_is_no_epoch(folder: Path, epoch: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        plain(folder).set_epoch(epoch)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "version=99, this release reads 1"),
        ({"fingerprint": "0" * 32}, "is of other train data.*resume with the data it was saved with"),
        ({"steps": -1}, r"state\['steps'\] must be an int from 0 to 2\*\*62, got -1"),
        ({"epoch": -1}, r"state\['epoch'\] must be an int from 0 to 2\*\*62, got -1"),
        ({"batch_sampler": None}, "batch_sampler"),
        ({"batch_sampler": {}}, "state lacks"),
        ({"steps": "x"}, "steps"),
    ],
)
def test_a_state_of_something_else_is_refused(folder: Path, change: dict[str, Any], told: str) -> None:
    loader = plain(folder)
    with pytest.raises((ValueError, TypeError), match=told):
        loader.load_state_dict(loader.state_dict() | change)
    assert loader.state_dict() == plain(folder).state_dict()
    assert list(loader) == list(plain(folder))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": None}, "steps"),
        ({"batch_sampler": None}, "batch_sampler"),
        ({"batch_sampler": {}}, "checkpoint has num_replicas=None, got num_replicas=1"),
    ],
)
def test_a_state_of_something_else_is_refused_without_a_sampler_of_state(
    folder: Path, change: dict[str, Any], told: str
) -> None:
    loader = make(folder, Bare())
    with pytest.raises((ValueError, TypeError), match=told):
        loader.load_state_dict(loader.state_dict() | change)
    assert list(loader) == list(Bare())


@pytest.mark.parametrize("state", [None, 3, [], "state"])
def test_what_is_no_state(folder: Path, state: Any) -> None:
    with pytest.raises(TypeError, match=r"what state_dict\(\) returned"):
        plain(folder).load_state_dict(state)


def test_a_state_of_another_class_says_what_was_expected(folder: Path) -> None:
    loader, batches = plain(folder), DistributedBatchSampler(COUNT, 4)
    fields = "version, seed, fingerprint, batch_sampler, epoch, steps"
    expected = rf"ResumableLoader: state must be what state_dict\(\) returned, with {fields}; "
    others: list[tuple[Any, type[Exception], str]] = [
        (
            batches.state_dict(),
            ValueError,
            "lacks batch_sampler, steps: got epoch, fingerprint, position, seed, version",
        ),
        (torch.nn.Linear(1, 1).state_dict(), ValueError, "lacks .*: got bias, weight"),
        (loader, TypeError, "got ResumableLoader"),
    ]
    for state, kind, got in others:
        with pytest.raises(kind, match=f"{expected}.*{got}"):
            loader.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"DistributedBatchSampler: state must be .* lacks position: got batch_sampler, "
    ):
        batches.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("missing", ["version", "seed", "epoch", "steps", "fingerprint", "batch_sampler"])
def test_a_state_that_lacks_something_says_what(folder: Path, missing: str) -> None:
    loader = plain(folder)
    state = {name: value for name, value in loader.state_dict().items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"seed": 1}, "seed=0, got seed=1: use that seed"), ({"size": 5}, "other samples.*batch size")],
)
def test_another_seed_or_batch_size_is_refused_with_the_cure(folder: Path, options: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"{told}.*start without the checkpoint"):
        plain(folder, **options).load_state_dict(plain(folder).state_dict())


def test_other_shards_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tars([(f"s{i:02d}", {"json": b"%d" % (i + 1)}) for i in range(COUNT)], tmp_path, n_shards=3)
    index_shards(tmp_path)
    with pytest.raises(ValueError, match="other train data"):
        plain(tmp_path).load_state_dict(plain(folder).state_dict())


def test_without_a_sampler_of_state_ranks_stay_as_many(folder: Path) -> None:
    two = make(folder, Bare(), num_replicas=2, rank=0, check_ranks=False)
    next(iter(two))
    same = make(folder, Bare(), num_replicas=2, rank=1, check_ranks=False)
    same.load_state_dict(two.state_dict())
    assert list(same) == list(Bare())[1:]
    with pytest.raises(
        ValueError, match=r"num_replicas=2, got num_replicas=3, and Bare has no state_dict.*as many ranks"
    ):
        make(folder, Bare(), num_replicas=3, rank=0).load_state_dict(two.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loader_opens_again(folder: Path, workers: int) -> None:
    loader = plain(folder, num_workers=workers)
    batches = iter(loader)
    taken = [next(batches), next(batches)]
    state = loader.state_dict()
    loader.close()
    loader.close()
    loader.load_state_dict(state)
    assert taken + list(loader) == list(plain(folder))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_stay_from_epoch_to_epoch(folder: Path, workers: int) -> None:
    loader = make(
        folder, DistributedBatchSampler(COUNT, 4), num_workers=workers, collate_fn=lambda samples: os.getpid()
    )
    first = set(epoch_of(loader, 0))
    second = set(epoch_of(loader, 1))
    assert first == second
    assert len(first) == max(workers, 1)
    assert (os.getpid() in first) == (workers == 0)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_random_numbers_stay(folder: Path, workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = plain(folder, num_workers=workers)
    for epoch in range(2):
        epoch_of(loader, epoch)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


def drawn(samples: list[Any]) -> float:
    return float(torch.rand(()))


def test_random_numbers_of_workers_repeat_themselves(folder: Path) -> None:
    def draws(seed: int, epoch: int) -> list[float]:
        loader = plain(folder, num_workers=2, seed=seed, collate_fn=drawn)
        loader.set_epoch(epoch)
        made = list(loader)
        loader.close()
        return made

    assert draws(0, 1) == draws(0, 1)
    assert not set(draws(0, 1)) & set(draws(0, 2))
    assert not set(draws(0, 1)) & set(draws(1, 1))


def drawn_of_all(samples: list[Any]) -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002 - what is seeded


@pytest.mark.parametrize("kind", [Bare, lambda: DistributedBatchSampler(COUNT, 4)])
@pytest.mark.parametrize(("workers", "context"), [(3, "fork"), pytest.param(2, "spawn", marks=pytest.mark.nightly)])
def test_random_numbers_are_those_of_the_step(folder: Path, kind: Any, workers: int, context: str) -> None:
    whole = make(folder, kind(), num_workers=2, collate_fn=drawn_of_all)
    first, second = epoch_of(whole, 0), epoch_of(whole, 1)
    assert len({number for batch in first + second for number in batch}) == 3 * len(first + second)
    for done in (1, 4):
        whole.set_epoch(1)
        assert list(islice(whole, done)) == second[:done]
        resumed = make(folder, kind(), num_workers=workers, multiprocessing_context=context, collate_fn=drawn_of_all)
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == second[done:]
        resumed.close()
    whole.close()


def test_random_numbers_differ_from_epoch_to_epoch_in_workers_that_stay(folder: Path) -> None:
    loader = plain(folder, num_workers=2, collate_fn=drawn)
    first, second = (set(epoch_of(loader, epoch)) for epoch in (0, 1))
    assert not first & second
    loader.close()


def test_random_numbers_differ_from_rank_to_rank(folder: Path) -> None:
    def draws(rank: int) -> set[Any]:
        loader = plain(folder, num_workers=1, world=(2, rank), collate_fn=drawn, check_ranks=False)
        made = set(loader)
        loader.close()
        return made

    assert not draws(0) & draws(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_memory_that_is_not_there_changes_nothing(folder: Path, workers: int) -> None:
    loader = plain(folder, num_workers=workers, pin_memory=True, collate_fn=None)
    keys = [key for batch in loader for key in batch["__key__"]]
    loader.close()
    assert len(keys) == COUNT


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


class Steps(Loop):
    """A training loop that counts its steps."""

    done = 0

    def steps_done(self) -> int:
        return self.done


def test_a_step_that_failed_has_its_batch_again(folder: Path) -> None:
    loader = plain(folder)
    whole = list(plain(folder))
    steps = Steps()
    loader._join(steps)
    for number, _ in enumerate(loader):
        during = loader.state_dict()
        steps.done += 1
        after = loader.state_dict()
        assert (during["steps"], after["steps"]) == (number, number + 1)
        again = plain(folder)
        again.load_state_dict(during)
        assert next(iter(again)) == whole[number]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_sampler": {"position": "1"}}, "position.* must be an int"),
        ({"batch_sampler": {"position": None}}, "position.* must be an int"),
        ({"batch_sampler": {"position": -1}}, "it was changed"),
        ({"steps": 0}, "it was changed"),
        ({"epoch": 5}, "of epoch 5, but its batch sampler is in 0"),
        ({"steps": 10**30}, "from 0 to 2"),
        ({"epoch": 10**30}, "from 0 to 2"),
    ],
)
def test_a_state_that_was_changed_by_hand(folder: Path, change: dict[str, Any], told: str) -> None:
    loader = plain(folder)
    assert len(list(islice(loader, 2))) == 2
    state = loader.state_dict()
    changed = {**state, **change, "batch_sampler": {**state["batch_sampler"], **change.get("batch_sampler", {})}}
    with pytest.raises(ValueError, match=told):
        plain(folder).load_state_dict(changed)


def test_more_steps_than_there_are_batches_to_count(folder: Path) -> None:
    loader = make(folder, Bare())
    with pytest.raises(ValueError, match="more than the 12 batches"):
        loader.load_state_dict(loader.state_dict() | {"steps": 13})


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


def test_prefetching_is_for_workers_only(folder: Path) -> None:
    assert len(list(plain(folder, prefetch_factor=3))) == 6


class Squares(torch.utils.data.Dataset[int]):
    """A torch dataset that reads one sample at a time."""

    fingerprint = "squares"

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index**2


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


def test_a_state_of_another_dataset_is_refused() -> None:
    def state(dataset: Any, **options: Any) -> Any:
        return ResumableLoader(dataset, [[0, 1]], **options).state_dict()

    plain = ResumableLoader([1, 2, 3], [[0, 1]])
    plain.load_state_dict(state([1, 2, 3]))
    for other in (state([1, 2]), state([4, 5, 6]), state([1, 2, 3], fingerprint="v2"), state(Squares())):
        with pytest.raises(
            ValueError,
            match=r"checkpoint is of other train data \(another kind of dataset, .*\): .* resume with the data",
        ):
            plain.load_state_dict(other)
    with pytest.raises(ValueError, match="checkpoint has seed=3, got seed=0: use that seed"):
        plain.load_state_dict(state([1, 2, 3], seed=3))


@pytest.mark.parametrize("dataset", [iter([1]), 5, {1, 2}])
def test_what_is_no_map_style_dataset(dataset: Any) -> None:
    with pytest.raises(TypeError, match=r"dataset must have len\(\) and integer indices, got"):
        ResumableLoader(dataset, [[0]])


@kinds
def test_epochs_advance_by_themselves_unless_one_was_chosen(folder: Path, kind: str) -> None:
    epochs = [epoch_of(KINDS[kind](folder), epoch) for epoch in range(6)]
    loader = KINDS[kind](folder)
    assert [list(loader) for _ in range(3)] == epochs[:3]
    assert len(list(islice(loader, 2))) == 2  # a break begins the epoch anew
    assert list(loader) == epochs[3]
    loader.set_epoch(2)
    loader.set_epoch(1)
    assert [list(loader) for _ in range(2)] == epochs[1:3]
    state = loader.state_dict()
    again = KINDS[kind](folder)
    again.load_state_dict(state)
    assert (again.remaining, list(again), list(again)) == (0, [], epochs[3])


@kinds
def test_a_later_set_epoch_wins_over_an_older_state(folder: Path, kind: str) -> None:
    """A loader that is told its epoch before it is given a state, as torchdata's StatefulDataLoader does."""
    epochs = [epoch_of(KINDS[kind](folder), epoch) for epoch in range(3)]
    killed = KINDS[kind](folder)
    list(islice(killed, 2))
    first = killed.state_dict()
    killed.set_epoch(2)
    list(islice(killed, 2))
    third = killed.state_dict()
    loader = KINDS[kind](folder)
    loader.set_epoch(1)
    loader.load_state_dict(first)
    assert (loader.epoch, loader.steps, list(loader)) == (1, 0, epochs[1])
    loader.load_state_dict(first)  # the choice has been iterated
    assert (loader.epoch, loader.steps, list(loader)) == (0, 2, epochs[0][2:])
    loader.set_epoch(1)
    loader.load_state_dict(third)
    assert (loader.epoch, loader.steps, list(loader)) == (2, 2, epochs[2][2:])


@pytest.mark.parametrize("workers", [0, 2])
@kinds
def test_two_iterations_at_once_are_independent(folder: Path, kind: str, workers: int) -> None:
    loader = KINDS[kind](folder, num_workers=workers)
    whole = epoch_of(KINDS[kind](folder), 0)
    first = iter(loader)
    seen = [next(first), next(first)]
    second = iter(loader)
    other = [next(second)]
    assert (loader.steps, loader.state_dict()["steps"]) == (2, 2)  # as long as the other one is a look
    for _ in range(2):  # in turns
        seen.append(next(first))
        other.append(next(second))
    assert loader.steps == 3
    assert seen + list(first) == other + list(second) == whole
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@kinds
def test_a_look_while_a_loop_is_under_way_counts_for_nothing(folder: Path, kind: str, workers: int) -> None:
    loader = KINDS[kind](folder, num_workers=workers)
    epochs = [epoch_of(KINDS[kind](folder), epoch) for epoch in range(3)]
    held: list[Any] = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            state = loader.state_dict()
            held = [*held[-1:], iter(loader)]
            looks = [next(held[-1]), next(iter(loader))]
            assert looks == [epochs[epoch][0]] * 2
            assert batch == epochs[epoch][number]
            assert (loader.state_dict(), loader.steps, loader.epoch) == (state, number + 1, epoch)
    assert loader.report().batches == sum(map(len, epochs))
    loader.close()


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@kinds
def test_a_look_leaves_a_position_that_was_loaded(folder: Path, kind: str, drop: bool, chosen: bool) -> None:
    whole = epoch_of(KINDS[kind](folder), 2)
    killed, resumed = KINDS[kind](folder), KINDS[kind](folder)
    killed.set_epoch(2)
    assert list(islice(killed, 3)) == whole[:3]
    resumed.load_state_dict(killed.state_dict())
    held = iter(resumed)
    assert next(held) == whole[3]
    look = next(iter(resumed))
    if drop:
        del held
    again = next(iter(resumed))
    assert look == again == whole[3]
    if chosen:
        resumed.set_epoch(2)
    assert list(resumed) == whole[3:]
    assert (resumed.steps, resumed.epoch) == (len(whole), 2)
    assert list(resumed) == epoch_of(KINDS[kind](folder), 3)


@kinds
def test_who_begins_anew_while_another_iteration_is_held_has_the_position(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    whole = epoch_of(KINDS[kind](folder), 0)
    held = iter(loader)
    assert [next(held) for _ in range(4)] == whole[:4]
    assert (list(islice(loader, 2)), loader.steps) == (whole[:2], 2)
    again = KINDS[kind](folder)
    again.load_state_dict(loader.state_dict())
    assert list(again) == whole[2:]
    assert (list(loader), loader.steps, loader.epoch) == (whole, len(whole), 0)
    after = epoch_of(KINDS[kind](folder), 1)
    assert list(loader) == after
    assert loader.report().batches == 4 + 2 + len(whole) + len(after)


class Uncopied(Bare):
    """Keeps its iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        self.running = iter([*super().__iter__()])
        self.locked = (number for number in range(1))
        return self.running


def test_a_second_iteration_over_what_cannot_be_copied_says_so(folder: Path) -> None:
    loader = make(folder, Uncopied())
    first = iter(loader)
    next(first)
    cure = "keep no iterators in its attributes, give batch_sampler as a function"
    with pytest.raises(TypeError, match=rf"a second iteration of the train loader, .* a copy of Uncopied, .*: {cure}"):
        next(iter(loader))
    assert len(list(first)) == 11
    whole = make(folder, lambda num_replicas, rank: Uncopied())
    first = iter(whole)
    assert next(first) == next(iter(whole))


def test_every_epoch_is_the_same_where_it_is_fixed(folder: Path) -> None:
    loader = make(folder, DistributedBatchSampler(COUNT, 4), fixed_epoch=True)
    first = list(loader)
    loader.set_epoch(5)
    loader.sampler.set_epoch(6)
    assert (list(loader), list(loader), loader.epoch) == (first, first, 0)


def test_a_batch_sampler_is_made_for_the_ranks_there_are(folder: Path) -> None:
    def make_batches(num_replicas: int, rank: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(COUNT, 4, num_replicas=num_replicas, rank=rank)

    loaders = [make(folder, make_batches, num_replicas=2, rank=rank, check_ranks=False) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [3, 3]
    assert sorted(number for loader in loaders for batch in loader for number in batch) == list(range(COUNT))


def test_the_indices_of_the_present_batch_are_known(folder: Path) -> None:
    loader = plain(folder)
    assert all(list(loader.indices) == batch for batch in loader)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_that_are_not_forked(folder: Path, context: str) -> None:
    loader = plain(folder, num_workers=1, multiprocessing_context=context)
    assert list(loader) == list(plain(folder))
    loader.close()


def test_workers_start_before_ranks_compare_their_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork right behind a collective leaves the child stuck on Python 3.11."""
    before, children = set(multiprocessing.active_children()), list[int]()
    monkeypatch.setattr(
        "headrace.webdatamodule.loader.compare_plans",
        lambda plan, name, num_replicas, mesh: children.append(len(set(multiprocessing.active_children()) - before)),
    )
    loader = plain(folder, num_workers=2)
    assert len(list(loader)) == 6
    loader.close()
    assert children == [2]


def test_forks_beside_threads_do_not_warn(folder: Path) -> None:
    """Python 3.12 and newer would."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader = plain(folder, num_workers=1, multiprocessing_context="fork")
            assert len(list(loader)) == 6
            loader.close()
    finally:
        end.set()
        thread.join()


def _unseeded(data: list[int]) -> list[Any]:
    return [
        DistributedBatchSampler(len(data), 8, sampler=RandomSampler(data)),
        BatchSampler(RandomSampler(data), 8, drop_last=False),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_an_order_that_cannot_be_read_again_is_refused(which: int) -> None:
    data = list(range(300))
    first = ResumableLoader(data, _unseeded(data)[which])
    for _ in zip(range(5), first, strict=False):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = ResumableLoader(data, _unseeded(data)[which])

    def resume() -> None:
        second.load_state_dict(state)
        list(second)

    with pytest.raises(ValueError, match="is not the one that the checkpoint was saved in"):
        resume()


def test_a_seeded_order_is_resumed_by_counting_batches() -> None:
    data = list(range(300))

    def loader() -> ResumableLoader:
        order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        return ResumableLoader(data, BatchSampler(order, 8, drop_last=False))

    first = loader()
    begun = [batch.tolist() for _, batch in zip(range(5), first, strict=False)]
    second = loader()
    second.load_state_dict(first.state_dict())
    again = second.state_dict()
    assert again == first.state_dict()
    rest = [batch.tolist() for batch in second]
    assert sorted(number for batch in begun + rest for number in batch) == data


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


def test_a_timeout_of_numpy() -> None:
    assert len(ResumableLoader([1], [[0]], timeout=np.float64(5), num_workers=1)) == 1


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
