"""The sampler in the places where PyTorch users put it."""

from collections import Counter

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from headrace.weighted_sampler import WeightedDistributedSampler


class Numbers(Dataset[int]):
    """Numbers from ``first`` on, each its own sample."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.first + index


def test_a_concatenated_dataset_is_mixed_by_its_parts() -> None:
    both: ConcatDataset[int] = ConcatDataset([Numbers(0, 100), Numbers(1000, 20)])
    sampler = WeightedDistributedSampler(both, {(0, 100): 0.2, (100, 120): 2})
    loader = DataLoader(both, batch_size=8, sampler=sampler)
    assert len(loader) == 8
    seen = Counter(number for batch in loader for number in batch.tolist())
    assert seen.total() == 60
    assert {number: count for number, count in seen.items() if number >= 1000} == dict.fromkeys(range(1000, 1020), 2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_skip_reaches_the_loader_once(workers: int, batch_size: int | None) -> None:
    data = Numbers(0, 30)
    sampler = WeightedDistributedSampler(data, {(0, 30): 1})
    whole = list(sampler)
    sampler.set_skip_batches(3, 4)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=workers)
    first, second = ([int(number) for batch in loader for number in _flat(batch)] for _ in range(2))
    assert first == whole[12:]
    assert second == whole


def _flat(batch: int | torch.Tensor) -> list[int]:
    return [batch] if isinstance(batch, int) else [int(number) for number in batch]


def test_set_epoch_reshuffles_between_epochs() -> None:
    data = Numbers(0, 200)
    sampler = WeightedDistributedSampler(data, {(0, 200): 1})
    loader = DataLoader(data, batch_size=200, sampler=sampler)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        [batch] = loader
        orders.append(tuple(batch.tolist()))
    assert len(set(orders)) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(200))}
