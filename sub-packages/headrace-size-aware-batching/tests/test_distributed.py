"""The sampler where people use it: real ranks, loaders with workers, orders of others; and what it refuses."""

import copy
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_worker
import torch
import torchdata.nodes
from processes import run_ranks
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.size_aware_batching import (
    DistributedSizeAwareBatchSampler,
    OptimizerStepBatchSampler,
    plan_step,
    size_aware_batching,
)
from headrace.size_aware_batching.planning.options import STRATEGIES, Strategy

SIZES = np.array([1 + (37 * number) % 211 for number in range(1003)])


def with_options(options: dict[str, Any]) -> DistributedSizeAwareBatchSampler:
    arguments: dict[str, Any] = {"sizes": SIZES, "max_total_size": 500} | options
    return DistributedSizeAwareBatchSampler(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_real_ranks_finish_two_epochs_in_step(world: int, tmp_path: Path) -> None:
    seen = run_ranks(rank_worker.train, world, tmp_path)  # the sampler is older than the process group
    for epoch in range(2):
        assert len({len(rank[epoch]) for rank in seen}) == 1
        samples = Counter(index for rank in seen for batch in rank[epoch] for index in batch)
        assert samples == Counter(range(len(SIZES)))
    assert seen[0][0] != seen[0][1]


def test_tensor_parallel_ranks_share_batches_and_orders_are_compared_across_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(rank_worker.mesh, 4, tmp_path)
    batches = [rank[0] for rank in ranks]
    assert batches[0] == batches[1] != batches[2] == batches[3]
    assert Counter(index for rank in (0, 2) for batch in batches[rank] for index in batch) == Counter(range(len(SIZES)))
    for _, outcomes in ranks:
        for refused in outcomes[:2]:
            assert re.match(r"sampler must .* got a SubsetRandomSampler whose order on rank 1 differs .*gener", refused)
        assert outcomes[2:] == ["accepted"] * 2


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> int:
        return index


def numbers(batch: list[int]) -> list[int]:
    return batch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on machines with fewer cores
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_a_stateful_loader_resumes_with_any_number_of_workers(workers: int) -> None:
    def loader() -> StatefulDataLoader[Any]:
        sampler = DistributedSizeAwareBatchSampler(SIZES, 500, num_replicas=2, rank=1)
        return StatefulDataLoader(Numbers(), batch_sampler=sampler, collate_fn=numbers, num_workers=workers)

    whole = list(loader())
    interrupted = loader()
    batches = iter(interrupted)
    begun = [next(batches) for _ in range(len(whole) // 3)]
    state = pickle.loads(pickle.dumps(interrupted.state_dict()))
    del batches
    resumed = loader()
    resumed.load_state_dict(state)
    assert begun + list(resumed) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_delivered_is_what_counts(workers: int) -> None:
    def make() -> DistributedSizeAwareBatchSampler:
        return DistributedSizeAwareBatchSampler(SIZES, 500)

    whole = [batch.tolist() for batch in make().plan()]
    sampler = make()
    loader = DataLoader(Numbers(), batch_sampler=sampler, collate_fn=numbers, num_workers=workers)
    batches = iter(loader)
    delivered = [next(batches) for _ in range(5)]
    # Workers were sent more batches by now: the loop says how many samples it has received.
    state = sampler.state_dict(position=sum(map(len, delivered)))
    del batches
    resumed = make()
    resumed.load_state_dict(state)
    assert delivered + list(resumed) == whole


def test_sequential_batches_are_those_of_size_aware_batching() -> None:
    order = torch.randperm(len(SIZES), generator=torch.Generator().manual_seed(3)).tolist()
    ours = list(DistributedSizeAwareBatchSampler(SIZES, 700, strategy="sequential", sampler=order))
    assert ours == list(size_aware_batching(order, SIZES, 700, collate_fn=list))


class Taken:
    """An order that remembers what it was asked for."""

    def __init__(self, positions: list[int]) -> None:
        self.positions = np.array(positions)
        self.epoch_length = len(positions)
        self.asked: list[tuple[int, int]] = []

    def take(self, start: int, stop: int) -> Any:
        self.asked.append((start, stop))
        return self.positions[start:stop]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_window_that_is_needed_is_asked_for(strategy: Strategy) -> None:
    order = Taken([(7 * position) % len(SIZES) for position in range(50_000)])
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, strategy=strategy, cost="sum", sampler=order, window=4000)  # type: ignore[arg-type]  # take alone is enough
    next(iter(sampler))
    assert sum(stop - start for start, stop in order.asked) < 20_000
    # A sample that comes repeatedly counts each time.
    assert Counter(index for batch in sampler for index in batch) == Counter(order.positions.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_by_its_number_plans_nothing_again(strategy: Strategy) -> None:
    order = Taken([(7 * position) % len(SIZES) for position in range(50_000)])
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, strategy=strategy, cost="sum", sampler=order, window=4000)  # type: ignore[arg-type]  # take alone is enough
    expected = sampler.plan()
    sampler.batch(0)
    order.asked.clear()
    assert [sampler.batch(number) for number in range(20)] == [batch.tolist() for batch in expected[:20]]
    assert sum(stop - start for start, stop in order.asked) < 20_000


def test_an_order_dealt_to_other_ranks_is_refused() -> None:
    order: Any = Taken(list(range(len(SIZES))))
    order.num_replicas = 4
    with pytest.raises(
        ValueError, match=r"sampler must be made for 1 or 1 ranks .* got a Taken with num_replicas=4: give num_"
    ):
        next(iter(DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order)))
    assert next(iter(DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order, num_replicas=4, rank=1)))


