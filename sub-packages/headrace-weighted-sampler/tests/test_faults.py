"""One named test for each known fault of the sampler that this one replaces."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from headrace.weighted_sampler import Ratio, WeightedDistributedSampler


def draws(ratio: Ratio, epochs: int = 1) -> Counter[int]:
    """Count the draws of a thousand samples over some epochs."""
    sampler = WeightedDistributedSampler(range(1000), {(0, 1000): ratio})
    counts: Counter[int] = Counter()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        counts.update(sampler)
    return counts


def test_fault_the_epoch_after_a_resumed_one_raises() -> None:
    sampler = WeightedDistributedSampler(range(103), {(0, 103): 1}, num_replicas=2, rank=1)
    sampler.set_epoch(3)
    sampler.set_skip_batches(5, 4)
    assert len(list(sampler)) == 52 - 20
    for epoch in (4, 5):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == 52


def test_fault_ratio_1_01_misses_a_third() -> None:
    counts = draws(1.01)
    assert len(counts) == 1000
    assert Counter(counts.values()) == {1: 990, 2: 10}


def test_fault_ratio_1_01_repeats_before_all_were_seen() -> None:
    # Passes run on: what the first epoch began of the second pass, the second epoch does not draw again
    # before that pass is through.
    for epochs in range(1, 5):
        counts = Counter(draws(1.01, epochs).values())
        assert counts == {epochs: 1000 - 10 * epochs, epochs + 1: 10 * epochs}


def test_fault_ratio_2_misses_some() -> None:
    assert draws(2.0) == dict.fromkeys(range(1000), 2)


def test_fault_ratio_0_25_over_four_epochs_misses_some() -> None:
    for epochs in (1, 2, 3, 4):
        counts = draws(0.25, epochs)
        assert (len(counts), max(counts.values())) == (250 * epochs, 1)


def test_fault_seed_0_epoch_1_equals_seed_1_epoch_0() -> None:
    one = WeightedDistributedSampler(range(10_000), {(0, 10_000): 1}, seed=0)
    two = WeightedDistributedSampler(range(10_000), {(0, 10_000): 1}, seed=1)
    one.set_epoch(1)
    # About one sample stands at the same position in two random orders.
    assert np.count_nonzero(one.take(0, 10_000) == two.take(0, 10_000)) <= 12


def test_fault_the_order_of_the_dictionary_changes_the_result() -> None:
    weights = {(0, 30): 0.5, (30, 70): 1.25, (70, 75): 3}
    forwards = WeightedDistributedSampler(range(75), weights)
    backwards = WeightedDistributedSampler(range(75), dict(reversed(weights.items())))
    assert list(forwards) == list(backwards)
    assert forwards.fingerprint == backwards.fingerprint


@pytest.mark.parametrize(("size", "ratio", "want"), [(100, 1.1, 110), (100, 0.07, 7), (10, 0.3, 3), (3, 1.1, 4)])
def test_fault_100_times_1_1_draws_111(size: int, ratio: float, want: int) -> None:
    assert len(WeightedDistributedSampler(range(size), {(0, size): ratio})) == want


def test_fault_weights_and_batch_samplers_exclude_one_another() -> None:
    sampler = WeightedDistributedSampler(range(50), {(0, 40): 0.5, (40, 50): 2}, num_replicas=2, rank=0)
    batches = BatchSampler(sampler, batch_size=8, drop_last=False)
    data = TensorDataset(torch.arange(50))
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(data, batch_sampler=batches)
    assert len(loader) == 3
    assert [batch.tolist() for [batch] in loader] == list(batches)
    assert [index for [batch] in loader for index in batch.tolist()] == list(sampler)
