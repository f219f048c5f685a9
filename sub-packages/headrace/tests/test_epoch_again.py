"""A mixture whose epoch comes a second time, behind batches by size, because nobody chose the next one."""

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, SizeAwareBatchSampler
from headrace.webdatamodule import ResumableLoader
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
