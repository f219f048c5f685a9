"""An epoch that comes a second time because nobody chose the next one: a warning under torch's ``DataLoader``."""

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

from headrace.weighted_sampler import InterleavedDataset, WeightedDistributedSampler

WARNING = r"epoch 0 of the WeightedDistributedSampler came a second time, in the same order: call its set_epoch"


def loader(workers: int = 0, **options: Any) -> Any:
    sampler = WeightedDistributedSampler(range(60), {(0, 40): 0.5, (40, 60): 2}, **options)
    return DataLoader(range(60), batch_size=8, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


# Python 3.12 and newer warn where torch forks its workers; what is caught below is raised again.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_comes_twice_warns_once(workers: int) -> None:
    batches = loader(workers)
    first = [batch.tolist() for batch in batches]
    with pytest.warns(UserWarning, match=WARNING) as caught:
        again = [batch.tolist() for batch in batches]
    assert again == first
    assert [one.filename for one in caught if one.category is UserWarning] == [__file__]
    assert list(batches)  # no warning for the third time


@pytest.mark.parametrize("epochs", [range(3), [0, 0, 0]])
def test_whoever_chooses_epochs_is_not_warned(epochs: Any) -> None:
    batches = loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in epochs:
            batches.sampler.set_epoch(epoch)
            list(batches)


def test_a_part_of_an_epoch_is_no_epoch() -> None:
    batches = loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(batches)
        for _ in range(3):
            next(iter(batches))
        batches.sampler.set_skip_batches(2, 8)
        list(batches)
        for _ in range(3):  # not under a DataLoader
            assert list(batches.batch_sampler)
            assert list(batches.sampler)


def test_an_iteration_of_a_stream_that_is_over_when_another_epoch_is_chosen_warns_of_nothing() -> None:
    stream = InterleavedDataset(
        {"a": [1, 2, 3], "b": [4, 5]}, {"a": 1, "b": 1}, stopping="drop_exhausted", num_replicas=1, rank=0
    )
    items = iter(stream)
    assert len([next(items) for _ in range(5)]) == 5
    stream.set_epoch(1)
    assert list(items) == []


@pytest.mark.parametrize("loads", [False, True])
def test_an_iteration_of_a_stream_that_outlives_its_epoch_warns_once(loads: bool) -> None:
    stream = InterleavedDataset({"a": range(20), "b": range(20)}, {"a": 1, "b": 1})
    state, items = stream.state_dict(), iter(stream)
    next(items)
    if loads:
        stream.load_state_dict({**state, "epoch": 0})
    else:
        stream.set_epoch(1)
    call = "load_state_dict" if loads else r"set_epoch\(1\)"
    with pytest.warns(UserWarning, match=rf"an iteration of epoch 0 of the InterleavedDataset continues after {call}"):
        next(items)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(items)
        list(stream)
        stream.set_epoch(2)
        list(stream)