def test_an_order_that_waits_to_go_on_is_refused() -> None:
    order: Any = Taken(list(range(len(SIZES))))
    order.position = 7
    with pytest.raises(
        ValueError,
        match=r"sampler must start at the beginning .* got a Taken at position 7: resume with load_state_dict",
    ):
        next(iter(DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order)))
    order.position = 0
    assert next(iter(DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_order_without_take_is_read_once_an_epoch(strategy: Strategy) -> None:
    order: Any = RandomSampler(range(len(SIZES)), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, strategy=strategy, cost="sum", sampler=order)
    epochs = []
    for _ in range(2):
        length, batches = len(sampler), list(sampler)
        assert length == len(batches)
        assert sorted(index for batch in batches for index in batch) == list(range(len(SIZES)))
        epochs.append(batches)
    if strategy != "packed":
        assert epochs[0] != epochs[1]


def test_an_order_of_indices_that_do_not_exist_is_refused() -> None:
    sampler = DistributedSizeAwareBatchSampler([1, 2], 5, strategy="sequential", sampler=[0, 5])
    with pytest.raises(ValueError, match="sampler must give indices from 0 to 1, got 5"):
        list(sampler)


def test_a_sampler_of_one_rank_is_refused() -> None:
    order: Any = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="sampler must give the samples of all ranks, got a DistributedSampler"):
        DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order)


def test_an_order_that_gives_too_little_is_refused() -> None:
    order = Taken([0, 1, 2])
    order.epoch_length = 10
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order)  # type: ignore[arg-type]  # take alone is enough
    with pytest.raises(ValueError, match=r"sampler.take\(0, 10\) must return shape \(10,\), got \(3,\)"):
        list(sampler)


class Proteins:
    """A dataset that knows its tokens."""

    def __len__(self) -> int:
        return len(SIZES)

    def num_tokens(self, index: int) -> int:
        return int(SIZES[index])


class WithSizes:
    sizes = torch.from_numpy(SIZES)


@pytest.mark.parametrize(
    "given", [Proteins(), WithSizes(), torch.from_numpy(SIZES), SIZES.tolist(), SIZES.astype(float)]
)
def test_sizes_come_in_many_forms(given: Any) -> None:
    sampler = DistributedSizeAwareBatchSampler(given, 500)
    expected = DistributedSizeAwareBatchSampler(SIZES, 500)
    assert list(sampler) == list(expected)
    assert sampler.fingerprint == expected.fingerprint


def test_what_is_cut_counts_as_cut() -> None:
    with pytest.raises(ValueError, match=r"sizes must not exceed max_total_size=100, got 527 of 1003 samples"):
        DistributedSizeAwareBatchSampler(SIZES, 100)
    sampler = DistributedSizeAwareBatchSampler(SIZES, 100, max_length=100)
    assert max(np.minimum(SIZES, 100)[batch].sum() for batch in sampler) <= 100


def test_a_cost_function_is_a_budget_in_its_own_unit() -> None:
    def bytes_needed(n: int, longest: float) -> float:
        return 1000 + 8 * n * longest + 0.5 * n * longest**2

    sampler = DistributedSizeAwareBatchSampler(SIZES, 60_000, strategy="bucketed", cost=bytes_needed)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(SIZES)))
    assert all(bytes_needed(len(batch), SIZES[batch].max()) <= 60_000 for batch in batches)
    # Random batches cost a few batches more than cutting the sorted list, which takes 167.
    assert len(batches) <= 167 + 5


