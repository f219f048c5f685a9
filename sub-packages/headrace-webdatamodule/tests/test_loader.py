"""The loader: counts what was delivered, and goes on from there."""

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_runs import Stateful
from loaders import COUNT, Bare, epoch_of, make, numbered_shards, plain

from headrace.webdatamodule import DistributedBatchSampler
from headrace.webdatamodule.loading.epoch_loader import Loop

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.slow
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


def test_the_indices_of_the_present_batch_are_known(folder: Path) -> None:
    loader = plain(folder)
    assert all(list(loader.indices) == batch for batch in loader)


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


def test_every_epoch_is_the_same_where_it_is_fixed(folder: Path) -> None:
    loader = make(folder, DistributedBatchSampler(COUNT, 4), fixed_epoch=True)
    first = list(loader)
    loader.set_epoch(5)
    loader.sampler.set_epoch(6)
    assert (list(loader), list(loader), loader.epoch) == (first, first, 0)


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


def test_the_report_counts_delivered_batches_and_no_peeks(folder: Path) -> None:
    loader = plain(folder)
    kept = iter(loader)
    assert [len(next(kept)) for _ in range(3)] == [4, 4, 4]
    next(iter(loader))
    assert loader.report().batches == 3
    assert loader.report().batches + len(list(loader)) == 3 + len(loader)
    assert loader.report().batches == 3 + len(loader)
