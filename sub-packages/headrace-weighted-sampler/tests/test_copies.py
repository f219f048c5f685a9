"""Copies of the public objects, and looks at them: a copy goes on where the state stands, a look moves nothing."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
from sources_of_items import IGNORE_SKIPS, KINDS, Again, Kind, make
from torch.utils.data import DataLoader, IterableDataset

from headrace.weighted_sampler import InterleavedDataset, NamedConcatDataset, WeightedDistributedSampler

TOTAL = 60  # items of an epoch of each of the objects


def through_pickle(thing: Any) -> Any:
    file = io.BytesIO()
    pickle.dump(thing, file)
    file.seek(0)
    return pickle.load(file)


COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, through_pickle]


def sampler() -> Any:
    data = NamedConcatDataset({"large": range(100), "small": range(10)})
    return WeightedDistributedSampler(data, {"large": 3, "small": 1}, epoch_length=TOTAL, seed=1)


def one_of_three_ranks() -> Any:
    return WeightedDistributedSampler(range(100), {(0, 100): 1.79}, num_replicas=3, rank=1, seed=1)


def streams(*kinds: Kind) -> Any:
    return make(kinds, [TOTAL // 2, TOTAL // 2], [1, 1], "drop_exhausted", seed=3)


def nested() -> Any:
    inner = make(["iterator", "plain"], [20, 20], [1, 1], "drop_exhausted", seed=1)
    return InterleavedDataset({"inner": inner, "other": range(20)}, {"inner": 2, "other": 1}, stopping="drop_exhausted")


class Wrapped(IterableDataset[Any]):
    """Another's items, without a state."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return (item for item in self.items)


def nested_in_another() -> Any:
    inner = make(["iterator", "plain"], [20, 20], [1, 1], "drop_exhausted", seed=1)
    sources: dict[str, Iterable[Any]] = {"inner": Wrapped(inner), "other": range(20)}
    return InterleavedDataset(sources, {"inner": 2, "other": 1}, stopping="drop_exhausted")


STREAMS = [*(pytest.param(lambda kind=kind: streams(kind, kind), id=kind) for kind in KINDS), nested, nested_in_another]
MAKERS = [sampler, one_of_three_ranks, *STREAMS]


def look(thing: Any) -> None:
    repr(thing)
    str(thing)
    for copied in COPIES:
        copied(thing)
    for name in dir(thing):
        getattr(thing, name)
    inspect.getmembers(thing)
    if hasattr(type(thing), "__len__"):
        len(thing)
    thing.state_dict()


@IGNORE_SKIPS
@pytest.mark.parametrize("make_one", MAKERS)
@pytest.mark.parametrize("cut", [0, 1, 25, TOTAL])
def test_a_look_moves_no_position(make_one: Callable[[], Any], cut: int) -> None:
    whole = list(make_one())
    thing = make_one()
    look(thing)
    items = iter(thing)
    look(thing)
    for expected in whole[:cut]:
        assert next(items) == expected
        look(thing)
    state = thing.state_dict()
    assert list(items) == whole[cut:]
    look(thing)
    assert list(thing) == whole  # after an iteration

    resumed = make_one()
    resumed.load_state_dict(state)
    look(resumed)
    assert resumed.state_dict() == state
    assert list(resumed) == whole[cut:]
    look(resumed)
    assert list(resumed) == whole

    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    look(resumed)
    other = make_one()
    other.set_epoch(1)
    assert list(resumed) == list(other)


@IGNORE_SKIPS
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("make_one", MAKERS)
@pytest.mark.parametrize("cut", [0, 1, 25])
def test_a_copy_goes_on_where_the_state_stands(
    make_one: Callable[[], Any], cut: int, copied: Callable[[Any], Any]
) -> None:
    thing, other = make_one(), make_one()
    thing.set_epoch(2)
    other.set_epoch(2)
    whole = list(other)
    items = iter(thing)
    assert list(islice(items, cut)) == whole[:cut]
    state = thing.state_dict()
    again = copied(thing)
    assert again.state_dict() == state
    assert thing.state_dict() == state
    assert list(again) == whole[cut:]
    assert list(again) == whole  # once only
    assert list(items) == whole[cut:]
    assert list(thing) == whole
    again.set_epoch(1)
    assert (thing.epoch, again.epoch) == (2, 1)


@IGNORE_SKIPS
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("make_one", MAKERS)
def test_a_copy_of_what_has_ended_is_at_the_end_once(make_one: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    thing = make_one()
    whole = list(thing)
    again = copied(thing)
    assert again.state_dict() == thing.state_dict()
    assert list(again) == []
    assert list(again) == list(thing) == whole


@IGNORE_SKIPS
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("make_one", MAKERS)
def test_a_copy_of_what_was_loaded_resumes_as_well(make_one: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    first, second = make_one(), make_one()
    whole = list(first)
    list(islice(first, 25))
    second.load_state_dict(first.state_dict())
    again = copied(second)
    assert list(again) == whole[25:]
    assert list(second) == whole[25:]


@IGNORE_SKIPS
@pytest.mark.parametrize("make_one", [nested, nested_in_another])
@pytest.mark.parametrize("copied", COPIES)
def test_a_source_that_was_left_in_the_middle_begins_anew_in_a_copy(
    make_one: Callable[[], Any], copied: Callable[[Any], Any]
) -> None:
    thing = make_one()
    whole = list(thing)
    list(islice(thing, 25))
    next(iter(thing))  # near the beginning again
    assert list(copied(thing)) == whole[1:]


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_the_workers_of_a_copy_learn_of_a_new_epoch(copied: Callable[[Any], Any]) -> None:
    dataset = copied(streams("plain", "plain"))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch in (0, 4):
        dataset.set_epoch(epoch)
        assert [tuple(item) for item in loader] == list(dataset)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "method"),
    [
        (lambda dataset: dataset, "fork"),
        (copy.deepcopy, "spawn"),
        pytest.param(lambda dataset: dataset, "spawn", marks=pytest.mark.nightly),
        pytest.param(copy.deepcopy, "fork", marks=pytest.mark.nightly),
    ],
)
def test_workers_begin_anew_whatever_the_main_process_has_read(through: Callable[[Any], Any], method: str) -> None:
    dataset = streams("plain", "plain")
    whole = list(dataset)
    list(islice(dataset, 25))
    dataset = through(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert [tuple(item) for item in loader] == whole


@IGNORE_SKIPS
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_goes_on_in_its_copy(kind: Kind, copied: Callable[[Any], Any]) -> None:
    dataset = streams(kind, kind)
    whole = list(dataset)
    items = iter(dataset)
    assert list(islice(items, 25)) == whole[:25]
    again = copied(items)
    assert again.state_dict() == items.state_dict()
    assert list(again) == whole[25:]
    assert list(items) == whole[25:]


def test_a_one_shot_iterator_is_not_read_by_two() -> None:
    dataset = InterleavedDataset({"a": iter(Again(range(10)))}, {"a": 1})
    list(islice(dataset, 3))
    with pytest.raises(RuntimeError, match=r"sources\['a'\] is an iterator .* was begun before"):
        list(copy.copy(dataset))
