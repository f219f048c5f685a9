"""The epoch that processes share follows the rule of every other cursor."""

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from headrace.weighted_sampler import _shared_cursor
from headrace.weighted_sampler._shared.cursor import EpochCursor
from headrace.weighted_sampler._shared_cursor import SharedEpochCursor

STEPS = st.one_of(
    st.tuples(st.just("choose"), st.integers(0, 3)),
    st.tuples(st.just("resume"), st.integers(0, 3), st.integers(0, 9)),
    st.just(("begin",)),
)


@given(st.lists(STEPS, max_size=12))
def test_in_one_process_it_is_the_cursor_of_all_packages(steps: list[tuple[Any, ...]]) -> None:
    plain, shared = EpochCursor(), SharedEpochCursor()
    for name, *arguments in steps:
        found = [getattr(cursor, name)(*arguments) for cursor in (plain, shared)]
        assert name == "begin" or found[0] == found[1]
        assert (shared.epoch, shared.start, shared.position) == (plain.epoch, plain.start, plain.position)
        assert [shared.overrules(epoch) for epoch in range(4)] == [plain.overrules(epoch) for epoch in range(4)]


@pytest.mark.parametrize("through", [copy.deepcopy, lambda cursor: pickle.loads(pickle.dumps(cursor))])
def test_a_copy_has_an_epoch_of_its_own(through: Any) -> None:
    cursor = SharedEpochCursor()
    cursor.choose(2)
    copied = through(cursor)
    cursor.choose(3)
    assert (copied.epoch, copied.overrules(1), copied._shared.is_shared()) == (2, True, True)


class Asked(IterableDataset[Any]):
    """Says in each worker what the cursor says before it begins, after it, and after an epoch of the worker's own."""

    def __init__(self) -> None:
        self.cursor = SharedEpochCursor()

    def __iter__(self) -> Iterator[Any]:
        yield self.cursor.epoch, self.cursor.overrules(0)
        self.cursor.begin()
        yield self.cursor.epoch, self.cursor.overrules(0)
        self.cursor.choose(7 + torch.utils.data.get_worker_info().id)  # type: ignore[union-attr]  # a worker asks
        yield self.cursor.epoch, self.cursor.overrules(0)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_learn_of_each_epoch_and_one_of_their_own_stays_in_the_worker(persistent: bool) -> None:
    dataset = Asked()
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=persistent, collate_fn=tuple
    )
    for epoch in (1, 2):
        dataset.cursor.choose(epoch)
        found = list(loader)
        assert sorted(found) == sorted([(epoch, True), (epoch, False)] * 2 + [(7, True), (8, True)])
        assert dataset.cursor.epoch == epoch
        assert not dataset.cursor.overrules(0), "the workers have begun it"


def test_a_chosen_epoch_is_still_to_come_for_a_worker_whose_sibling_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SharedEpochCursor()
    workers = [copy.copy(main), copy.copy(main)]  # they share the memory, as forked processes do

    def of(number: int | None) -> SharedEpochCursor:
        """The cursor of a worker, or of the main process, which is the one that asks now."""
        info = None if number is None else SimpleNamespace(id=number, seed=1000 + number)
        monkeypatch.setattr(_shared_cursor, "get_worker_info", lambda: info)
        return main if number is None else workers[number]

    for epoch in (1, 2):
        of(None).choose(epoch)
        of(0).begin()
        assert (of(0).epoch, of(0).overrules(0)) == (epoch, False)
        assert (of(1).epoch, of(1).overrules(0)) == (epoch, True)
        assert not of(1).resume(epoch - 1, 5)
        of(1).begin()
        assert not of(1).overrules(0)
        assert not of(None).overrules(0)
        for number in (0, 1):
            of(number).choose(8)
            assert of(number).overrules(7)
            of(number).begin()
            assert not of(number).overrules(7)
            assert of(1 - number).epoch == (epoch if number == 0 else 8)
        assert of(None).epoch == epoch
    assert of(None).resume(0, 5)
    assert (of(0).epoch, of(1).epoch) == (8, 8), "their own, until the main process chooses"
    of(None).choose(3)
    assert (of(0).epoch, of(1).epoch) == (3, 3)
