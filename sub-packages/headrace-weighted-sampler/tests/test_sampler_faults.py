"""One named test for each known fault of the sampler that this one replaces, and bounds on memory."""

import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from headrace.weighted_sampler import NamedConcatDataset, Weight, WeightedDistributedSampler
from headrace.weighted_sampler._weight_semantics import integer_weights


def draws(ratio: Weight, epochs: int = 1) -> Counter[int]:
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
    loaded = [batch.tolist() for [batch] in loader]
    assert loaded == list(batches)
    assert [index for batch in loaded for index in batch] == list(sampler)


def test_fault_ratio_2_repeats_some_before_all_were_seen() -> None:
    # Also on the way through an epoch.
    for seed in range(50):
        drawn = WeightedDistributedSampler(range(10), {(0, 10): 2}, seed=seed).take(0, 20).tolist()
        assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))


def test_fault_a_dataset_of_no_samples_and_weight_0_raises() -> None:
    data = NamedConcatDataset({"none": [], "some": range(3)})
    for sampler in (
        WeightedDistributedSampler(data, {"none": 0, "some": 1}),
        WeightedDistributedSampler(data, [0, 1]),
        WeightedDistributedSampler(data, semantics="temperature", temperature=2),
    ):
        assert sorted(sampler) == [0, 1, 2]
        assert [source.draws for source in sampler.report().sources] == [0, 3]


@pytest.mark.slow
def test_fault_thousands_of_sources_at_a_thousand_ranks_fill_the_memory() -> None:
    sources = 20_000
    sampler = WeightedDistributedSampler(
        range(10 * sources), {(10 * place, 10 * place + 10): 1 for place in range(sources)}, 1024, 5
    )
    tracemalloc.start()
    try:
        own = [index for index, _ in zip(sampler, range(100), strict=False)]
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
    assert len(set(own)) == 100


def test_fault_the_report_searches_all_samples_for_each_padded_one() -> None:
    weights = np.random.default_rng(0).integers(1, 4, 10**6)
    report = WeightedDistributedSampler(range(10**6), weights, 4099, 0, semantics="ratio").report()
    assert sum(line.delivered for line in report.sources) % 4099 == 0
    assert len(report.padded) > 1000


def test_fault_a_state_of_an_epoch_that_cannot_be_is_accepted() -> None:
    sampler = WeightedDistributedSampler(range(10), {(0, 10): 1})
    for change in ({"epoch": 2**60}, {"version": True}, {"seed": 1}):
        with pytest.raises(ValueError, match="state"):
            sampler.load_state_dict({**sampler.state_dict(), **change})
    for state in (
        None,
        ["version", "seed", "epoch", "position", "fingerprint"],
        {**sampler.state_dict(), "seed": False},
    ):
        with pytest.raises(TypeError, match="state"):
            sampler.load_state_dict(state)  # type: ignore[arg-type]


def test_fault_names_and_bounds_of_a_joined_dataset_are_believed() -> None:
    class Joined:
        def __init__(self, names: list[str], cumulative_sizes: list[int]) -> None:
            self.names, self.cumulative_sizes = names, cumulative_sizes

        def __len__(self) -> int:
            return 10

    for names, bounds, fault in (
        (["a"], [3, 10], "names must be 2 different names"),
        (["a", "a"], [3, 10], "names must be 2 different names"),
        (["a", "b"], [3, 99], r"must rise to len\(dataset\), 10"),
        (["a", "b"], [12, 10], r"must rise to len\(dataset\), 10"),
    ):
        with pytest.raises(ValueError, match=fault):
            WeightedDistributedSampler(Joined(names, bounds), dict.fromkeys(names, 1))


@pytest.mark.parametrize("weights", [np.linspace(1.7e308, 1.79769e308, 10_000), np.arange(1, 10_001) * 5e-324])
def test_fault_weights_at_the_ends_of_float64_are_refused(weights: np.ndarray) -> None:
    assert len(WeightedDistributedSampler(range(10_000), weights, semantics="proportion").take(0, 100)) == 100


def test_fault_equal_weights_beside_thousands_of_tiny_ones_differ() -> None:
    weights = integer_weights([Fraction(1)] * 10 + [Fraction(1, 10**12)] * 60_000)
    assert max(weights[:10]) - min(weights[:10]) <= 1
    assert min(weights) == 1


def test_bfloat16_and_odd_shapes_of_weights() -> None:
    assert len(list(WeightedDistributedSampler(range(3), torch.ones(3, dtype=torch.bfloat16)))) == 3
    for weights in (np.array(3.0), torch.tensor(1.0), np.ones((3, 1))):
        with pytest.raises(TypeError, match="weights must hold numbers in one dimension"):
            WeightedDistributedSampler(range(3), weights)
    with pytest.raises(TypeError, match="join them with NamedConcatDataset"):
        WeightedDistributedSampler([range(3), range(4)], [1, 2])


MIB = 2**20


def sampler(draws: int) -> WeightedDistributedSampler:
    cuts = [0, *(draws - (draws >> place) for place in range(1, 8)), draws]
    weights = {(low, high): 0.5 + place / 4 for place, (low, high) in enumerate(pairwise(cuts))}
    return WeightedDistributedSampler(range(draws), weights, num_replicas=8, rank=3)


def peak(work: Callable[[], None]) -> float:
    """Most MiB that the work holds at once; numpy's arrays are traced too."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def draw(indices: Iterator[int], count: int) -> None:
    for _ in islice(indices, count):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("draws", [10**6, 10**7, 10**9])
def test_a_million_positions_stay_within_16_mib(draws: int) -> None:
    made = sampler(draws)
    assert peak(lambda: draw(iter(made), 128_000)) <= 16


@pytest.mark.slow
def test_later_positions_hold_no_more_memory_than_the_first() -> None:
    indices = iter(sampler(10**8))
    gc.disable()  # a block that only the collector could free would count
    try:
        tracemalloc.start()
        draw(indices, 64_000)
        before = tracemalloc.get_traced_memory()[0]
        draw(indices, 256_000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before <= MIB


@pytest.mark.slow
def test_many_stretches_leave_nothing_behind() -> None:
    made = sampler(10**8)
    made.take(0, 2**18)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, 200 * 10**4, 10**4):
            made.take(start, start + 1024)
        assert tracemalloc.get_traced_memory()[0] - before <= MIB
    finally:
        tracemalloc.stop()