@pytest.mark.parametrize("strategy", ["bucketed", "sequential"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("by_function", [True, False])
def test_padding_counts_in_every_column(strategy: Strategy, shuffle: bool, by_function: bool) -> None:
    rng = np.random.default_rng(0)
    source = rng.integers(5, 200, 2000)
    pairs = np.stack([source, np.clip(source * rng.uniform(0.5, 1.5, 2000), 1, 250).astype(int)], axis=1)

    def cells(n: int, largest: Any) -> float:
        return float(n * largest[0] * largest[1])

    cost: Any = cells if by_function else "padded"
    budget: Any = 200_000 if by_function else (2000, 1500)
    sampler = DistributedSizeAwareBatchSampler(pairs, budget, strategy=strategy, cost=cost, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(2000))
    for batch in batches:
        largest = pairs[batch].max(axis=0)
        assert (cells(len(batch), largest) <= 200_000) if by_function else (len(batch) * largest <= budget).all()
    report = sampler.plan().report()
    assert report.over_budget == 0
    if strategy == "bucketed":
        shares = pairs.prod(axis=1) / 200_000 if by_function else (pairs / budget).max(axis=1)
        assert len(batches) <= 1.25 * shares.sum()


def test_a_cost_function_is_evaluated_once_for_each_distinct_size() -> None:
    calls: Counter[tuple[int, float]] = Counter()

    def cost(n: int, longest: float) -> float:
        calls[n, longest] += 1
        return n * longest

    for strategy in ("bucketed", "sequential"):
        sampler = DistributedSizeAwareBatchSampler(SIZES, 500, strategy=strategy, cost=cost)
        calls.clear()
        list(sampler)
        after_one = calls.total()
        for epoch in range(1, 4):
            sampler.set_epoch(epoch)
            list(sampler)
        assert calls.total() - after_one <= 0.1 * max(after_one, 100)


def test_lengths_are_rounded_up_for_static_shapes() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 2048, strategy="bucketed", cost="padded", length_multiple=64)
    for batch in sampler:
        assert len(batch) * (-(-int(SIZES[batch].max()) // 64) * 64) <= 2048
    report = sampler.plan().report()
    assert report.padded == sum(len(batch) * (-(-int(SIZES[batch].max()) // 64) * 64) for batch in sampler)


def test_lightning_finds_set_epoch_where_it_looks() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
    sampler.sampler.set_epoch(3)
    assert sampler.epoch == 3


def test_without_a_shuffle_every_epoch_is_the_same() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first


def test_seed_and_epoch_are_not_interchangeable() -> None:
    one, other = (DistributedSizeAwareBatchSampler(SIZES, 500, seed=seed) for seed in (0, 1))
    one.set_epoch(1)
    assert list(one) != list(other)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 1}, r"state\['seed'\] must be 1 for this sampler, got 0"),
        (
            {"max_total_size": 600},
            r"state\['fingerprint'\].* budget.* differs in max_total_size \(here 600\): ",
        ),
        ({"sizes": SIZES + 1}, r"state\['fingerprint'\].* one that differs in sizes \(others, or in another order\): "),
        ({"strategy": "sequential"}, r"state\['fingerprint'\].* differs in strategy \(here 'sequential'\): "),
        ({"max_items": 9, "work": SIZES}, r"state\['fingerprint'\].* differs in max_items \(here 9\), work: "),
        (
            {"max_length": 200, "window": 99},
            r"state\['fingerprint'\].* differs in window \(here 99\), max_length \(.* 200\): ",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], complaint: str) -> None:
    state = DistributedSizeAwareBatchSampler(SIZES, 500).state_dict()
    other = with_options(change)
    with pytest.raises(ValueError, match=complaint):
        other.load_state_dict(state)


def test_a_state_of_another_class_is_refused_by_what_was_expected() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
    expected = r"state must be one of DistributedSizeAwareBatchSampler.state_dict\(\), .*version, seed, epoch, position"
    with pytest.raises(ValueError, match=expected + ".* got a dict with the keys weight, bias$"):
        sampler.load_state_dict(torch.nn.Linear(2, 2).state_dict())
    with pytest.raises(ValueError, match=expected + ".* got a dict with the keys 0, 1, 2, .* and 990 more$"):
        sampler.load_state_dict({number: number for number in range(1000)})  # type: ignore[misc]  # wrong on purpose
    state = sampler.state_dict()
    with pytest.raises(
        ValueError, match=r"state\['version'\] must be 1 .* got 4: .* another version .* or another class"
    ):
        sampler.load_state_dict(state | {"version": 4})
    with pytest.raises(ValueError, match=r"state\['fingerprint'\] must be .*, got that of another class"):
        sampler.load_state_dict(state | {"fingerprint": "ab" * 16})


class Large(torch.utils.data.Dataset[int]):
    """A dataset that prints all of its samples."""

    def __repr__(self) -> str:
        return f"Large({list(range(5000))})"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"sizes": Large()}, "sizes must be numbers, .* got Large without either"),
        ({"max_total_size": Large()}, r"max_total_size must be a real number, got Large\(\[.* of type Large$"),
        ({"max_total_size": [{"a": list(range(5000))}] * 5000}, "max_total_size must be a real number, got {"),
        ({"sizes": np.full((9, 4000), 7), "max_total_size": [5] * 4000}, "sizes must not exceed max_total_size="),
        ({"seed": Large()}, r"seed must be an int from 0 to .*, got Large\("),
        ({"strategy": Large()}, r"strategy must be one of .*, got Large\("),
        ({"shuffle": Large()}, r"shuffle must be True or False, got Large\("),
    ],
)
def test_errors_do_not_print_a_whole_dataset(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint) as caught:
        with_options(arguments)
    assert len(str(caught.value)) < 400


def test_a_state_of_another_order_is_refused() -> None:
    class Order(Taken):
        def __init__(self, fingerprint: int) -> None:
            super().__init__(list(range(len(SIZES))))
            self.fingerprint = fingerprint

    state = with_options({"sampler": Order(1)}).state_dict()
    with_options({"sampler": Order(1)}).load_state_dict(state)
    others: list[Any] = [Order(2), list(range(len(SIZES))), None]
    for other in others:
        with pytest.raises(ValueError, match=r"state\['fingerprint'\].*sampler"):
            with_options({"sampler": other}).load_state_dict(state)


