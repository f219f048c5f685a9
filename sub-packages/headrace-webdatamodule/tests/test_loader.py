"""The loader: counts what was delivered, and goes on from there."""

import json
import warnings
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loaders import (
    COUNT,
    KINDS,
    WORKERS,
    epoch_of,
    kinds,
    numbered_shards,
    plain,
)

from headrace.webdatamodule.loading.trainer_epochs import Loop

# Torch says so on machines of fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.slow
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
            assert json.loads(json.dumps(other.state_dict())) == state
            assert list(other) == whole[steps:]
            other.set_epoch(3)
            assert list(other) == epoch_of(KINDS[kind](folder), 3)
        assert next(batches, None) == (whole[steps] if steps < len(whole) else None)
    loader.close()
    other.close()


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
