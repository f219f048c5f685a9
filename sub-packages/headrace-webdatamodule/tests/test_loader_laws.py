"""What every loader promises: epochs, positions, and several iterations at once. One law, every kind of loader."""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from indexed_runs import Stateful
from loaders import COUNT, Bare, Wrapped, make, numbered_shards, numbers, plain
from streams import untuple, write
from webdataset import batched, shuffle

from headrace.webdatamodule import DistributedBatchSampler, IndexedWebDataModule, WebDataModule, index_shards

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = numbered_shards(tmp_path_factory.mktemp("shards"))
    write(place / "stream", [8, 9, 6])
    index_shards(write(place / "indexed", [8, 9, 6]))
    return place


def stateful(folder: Path, **options: Any) -> Any:
    """A batch sampler with a state of its own."""
    return make(folder, Stateful([1] * COUNT, sampler=None, num_replicas=1, rank=0, seed=3, most=4), **options)


def by_factory(folder: Path, **options: Any) -> Any:
    """A loader that makes its batch sampler for the ranks there are."""
    return make(folder, _batches_of_rank, **options)


def _batches_of_rank(num_replicas: int, rank: int) -> DistributedBatchSampler:
    return DistributedBatchSampler(COUNT, 4, seed=2, num_replicas=num_replicas, rank=rank)


def of_module(folder: Path, num_workers: int = 0) -> Any:
    """The loader of a data module over indexed shards."""
    return IndexedWebDataModule(folder, batch_size=4, collate_fn=numbers, num_workers=num_workers).train_dataloader()


def stream(place: str, folder: Path, num_workers: int = 0, persistent: bool = True) -> Any:
    """The loader of a stream whose workers have a shuffle of their own."""
    return WebDataModule(
        {"train": COUNT},
        "json",
        {"train": folder / place},
        4,
        pipeline_wds={"train": [untuple, shuffle(9)]},
        pipeline_prebatch_wld={"train": batched(4, collation_fn=None)},
        kwargs_wds={"train": {"shardshuffle": True, "seed": 3}},
        kwargs_wld={"train": {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}},
    ).train_dataloader()


LOADERS: dict[str, Make] = {
    "plain": plain,
    "bare": lambda folder, **options: make(folder, Bare(), **options),
    "wrapped": lambda folder, **options: make(folder, Wrapped(), **options),
    "stateful": stateful,
    "factory": by_factory,
    "module": of_module,
    "stream": partial(stream, "stream"),
    "stream indexed": partial(stream, "indexed"),
    "stream anew": partial(stream, "indexed", persistent=False),  # workers of its own for each epoch
}
EVERY = pytest.mark.parametrize("kind", LOADERS)
# The workers are those of torch's DataLoader in all planned loaders, and of a WebLoader in all streams.
BUSY = ("bare", "stream", "stream anew")
WITH_WORKERS = pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(kind, workers, marks=pytest.mark.nightly if workers and kind not in BUSY else ())
        for kind in LOADERS
        for workers in (0, 2)
    ],
)


@pytest.fixture
def new(folder: Path) -> Iterator[Callable[..., Any]]:
    """Makes loaders, and ends their workers at last."""
    made: list[Any] = []

    def loader(kind: str, workers: int = 0) -> Any:
        made.append(LOADERS[kind](folder, num_workers=workers))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def epochs(loader: Any, *numbers: int) -> list[list[Any]]:
    """The batches of some epochs."""
    found = []
    for number in numbers:
        loader.set_epoch(number)
        found.append(list(loader))
    return found


def saved(loader: Any) -> Any:
    """A state as a checkpoint holds it."""
    return json.loads(json.dumps(loader.state_dict()))


def place_of(loader: Any) -> tuple[int, int]:
    return loader.epoch, loader.steps


# Epochs


@EVERY
def test_the_length_is_that_of_the_epoch_whatever_was_delivered(new: Make, kind: str) -> None:
    loader = new(kind)
    for epoch in range(4):
        loader.set_epoch(epoch)
        length = len(loader)
        for number, _ in enumerate(loader, 1):
            if number < length:
                assert (len(loader), loader.remaining, place_of(loader)) == (length, length - number, (epoch, number))
        assert number == length