def test_an_order_that_every_rank_draws_for_itself_is_refused() -> None:
    order: Any = RandomSampler(range(len(SIZES)))
    with pytest.raises(ValueError, match="got a RandomSampler without a generator"):
        next(iter(with_options({"sampler": order, "num_replicas": 2, "rank": 0})))
    assert len(list(with_options({"sampler": order}))) > 0


def test_a_random_order_that_is_lost_cannot_be_resumed() -> None:
    order: Any = RandomSampler(range(len(SIZES)), generator=torch.Generator().manual_seed(0))
    sampler = with_options({"sampler": order})
    next(iter(sampler))
    with pytest.raises(ValueError, match=r"sampler must have set_epoch.* got a RandomSampler"):
        with_options({"sampler": order}).load_state_dict(sampler.state_dict())


def test_orders_as_arrays_and_tensors() -> None:
    for order in (np.arange(len(SIZES)), torch.arange(len(SIZES))):
        sampler = with_options({"sampler": order, "strategy": "sequential"})
        assert list(sampler) == list(with_options({"shuffle": False, "strategy": "sequential"}))


def test_an_iteration_of_an_epoch_before_does_not_move_the_position() -> None:
    sampler = with_options({})
    old = iter(sampler)
    next(old)
    sampler.set_epoch(1)
    with pytest.warns(UserWarning, match=r"epoch 0 .* continues after set_epoch\(1\)"):
        next(old)
    assert sampler.state_dict()["position"] == 0
    copied = copy.copy(sampler)
    copied.sampler.set_epoch(5)
    assert (copied.epoch, sampler.epoch) == (5, 1)


def test_a_cost_that_rises_in_the_middle_is_refused_and_hangs_nobody() -> None:
    def cost(n: int, longest: float) -> float:
        return n * (5000 if longest == 50 else longest)

    for strategy in ("bucketed", "sequential"):
        with pytest.raises(ValueError, match="must not fall"):
            list(DistributedSizeAwareBatchSampler(np.arange(100), 1000, strategy=strategy, cost=cost))


def test_too_few_samples_for_the_ranks_are_repeated_and_named() -> None:
    sampler = DistributedSizeAwareBatchSampler([5, 6, 7], 10, num_replicas=5, rank=0)
    with pytest.warns(UserWarning, match=r"tail='split': .* on each of 5 ranks; samples are repeated on 2 ranks: \["):
        list(sampler)


class Sized(torch.utils.data.Dataset[int]):
    def __init__(self, sizes: list[int], samples: int) -> None:
        self.sizes, self.samples = sizes, samples

    def __len__(self) -> int:
        return self.samples


def test_wrapped_datasets_hand_their_sizes_on() -> None:
    two: Any = torch.utils.data.ConcatDataset([Sized([5, 6, 7], 3), Sized([1, 2], 2)])
    assert DistributedSizeAwareBatchSampler(two, 10).sizes.tolist() == [5, 6, 7, 1, 2]
    assert DistributedSizeAwareBatchSampler(torch.utils.data.Subset(two, [4, 0]), 10).sizes.tolist() == [2, 5]
    assert DistributedSizeAwareBatchSampler({0: 3, 1: 4}, 10).sizes.tolist() == [3, 4]
    with pytest.raises(ValueError, match="got 2 sizes for the 3 samples of Sized"):
        DistributedSizeAwareBatchSampler(Sized([5, 6], 3), 10)


@pytest.mark.parametrize(
    ("strategy", "cost"), [("stratified", "sum"), ("bucketed", "padded"), ("packed", "sum"), ("sequential", "padded")]
)
def test_a_copy_of_a_sampler_begins_where_its_state_is(strategy: str, cost: str) -> None:
    sampler = with_options({"strategy": strategy, "cost": cost})
    fresh = pickle.loads(pickle.dumps(sampler))
    batches = iter(sampler)
    begun = [next(batches) for _ in range(3)]
    for made in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert made.state_dict() == sampler.state_dict()
        assert begun + list(made) == list(fresh)
    assert begun + list(batches) == list(fresh)


@pytest.mark.parametrize("seed", range(10))
def test_a_last_step_that_begins_inside_a_batch_is_dealt_alike_after_a_resume(seed: int) -> None:
    options = {"sizes": np.arange(1, 6), "max_items": 2, "seed": seed, "num_replicas": 2, "rank": 0}
    whole = list(with_options(options))  # of batches of 2, 2 and 1 the last step takes two samples
    for step in range(1, len(whole)):
        running, resumed = with_options(options), with_options(options)
        batches = iter(running)
        for _ in range(step):
            next(batches)
        resumed.load_state_dict(running.state_dict())
        assert list(resumed) == whole[step:]


