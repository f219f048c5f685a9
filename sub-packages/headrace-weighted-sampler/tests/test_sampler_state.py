"""States of the sampler, and resuming in the places where PyTorch users put it."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from headrace.weighted_sampler import WeightedDistributedSampler

GOOD = WeightedDistributedSampler(range(20), {(0, 20): 1}, seed=7).state_dict(position=6)


def load(state: dict[str, Any], length: int = 20, ratio: float = 1, seed: int = 7) -> None:
    WeightedDistributedSampler(range(length), {(0, 20): ratio}, seed=seed).load_state_dict(state)


def test_the_state_is_a_few_plain_values() -> None:
    assert {key: type(value) for key, value in GOOD.items()} == {
        "version": int,
        "seed": int,
        "epoch": int,
        "position": int,
        "fingerprint": str,
    }
    load({**GOOD})


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"state lacks \['{key}'\], got the keys"):
        load({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 1}, ValueError, "state has version 1, this release reads version 2"),
        ({"seed": 8}, ValueError, "state was saved with seed=8, this one has seed=7"),
        ({"epoch": -1}, ValueError, r"state\['epoch'\] must be an int from 0"),
        ({"epoch": "3"}, TypeError, r"state\['epoch'\] must be an int from 0"),
        ({"position": 21}, ValueError, r"state\['position'\] must be an int from 0 to 20, got 21"),
        ({"position": 1.5}, TypeError, r"state\['position'\] must be an int"),
    ],
)
def test_a_state_that_cannot_be_meant_is_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load({**GOOD, **change})


def test_another_dataset_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="dataset of 20 samples, this one has 25"):
        load({**GOOD}, length=25)


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="state was saved with other options: weights"):
        load({**GOOD}, ratio=1.1)


def test_a_refused_state_changes_nothing() -> None:
    sampler = WeightedDistributedSampler(range(20), {(0, 20): 1}, seed=8)
    sampler.set_skip_batches(1, 3)
    with pytest.raises(ValueError, match="seed"):
        sampler.load_state_dict({**GOOD, "epoch": 5})
    assert (sampler.epoch, sampler.position) == (0, 3)


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
