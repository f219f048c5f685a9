"""The epochs of a loader: which one comes next, and how long it is."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from loaders import COUNT, KINDS, epoch_of, kinds, make, numbered_shards, plain

from headrace.webdatamodule import DistributedBatchSampler

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


@kinds
def test_the_length_is_that_of_the_epoch_whatever_was_delivered(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    for epoch in range(4):
        loader.set_epoch(epoch)
        length = len(loader)
        for number, _ in enumerate(loader, 1):
            assert (len(loader), loader.steps, loader.epoch) == (length, number, epoch)
        assert number == length == len(loader)


@pytest.mark.slow
@kinds
def test_every_epoch_is_whole_and_the_same_again(folder: Path, kind: str) -> None:
    loader = KINDS[kind](folder)
    epochs = [epoch_of(loader, epoch) for epoch in (0, 1, 2)]
    assert all(sorted(number for batch in batches for number in batch) == list(range(COUNT)) for batches in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert list(loader) == epoch_of(KINDS[kind](folder), 3)  # goes on by itself
    assert [epoch_of(loader, epoch) for epoch in (0, 1)] == epochs[:2]


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


@pytest.mark.parametrize(("epoch", "kind"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_what_is_no_epoch(folder: Path, epoch: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        plain(folder).set_epoch(epoch)


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


def test_every_epoch_is_the_same_where_it_is_fixed(folder: Path) -> None:
    loader = make(folder, DistributedBatchSampler(COUNT, 4), fixed_epoch=True)
    first = list(loader)
    loader.set_epoch(5)
    loader.sampler.set_epoch(6)
    assert (list(loader), list(loader), loader.epoch) == (first, first, 0)