@pytest.mark.timeout(120)  # it takes seconds; with a look at the whole list in each step it takes many minutes
def test_an_epoch_of_one_sample_batches_begins_soon() -> None:
    sampler = with_options({"sizes": np.ones(400_000, int), "max_items": 1, "num_replicas": 8, "rank": 0})
    assert len(next(iter(sampler))) == 1


def test_a_state_that_is_none_is_refused() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
    wrongs: list[Any] = ["5", 3.5, True, None]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="position must be an int from 0 to"):
            sampler.load_state_dict(sampler.state_dict() | {"position": wrong})
    with pytest.raises(TypeError, match=r"state must be a dict .* got NoneType"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match=r"state must be .* got a dict with the keys seed, version$"):
        sampler.load_state_dict({"seed": 0, "version": 1})
    with pytest.raises(ValueError, match=r"position must be .* got 5000"):
        sampler.load_state_dict(sampler.state_dict() | {"position": 5000, "epoch": 3})
    assert sampler.state_dict()["epoch"] == 0  # what is refused changes nothing
    later = next(sampler.batches_from()).place._replace(position=5000)
    for place in (5000, later):
        with pytest.raises(ValueError, match=r"position must be .* got 5000"):
            sampler.state_dict(place)
        with pytest.raises(ValueError, match=r"position must be .* got 5000"):
            sampler.batches_from(place)


def test_a_state_from_the_end_of_an_epoch_leaves_the_next_one_whole() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
    list(sampler)
    state = sampler.state_dict()
    resumed = DistributedSizeAwareBatchSampler(SIZES, 500)
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.remaining) == (len(sampler), 0)
    assert list(resumed) == []
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    sampler.set_epoch(1)
    assert list(resumed) == list(sampler)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"strategy": "random"}, ValueError, "strategy must be one of sequential, .* got 'random'"),
        ({"cost": "max"}, ValueError, "cost must be one of sum, padded, .* got 'max'"),
        (
            {"cost": "padded", "strategy": "packed"},
            ValueError,
            "leave it out for 'bucketed', or give 'sequential'",
        ),
        ({"curriculum": 5, "strategy": "sequential"}, ValueError, "curriculum=5 goes with strategy="),
        ({"oversize": "ignore"}, ValueError, "oversize must be one of raise, skip, own_batch, split, got 'ignore'"),
        ({"tail": "keep"}, ValueError, "tail must be one of split, pad, drop, got 'keep'"),
        ({"seed": -1}, ValueError, "seed must be an int from 0 to .* got -1"),
        ({"seed": 0.5}, TypeError, "seed must be .* got 0.5"),
        ({"max_items": 0}, ValueError, "max_items must be an int >= 1, got 0"),
        ({"max_items": 1.5}, TypeError, "max_items must be an int >= 1, got 1.5"),
        ({"batch_size_multiple": 8}, ValueError, "batch_size_multiple=8 goes with"),
        ({"max_total_size": 0}, ValueError, "max_total_size must be greater than 0"),
        ({"max_total_size": float("nan")}, ValueError, "max_total_size"),
        ({"max_total_size": "much"}, TypeError, "max_total_size"),
        ({"max_total_size": (5, 5)}, ValueError, "max_total_size must have one budget .* got 2"),
        ({"sizes": [1.0, float("nan")]}, ValueError, r"sizes must be numbers .* got nan at index 1 \(1 of 2 are"),
        ({"sizes": [3, -1]}, ValueError, "got -1 at index 1"),
        ({"sizes": ["a"]}, TypeError, "sizes must be numbers, .* got list"),
        ({"sizes": [[1, 2], [3]]}, ValueError, "sizes must be numbers of shape"),
        ({"num_replicas": 0}, ValueError, "num_replicas must be an int >= 1, got 0"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank must be from 0 to 1 with num_replicas=2, got 2"),
        ({"window": 0}, ValueError, "window must be an int >= 1, got 0"),
        ({"balanced_ranks": 0}, ValueError, "balanced_ranks must be an int from 1 to .*, got 0"),
        ({"balanced_ranks": 1.5}, TypeError, "balanced_ranks must be an int from 1 to .*, got 1.5"),
        ({"balanced_ranks": 8, "strategy": "sequential"}, ValueError, "balanced_ranks=8 goes with .*: leave it out"),
        ({"sampler": 5}, TypeError, "sampler must be an iterable of indices, got int"),
        ({"shuffle": "yes"}, TypeError, "shuffle must be True or False, got 'yes'"),
        ({"length_multiple": 8}, ValueError, "length_multiple must be 1 with cost='sum', got 8"),
        (
            {"length_multiple": 2**40},
            ValueError,
            "length_multiple must be an int from 1 to 2147483648, got 1099",
        ),
        ({"max_length": "x"}, TypeError, "max_length"),
        ({"max_length": 0}, ValueError, "max_length must be greater than 0, got 0"),
        (
            {"sizes": torch.utils.data.TensorDataset(torch.ones(3))},
            TypeError,
            "sizes must be numbers, .* got TensorDataset without either",
        ),
        ({"cost": lambda n, m: -n * m, "strategy": "bucketed"}, ValueError, "cost must not fall"),
        ({"cost": lambda n, m: float("nan"), "strategy": "bucketed"}, ValueError, "cost must return a number, got NaN"),
        ({"cost": lambda n, m: None, "strategy": "bucketed"}, TypeError, "cost must return a number, got None"),
        ({"sampler": iter([0])}, TypeError, "sampler must be an iterable that can be read again .* got the iterator"),
    ],
)
def test_what_cannot_work_is_refused_where_it_enters(
    options: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        with_options(options)


def test_a_world_without_a_rank_is_refused_when_it_matters() -> None:
    sampler = DistributedSizeAwareBatchSampler(SIZES, 500, num_replicas=2)
    with pytest.raises(ValueError, match=r"num_replicas=2 was given without rank, .*: give rank as well"):
        next(iter(sampler))


def test_no_samples_make_no_batches() -> None:
    for strategy in STRATEGIES:
        sampler = DistributedSizeAwareBatchSampler([], 10, strategy=strategy, cost="sum")
        assert len(sampler) == 0
        assert list(sampler) == []
        assert len(sampler.plan().report().cells()) > 5


def test_a_given_order_is_shared_by_all_ranks() -> None:
    order = SequentialSampler(range(len(SIZES)))
    ranks = [
        list(DistributedSizeAwareBatchSampler(SIZES, 500, sampler=order, num_replicas=4, rank=r)) for r in range(4)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    assert Counter(i for rank in ranks for batch in rank for i in batch) == Counter(range(len(SIZES)))


# The position, at any moment.


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("given", [False, True])
def test_looking_at_a_sampler_does_not_stop_its_position(strategy: Strategy, given: bool) -> None:
    def make() -> DistributedSizeAwareBatchSampler:
        order: Any = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=4) if given else None
        return with_options({"strategy": strategy, "cost": "sum", "sampler": order})

    whole = list(make())
    sampler = make()
    seen = []
    for count, batch in enumerate(sampler, 1):
        seen.append(batch)
        if count % 40 == 5:
            sampler.plan(3), sampler.plan(), sampler.report(), sampler.batch(2), len(sampler)
            assert sampler.remaining == len(whole) - count
        assert (sampler.epoch, sampler.state_dict()["position"]) == (0, sum(map(len, seen)))
        if count == 5:
            state = sampler.state_dict()
    assert seen == whole
    resumed = make()
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.remaining) == (len(whole), len(whole) - 5)
    assert list(resumed) == whole[5:]


