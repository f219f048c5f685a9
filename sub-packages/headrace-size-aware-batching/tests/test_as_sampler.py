"""A batch sampler given to torch's ``DataLoader`` as ``sampler=`` is told where it belongs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from headrace.size_aware_batching import BucketBatchSampler, DistributedSizeAwareBatchSampler, SizeAwareBatchSampler

SIZES = [number % 7 + 1 for number in range(60)]
DATA = TensorDataset(torch.arange(60))
BASE = {"batch_size": 4, "drop_last": False}
MAKES: dict[str, Callable[[], Any]] = {
    "DistributedSizeAwareBatchSampler": lambda: DistributedSizeAwareBatchSampler(SIZES, 20, num_replicas=1, rank=0),
    "SizeAwareBatchSampler": lambda: SizeAwareBatchSampler(SequentialSampler(DATA), SIZES.__getitem__, 20),
    "BucketBatchSampler": lambda: BucketBatchSampler(
        SIZES, [1, 4, 8], BatchSampler, {"batch_size": 4, "drop_last": False}
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", MAKES)
def test_a_batch_sampler_as_sampler_is_refused(name: str, workers: int) -> None:
    message = f"sampler must yield indices, got a {name}, which yields batches: give it as batch_sampler="
    several: list[dict[str, Any]] = [{}, {"batch_size": 4, "drop_last": True}]
    for options in several:
        with pytest.raises(TypeError, match=message):
            list(DataLoader(DATA, sampler=MAKES[name](), num_workers=workers, **options))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_every_other_way_to_read_it_stays(make: Callable[[], Any]) -> None:
    for loader in (
        DataLoader(DATA, batch_sampler=make()),
        DataLoader(DATA, sampler=make(), batch_size=None),  # torch's way for datasets that take a batch of indices
    ):
        assert sum(len(rows) for (rows,) in loader) == len(DATA)
    assert sum(map(len, make())) == len(DATA)
