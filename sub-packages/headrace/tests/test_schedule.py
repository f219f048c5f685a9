"""A schedule of weights inside batch samplers: a resume takes another future, and refuses another past."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import MapDataModule, ResumableLoader
from headrace.weighted_sampler import WeightedDistributedSampler

SIZES = [3 + 7 * number % 50 for number in range(1000)]
NOW = (700, {(0, 900): 0, (900, 1000): 1})  # in epoch 1
LATER = (1200, {(0, 900): 1, (900, 1000): 9})  # with epoch 2
WITHIN = (900, {(0, 900): 1, (900, 1000): 9})  # in epoch 1


def by_budget(*schedule: Any) -> ResumableLoader:
    return loader_of(schedule, batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=200), sizes=SIZES)


def by_number(*schedule: Any) -> ResumableLoader:
    return loader_of(schedule, batch_size=8)


def loader_of(schedule: Any, **batching: Any) -> ResumableLoader:
    weights = {(0, 900): 1, (900, 1000): 1}
    mixture = partial(WeightedDistributedSampler, weights=weights, epoch_length=600, schedule=schedule)
    data = MapDataModule({"train": range(1000)}, sampler=mixture, collate_fn=list, **batching)
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader, ResumableLoader)
    return loader


def epochs(loader: ResumableLoader) -> Iterator[list[int]]:
    for _ in range(2):
        yield from loader


@pytest.mark.parametrize("made", [by_budget, by_number])
def test_a_resume_takes_another_future_and_refuses_another_past(made: Callable[..., ResumableLoader]) -> None:
    first = made(NOW)
    first.set_epoch(1)
    iterator = iter(first)
    seen = [next(iterator) for _ in range(5)]
    state = first.state_dict()

    changed, whole = made(NOW, LATER), made(NOW, LATER)
    changed.load_state_dict(state)
    whole.set_epoch(1)
    assert [*seen, *epochs(changed)] == list(epochs(whole))

    for other in [(), (NOW, WITHIN), (WITHIN,)]:
        with pytest.raises(ValueError, match="fingerprint"):
            made(*other).load_state_dict(state)