def test_after_a_break_an_epoch_begins_anew() -> None:
    orders: list[Any] = [None, RandomSampler(Numbers(), generator=torch.Generator().manual_seed(0))]
    for order in orders:
        sampler = with_options({"sampler": order})
        first = []
        for batch in sampler:
            first.append(batch)
            if len(first) == 4:
                break
        assert sampler.state_dict()["position"] == sum(map(len, first))
        again = list(sampler)
        assert again[:4] == first
        assert sorted(index for batch in again for index in batch) == list(range(len(SIZES)))


class CachedLength:
    """Counts steps as a trainer does: asks for the length once, and goes on at the step where it was stopped."""

    def __init__(self, done: int = 0) -> None:
        self.done = done

    def run(self, loader: Any, steps: int | None = None) -> list[list[int]]:
        length, received = len(loader), []
        for batch in loader:
            received.append(batch)
            self.done += 1
            if self.done in (length, steps):
                break
        return received


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
def test_a_trainer_that_caches_the_length_loses_nothing_after_a_resume(loader_class: Any) -> None:
    def make() -> tuple[DistributedSizeAwareBatchSampler, Any]:
        sampler = DistributedSizeAwareBatchSampler(SIZES, 1000, num_replicas=2, rank=1)
        return sampler, loader_class(Numbers(), batch_sampler=sampler, collate_fn=numbers)

    whole = list(make()[1])
    sampler, loader = make()
    begun = CachedLength().run(loader, 12)
    state = loader.state_dict() if loader_class is StatefulDataLoader else sampler.state_dict()
    sampler, loader = make()
    (loader if loader_class is StatefulDataLoader else sampler).load_state_dict(state)
    assert begun + CachedLength(12).run(loader) == whole


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
@pytest.mark.parametrize("batches", [None, 5])
def test_set_epoch_wins_over_a_state_of_an_older_epoch_that_is_loaded_later(batches: int | None) -> None:
    def make() -> tuple[DistributedSizeAwareBatchSampler, StatefulDataLoader[Any]]:
        sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
        return sampler, StatefulDataLoader(Numbers(), batch_sampler=sampler, collate_fn=numbers)

    _, loader = make()
    running = iter(loader)
    for _ in range(len(loader) if batches is None else batches):
        next(running)
    if batches is None:
        assert next(running, None) is None
    state = loader.state_dict()
    sampler, loader = make()
    loader.load_state_dict(state)  # reaches the sampler only in iter()
    sampler.set_epoch(1)
    second = list(loader)
    expected = DistributedSizeAwareBatchSampler(SIZES, 500)
    expected.set_epoch(1)
    assert second == list(expected)


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata calls it in its constructor
def test_nodes_of_torchdata_resume_and_go_to_the_next_epoch() -> None:
    def make() -> Any:
        return torchdata.nodes.Loader(torchdata.nodes.SamplerWrapper(DistributedSizeAwareBatchSampler(SIZES, 500)))

    epochs = []
    for epoch in range(2):
        expected = DistributedSizeAwareBatchSampler(SIZES, 500)
        expected.set_epoch(epoch)
        epochs.append(list(expected))
    running = make()
    batches = iter(running)
    begun = [next(batches) for _ in range(5)]
    resumed = make()
    resumed.load_state_dict(running.state_dict())
    assert begun + list(resumed) == epochs[0]
    assert list(resumed) == epochs[1]


