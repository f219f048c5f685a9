"""An epoch that comes again, or goes on, or is over, because nobody chose the next one: a warning where it is read."""

import warnings
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    DistributedSizeAwareBatchSampler,
    SizeAwareBatchSampler,
)
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import WeightedDistributedSampler

SIZES = [number % 7 + 1 for number in range(60)]


def mixture() -> WeightedDistributedSampler:
    return WeightedDistributedSampler(range(60), {(0, 40): 0.5, (40, 60): 2})


def planned() -> DistributedSizeAwareBatchSampler:
    return DistributedSizeAwareBatchSampler(SIZES, 20, sampler=mixture())


def in_order() -> SizeAwareBatchSampler:
    return SizeAwareBatchSampler(mixture(), SIZES, 20)


@pytest.mark.parametrize(
    ("batches", "name"), [(planned(), "DistributedSizeAwareBatchSampler"), (in_order(), "WeightedDistributedSampler")]
)
def test_a_mixture_that_comes_twice_warns_once(batches: Any, name: str) -> None:
    loader: Any = DataLoader(range(60), batch_sampler=batches)  # type: ignore[arg-type]
    first = [batch.tolist() for batch in loader]
    with pytest.warns(UserWarning, match=f"epoch 0 of the {name} came a second time") as caught:
        assert [batch.tolist() for batch in loader] == first
    assert [warning.filename for warning in caught] == [__file__]
    batches.set_epoch(1)
    assert [batch.tolist() for batch in loader] != first


def test_a_resumable_loader_chooses_epochs_itself() -> None:
    loader = ResumableLoader(range(60), planned())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            list(loader)


def loader_of(sampler: Any, workers: int = 0) -> Any:
    by = {"sampler": sampler} if isinstance(sampler, WeightedDistributedSampler) else {"batch_sampler": sampler}
    return DataLoader(range(60), num_workers=workers, **by)  # type: ignore[arg-type]


EPOCHS = pytest.mark.parametrize(
    "make",
    [
        planned,
        mixture,
        lambda: DistributedSizeAwareBatchSampler(SIZES, 20, shuffle=False),
        lambda: BlockwiseSizeAwareBatchSampler([SIZES[:20], SIZES[20:]], 20, block=20),
        lambda: DistributedBatchSampler(60, 8),
    ],
)


def set_epoch(sampler: Any) -> None:
    sampler.set_epoch(1)


def load_state_dict(sampler: Any) -> None:
    sampler.load_state_dict(sampler.state_dict())


# Python 3.12 and newer warn where torch forks its workers; what is caught below is raised again.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@EPOCHS
@pytest.mark.parametrize("choose", [set_epoch, load_state_dict])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iteration_that_goes_on_where_another_place_was_chosen_warns_once(
    make: Any, choose: Any, workers: int
) -> None:
    sampler = make()
    wanted = [batch.tolist() for batch in loader_of(make())]
    batches = iter(loader_of(sampler, workers))
    first = next(batches).tolist()
    choose(sampler)
    chosen = sampler.state_dict()
    name = f"an iteration of epoch 0 of the {type(sampler).__name__} continues after {choose.__name__}"
    with pytest.warns(UserWarning, match=name) as caught:
        rest = [batch.tolist() for batch in batches]
    assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]
    assert [first, *rest] == wanted
    assert sampler.state_dict() == chosen


def ended(make: Any) -> dict[str, Any]:
    sampler = make()
    list(sampler)
    state: dict[str, Any] = sampler.state_dict()
    return state


@EPOCHS
def test_an_epoch_that_was_over_where_its_state_was_saved_warns(make: Any) -> None:
    sampler = make()
    sampler.load_state_dict(ended(make))
    name = type(sampler).__name__
    with pytest.warns(UserWarning, match=rf"epoch 0 of the {name} was over .* set_epoch\(1\)") as caught:
        assert not list(loader_of(sampler))
    assert [warning.filename for warning in caught] == [__file__]


@EPOCHS
def test_whoever_chooses_an_epoch_or_looks_into_it_is_not_warned(make: Any) -> None:
    state = ended(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = make()
        sampler.load_state_dict(state)
        loader = loader_of(sampler)
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            assert len(list(loader)) == (len(loader) if epoch else 0)
        assert next(iter(loader)) is not None
        sampler.set_epoch(4)
        batches = iter(loader)
        next(batches)
        sampler.set_epoch(5)
        assert len(list(loader)) == len(loader)
        sampler.load_state_dict(state)
        assert not list(sampler)
        for epoch, batches in enumerate([iter(loader), iter(sampler)], 6):
            sampler.set_epoch(epoch)
            for _ in islice(batches, len(loader if epoch == 6 else sampler)):
                pass
            sampler.set_epoch(9)  # by a loop that knows how many batches an epoch has
            assert not list(batches)


def test_a_resumable_loader_follows_its_own_epochs() -> None:
    state = ended(lambda: ResumableLoader(range(60), planned()))
    loader = ResumableLoader(range(60), planned())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(state)
        assert not list(loader)
        assert list(loader)
        assert loader.epoch == 1
        batches = iter(loader)
        for _ in islice(batches, len(loader)):
            pass
        loader.set_epoch(3)
        assert not list(batches)
        batches = iter(loader)
        next(batches)
    loader.set_epoch(4)
    with pytest.warns(UserWarning, match="an iteration of epoch 3 of the train loader continues") as caught:
        assert list(batches)
    assert [warning.filename for warning in caught] == [__file__]