@EVERY
def test_every_epoch_has_every_sample_once_and_is_the_same_again(new: Make, kind: str) -> None:
    loader = new(kind)
    three = epochs(loader, 0, 1, 2)
    assert all(sorted(number for batch in batches for number in batch) == list(range(COUNT)) for batches in three)
    assert three[0] != three[1] != three[2]
    assert epochs(loader, 1, 0) == [three[1], three[0]]


@EVERY
def test_epochs_advance_by_themselves_unless_one_was_chosen(new: Make, kind: str) -> None:
    whole, loader = epochs(new(kind), *range(6)), new(kind)
    assert [list(loader) for _ in range(3)] == whole[:3]
    assert list(islice(loader, 2)) == whole[3][:2]
    assert list(loader) == whole[3]  # a break begins the epoch anew
    loader.set_epoch(2)
    loader.set_epoch(1)
    assert [list(loader) for _ in range(2)] == whole[1:3]


@EVERY
def test_an_iterator_that_was_made_early_takes_the_epoch_that_is_set_later(new: Make, kind: str) -> None:
    loader = new(kind)
    batches = iter(loader)
    loader.set_epoch(3)
    assert [list(batches)] == epochs(new(kind), 3)


# Positions


@WITH_WORKERS
def test_a_state_of_any_moment_resumes_exactly(new: Make, kind: str, workers: int) -> None:
    [whole, after], loader, other = epochs(new(kind, workers), 2, 3), new(kind, workers), new(kind, workers)
    loader.set_epoch(2)
    batches = iter(loader)
    for steps in range(len(whole)):
        state = saved(loader)
        assert place_of(loader) == (2, steps)
        if workers == 0 or steps % 4 == 1:
            other.load_state_dict(state)
            other.set_epoch(2)  # as a trainer does, which changes nothing
            assert (len(other), place_of(other), saved(other)) == (len(whole), (2, steps), state)
            assert list(other) == whole[steps:]
            assert list(other) == after
        assert next(batches) == whole[steps]
    assert next(batches, None) is None


@EVERY
def test_the_state_of_the_end_of_an_epoch_goes_on_with_the_next(new: Make, kind: str) -> None:
    whole, done, other = epochs(new(kind), 0, 1, 2), new(kind), new(kind)
    assert list(done) == whole[0]
    other.load_state_dict(saved(done))
    rest = [list(other), list(other)]
    assert next(batches for batches in rest if batches) == whole[1]


@EVERY
def test_a_loaded_position_holds_for_its_own_epoch(new: Make, kind: str) -> None:
    whole, loader, other = epochs(new(kind), 0, 1), new(kind), new(kind)
    next(iter(loader))
    state = saved(loader)
    other.load_state_dict(state)
    assert epochs(other, 1) == whole[1:]
    other.load_state_dict(state)
    assert place_of(other) == (0, 1)
    assert list(other) == whole[0][1:]
    other.set_epoch(0)
    assert list(other) == whole[0]


@EVERY
def test_the_later_one_of_set_epoch_and_a_state_wins(new: Make, kind: str) -> None:
    """Torchdata's StatefulDataLoader chooses the epoch before it loads a state."""
    whole, killed = epochs(new(kind), 0, 1, 2), new(kind)
    list(islice(killed, 2))
    first = saved(killed)
    killed.set_epoch(2)
    list(islice(killed, 2))
    third = saved(killed)
    loader = new(kind)
    loader.set_epoch(1)
    loader.load_state_dict(first)
    assert (place_of(loader), list(loader)) == ((1, 0), whole[1])
    loader.load_state_dict(first)  # the choice has been iterated
    assert (place_of(loader), list(loader)) == ((0, 2), whole[0][2:])
    loader.set_epoch(1)
    loader.load_state_dict(third)
    assert (place_of(loader), list(loader)) == ((2, 2), whole[2][2:])


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (2**62, ValueError)]
)
@EVERY
def test_what_is_no_epoch_is_refused(new: Make, kind: str, epoch: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="epoch"):
        new(kind).set_epoch(epoch)


# Several iterations