def test_a_state_of_the_epoch_that_was_set_or_a_newer_one_wins() -> None:
    running = DistributedSizeAwareBatchSampler(SIZES, 500)
    running.set_epoch(2)
    batches = iter(running)
    next(batches)
    state, rest = running.state_dict(), list(batches)
    for epoch in (2, 1):
        sampler = DistributedSizeAwareBatchSampler(SIZES, 500)
        sampler.set_epoch(epoch)
        sampler.load_state_dict(state)
        sampler.set_epoch(2)  # as a trainer does at the beginning of the epoch: the position stays
        assert list(sampler) == rest
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    assert sampler.state_dict()["position"] == 0
    sampler.load_state_dict(state)  # epoch 3 was not iterated
    assert sampler.epoch == 3
    next(iter(sampler))
    sampler.load_state_dict(state)  # now it was
    assert list(sampler) == rest


# Fingerprints.


def test_fingerprints_are_hex_strings_of_data_options_and_seed() -> None:
    plain = with_options({}).fingerprint
    assert isinstance(plain, str)
    assert int(plain, 16) > 0
    alike: list[dict[str, Any]] = [
        {"max_total_size": 500.0},
        {"max_total_size": np.int32(500)},
        {"shuffle": np.True_},
        {"sizes": SIZES.astype(float)},
        {"sizes": SIZES.tolist()},
    ]
    assert {with_options(options).fingerprint for options in alike} == {plain}
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"shuffle": False},
        {"max_length": 200},
        {"sizes": SIZES[::-1]},
        {"sampler": list(range(len(SIZES)))},
    ]
    assert len({with_options(options).fingerprint for options in others} | {plain}) == 1 + len(others)
    lengths = [with_options({"max_length": length}).fingerprint for length in (50, 50.0, np.float32(50))]
    assert len(set(lengths)) == 1


def test_a_state_of_another_mixture_is_refused() -> None:
    class Mixture(Taken):
        def __init__(self, fingerprint: str) -> None:
            super().__init__(list(range(len(SIZES))))
            self.fingerprint = fingerprint

    state = with_options({"sampler": Mixture("ab12")}).state_dict()
    with_options({"sampler": Mixture("ab12")}).load_state_dict(state)
    with pytest.raises(ValueError, match=r"state\['fingerprint'\] must be .* differs in sampler:"):
        with_options({"sampler": Mixture("ab13")}).load_state_dict(state)


# Ranks.


