"""Several iterations of one loader: looks, new beginnings, and those that were given up."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from indexed_runs import Stateful
from loaders import COUNT, KINDS, Bare, epoch_of, kinds, make, numbered_shards

from headrace.webdatamodule import DistributedBatchSampler

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


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


LOOKED = [(kind, 0) for kind in KINDS] + [("bare", 2)]
MORE = [pytest.param(kind, 2, marks=pytest.mark.nightly) for kind in KINDS if kind != "bare"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [*LOOKED, *MORE])
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


@kinds
def test_an_iteration_that_set_epoch_left_behind_moves_no_position(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    whole = epoch_of(KINDS[kind](folder), 0)
    left = iter(loader)
    assert [next(left), next(left)] == whole[:2]
    loader.set_epoch(2)
    with pytest.warns(UserWarning, match="an iteration of epoch 0 of the train loader continues after set_epoch"):
        assert list(left) == whole[2:]
    assert (loader.epoch, loader.steps) == (2, 0)
    assert list(loader) == epoch_of(KINDS[kind](folder), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_is_where_the_loop_is_however_far_workers_have_read(folder: Path, workers: int) -> None:
    batches, order = DistributedBatchSampler(COUNT, 4, seed=1), list(range(COUNT))
    ordered = DistributedBatchSampler(COUNT, 4, sampler=order)
    for each in (batches, ordered):
        loader, epoch = make(folder, each, num_workers=workers), 0
        for number, batch in enumerate(loader, 1):
            assert each.position == sum(map(len, epoch_of(make(folder, each.__class__(COUNT, 4)), 0)[:number]))
            assert loader.state_dict()["batch_sampler"] == each.state_dict()
            assert (each.epoch, each.remaining) == (epoch, loader.remaining)
            assert each.draws == (batch if each is ordered else None)
        assert each.remaining == 0
        loader.set_epoch(2)
        assert (each.epoch, each.position) == (2, 0)
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_with_a_state_of_its_own_stays_as_it_was_given(folder: Path, workers: int) -> None:
    def stateful() -> Stateful:
        return Stateful([1] * COUNT, sampler=None, num_replicas=1, rank=0, seed=3, most=4)

    batches, whole = stateful(), list(stateful())
    loader = make(folder, batches, num_workers=workers)
    running = iter(loader)
    came = [next(running) for _ in range(2)]
    assert next(iter(loader)) == whole[0]  # a look
    assert batches.state_dict() == stateful().state_dict()
    assert loader.state_dict()["batch_sampler"]["position"] == 2
    assert came + list(running) == whole
    assert batches.position == 0
    loader.close()