@WITH_WORKERS
def test_an_iteration_that_was_given_up_counts_for_nothing(new: Make, kind: str, workers: int) -> None:
    [whole], loader = epochs(new(kind, workers), 0), new(kind, workers)
    given_up = iter(loader)
    assert next(given_up) == whole[0]
    assert list(loader) == whole
    loader.set_epoch(0)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert [next(second) for _ in range(3)] == whole[:3]
    assert loader.steps == 3
    del first, given_up
    assert loader.steps == 3
    assert list(second) == whole[3:]


@WITH_WORKERS
def test_two_iterations_at_once_are_independent(new: Make, kind: str, workers: int) -> None:
    [whole], loader = epochs(new(kind, workers), 0), new(kind, workers)
    first = iter(loader)
    seen = [next(first), next(first)]
    second = iter(loader)
    other = [next(second)]
    assert loader.steps == 2  # as long as the other one has taken a single batch
    for _ in range(2):  # in turns
        seen.append(next(first))
        other.append(next(second))
    assert loader.steps == 3
    assert seen + list(first) == other + list(second) == whole


@WITH_WORKERS
def test_a_peek_while_a_loop_is_under_way_counts_for_nothing(new: Make, kind: str, workers: int) -> None:
    whole, loader = epochs(new(kind, workers), 0, 1), new(kind, workers)
    kept: list[Any] = []
    for epoch in range(2):
        for number, batch in enumerate(loader, 1):
            if number < len(whole[epoch]):
                state = saved(loader)
                kept = [*kept[-1:], iter(loader)]
                assert [next(kept[-1]), next(iter(loader))] == [whole[epoch][0]] * 2
                assert (saved(loader), place_of(loader)) == (state, (epoch, number))
            assert batch == whole[epoch][number - 1]


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@EVERY
def test_a_peek_leaves_a_position_that_was_loaded(new: Make, kind: str, drop: bool, chosen: bool) -> None:
    [whole, after], killed, resumed = epochs(new(kind), 2, 3), new(kind), new(kind)
    killed.set_epoch(2)
    assert list(islice(killed, 3)) == whole[:3]
    resumed.load_state_dict(saved(killed))
    kept = iter(resumed)
    assert next(kept) == whole[3]
    peek = next(iter(resumed))
    if drop:
        del kept
    assert [peek, next(iter(resumed))] == [whole[3]] * 2
    if chosen:
        resumed.set_epoch(2)
    assert list(resumed) == whole[3:]
    assert list(resumed) == after


@EVERY
def test_who_begins_anew_beside_another_iteration_has_the_position(new: Make, kind: str) -> None:
    [whole, after], loader, other = epochs(new(kind), 0, 1), new(kind), new(kind)
    kept = iter(loader)
    assert [next(kept) for _ in range(4)] == whole[:4]
    assert (list(islice(loader, 2)), loader.steps) == (whole[:2], 2)
    other.load_state_dict(saved(loader))
    assert list(other) == whole[2:]
    assert list(loader) == whole
    assert list(loader) == after


@EVERY
def test_an_iteration_that_set_epoch_left_behind_moves_no_position(new: Make, kind: str) -> None:
    [whole, _, third], loader = epochs(new(kind), 0, 1, 2), new(kind)
    left = iter(loader)
    assert [next(left), next(left)] == whole[:2]
    loader.set_epoch(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(left) == whole[2:]
    said = [
        "an iteration of epoch 0 of the train loader continues after set_epoch" in str(one.message) for one in caught
    ]
    assert said == [True] * (not kind.startswith("stream"))
    assert place_of(loader) == (2, 0)
    assert list(loader) == third


@WITH_WORKERS
def test_a_loader_that_was_closed_goes_on(new: Make, kind: str, workers: int) -> None:
    [whole, after], loader = epochs(new(kind, workers), 0, 1), new(kind, workers)
    taken = list(islice(loader, 2))
    loader.close()
    loader.load_state_dict(saved(loader))
    assert taken + list(loader) == whole
    loader.close()
    assert list(loader) == after


@EVERY
def test_nothing_warns_of_an_ordinary_run(new: Make, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = new(kind)
        for epoch in range(2):
            loader.set_epoch(epoch)
            list(loader)
        state = saved(loader)
        other = new(kind)
        other.load_state_dict(state)
        other.set_epoch(2)
        next(iter(other))