class Mesh:
    """The least that a mesh has to offer."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def get_local_rank(self) -> int:
        return self._rank


def test_ranks_of_a_mesh() -> None:
    given = DistributedSizeAwareBatchSampler(SIZES, 500, num_replicas=4, rank=3)
    of_mesh = DistributedSizeAwareBatchSampler(SIZES, 500, mesh=Mesh(4, 3))
    assert (of_mesh.num_replicas, of_mesh.rank) == (4, 3)
    assert list(of_mesh) == list(given)
    for one in ({"num_replicas": 4}, {"rank": 0}):
        with pytest.raises(ValueError, match=f"mesh and {next(iter(one))}=. were both given: .* leave out"):
            with_options({"mesh": Mesh(4, 3)} | one)
    with pytest.raises(TypeError, match=r"mesh must be a 1-D DeviceMesh or have size\(\) .*, got int"):
        with_options({"mesh": 4})
    square = Mesh(4, 0)
    square.ndim = 2  # type: ignore[attr-defined]  # what a DeviceMesh has
    with pytest.raises(ValueError, match=r"mesh must have 1 dimension.* got 2: .*mesh\[\"dp\"\]"):
        with_options({"mesh": square})


def test_dropping_the_tail_may_not_leave_a_rank_without_a_batch() -> None:
    sampler = DistributedSizeAwareBatchSampler([5, 5, 5], 10, tail="drop", num_replicas=4, rank=0)
    for use in (len, list):
        with pytest.raises(ValueError, match="tail='drop' must leave each of 4 ranks at least one batch, got 2"):
            use(sampler)


def test_an_order_of_another_epoch_that_cannot_be_known_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = with_options({"sampler": RandomSampler(Numbers(), generator=generator)})
    before = generator.get_state()
    assert len(sampler.plan(0)) == len(sampler)
    with pytest.raises(ValueError, match="epoch must be 0 for this sampler, got 1: RandomSampler has neither"):
        sampler.plan(1)
    assert not torch.equal(generator.get_state(), before)  # read once, for epoch 0


@pytest.mark.parametrize(
    "order",
    [
        RandomSampler(range(len(SIZES))),
        torch.utils.data.SubsetRandomSampler(range(len(SIZES))),
        torch.utils.data.WeightedRandomSampler([1.0] * len(SIZES), len(SIZES)),
    ],
)
def test_orders_without_a_generator_need_a_group_that_can_compare_them(order: Any) -> None:
    with pytest.raises(ValueError, match=f"sampler must give all ranks the same order, got a {type(order).__name__}"):
        next(iter(with_options({"sampler": order, "num_replicas": 2, "rank": 0})))
    assert next(iter(with_options({"sampler": order})))


# From epoch to epoch, and from step to step.


def test_steps_are_balanced_by_the_work_that_is_given() -> None:
    work = np.random.default_rng(0).lognormal(0, 1, len(SIZES))
    options: dict[str, Any] = {"max_total_size": 500, "num_replicas": 8, "rank": 0}
    balanced = with_options({"work": work} | options).report().imbalance
    by_size = replace(with_options(options).plan(), work=work).report().imbalance
    assert balanced - 1 < 0.5 * (by_size - 1)
    assert with_options({"work": work}).fingerprint != with_options({}).fingerprint
    many = [with_options({"work": 1e20 * SIZES[::step]}).fingerprint for step in (1, -1)]  # beyond int64
    assert many[0] != many[1]
    with pytest.raises(ValueError, match="work must hold one number for each of 1003 samples, got 3"):
        with_options({"work": [1, 2, 3]})
    with pytest.raises(ValueError, match="work must hold finite numbers, got inf at index 1"):
        with_options({"work": [1, np.inf] + [1] * 1001})
    with pytest.raises(ValueError, match="work must hold numbers >= 0, got -1"):
        with_options({"work": -np.ones(len(SIZES))})


def test_a_sampler_prints_its_main_figures_and_plans_nothing_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.arange(1, 2003) % 97 + 1
    options: dict[str, Any] = {"num_replicas": 8, "rank": 0}
    sampler = DistributedSizeAwareBatchSampler(sizes, 16384, strategy="packed", **options)
    sampler.set_epoch(3)
    expected = "DistributedSizeAwareBatchSampler(2,002 samples, budget 16,384, packed, 8 ranks{}, epoch 3, seed 0)"
    assert repr(sampler) == expected.format("")
    steps = len(sampler)
    assert repr(sampler) == expected.format(f" x {steps} step{'s' * (steps > 1)}")  # known by now
    several = DistributedSizeAwareBatchSampler(
        np.stack([sizes, sizes], 1), (400, 4000.5), seed=7, num_replicas=1, rank="all", sampler=range(3)
    )
    assert repr(several) == (
        "DistributedSizeAwareBatchSampler(2,002 samples, ordered by range, budget 400 and 4,000.5, stratified, "
        "all 1 rank, epoch 0, seed 7)"
    )
    tokens = OptimizerStepBatchSampler(sizes, 500, tokens_per_step=[(0, 5000), (9, 8000)], **options)
    expected = repr(tokens)
    assert expected.endswith("stratified, 8 ranks, epoch 0, seed 0, 5,000 then 8,000 tokens an optimizer step)")
    next(iter(tokens))
    assert repr(tokens) == f"{expected[:-1]}, {tokens.num_optimizer_steps()} optimizer steps)"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    unknown = DistributedSizeAwareBatchSampler(sizes, 500)
    assert "stratified, ranks unknown, epoch 0" in repr(unknown)


def test_work_that_does_not_add_up_to_a_finite_number_is_refused() -> None:
    work = np.full(40, 1e308)
    for call in (
        lambda: DistributedSizeAwareBatchSampler([5] * 40, 12, work=work),
        lambda: plan_step([5] * 40, 12, num_replicas=2, work=work),
    ):
        with pytest.raises(ValueError, match=r"work must add up to a finite number, got up to 1e\+308"):
            call()
    assert DistributedSizeAwareBatchSampler([5] * 40, 12, work=work / 100).report().imbalance == 1


@pytest.mark.filterwarnings("ignore:1 sample is left out")
@pytest.mark.parametrize("options", [{}, {"strategy": "packed"}, {"strategy": "sequential"}, {"cost": "padded"}])
def test_a_budget_that_skips_every_sample_is_refused(options: dict[str, Any]) -> None:
    own: dict[str, Any] = {"num_replicas": 1, "rank": 0, "oversize": "skip", **options}
    what = (
        "oversize='skip' must leave samples to train on, got 2 samples that all exceed max_total_size=40 by themselves"
    )
    with pytest.raises(ValueError, match=what):
        DistributedSizeAwareBatchSampler([50, 60], 40, **own)
    with pytest.raises(ValueError, match=what):
        OptimizerStepBatchSampler([50, 60], 40, tokens_per_step=100, num_replicas=1, rank=0, oversize="skip")
    assert list(DistributedSizeAwareBatchSampler([50, 3], 40, num_replicas=1, rank=0, oversize="skip")) == [[1]]
