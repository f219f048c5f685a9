"""States of the sampler, and resuming in the places where PyTorch users put it."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

# torchdata 0.11 calls what torch 2.13 has deprecated; nobody here can act on it.
IGNORE_TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

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
        "mixture": dict,
    }
    assert json.loads(json.dumps(GOOD)) == GOOD
    load({**GOOD})


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"state lacks \['{key}'\], got the keys"):
        load({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"version": 2}, ValueError, "state has version 2, this release reads version 1"),
        ({"seed": 8}, ValueError, "state was saved with seed=8, this WeightedDistributedSampler has seed=7"),
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


# -- The position while the sampler is iterated ------------------------------------------------------------------


def ranks_of(world: int, **options: Any) -> list[WeightedDistributedSampler]:
    weights = {(0, 100): 0.5, (100, 130): 2}
    return [WeightedDistributedSampler(range(130), weights, world, rank, seed=4, **options) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_state_is_the_true_position_at_any_moment(world: int, drop_last: bool) -> None:
    for sampler in ranks_of(world, drop_last=drop_last):
        sampler.set_epoch(2)
        whole = list(sampler)
        for done, _ in enumerate(sampler, start=1):
            state = sampler.state_dict()
            assert (state["epoch"], state["position"]) == (2, min(done * world, sampler.epoch_length))
            assert sampler.remaining == len(whole) - done
            if done % 17 == 0:
                resumed = ranks_of(world, drop_last=drop_last)[sampler.rank]
                resumed.load_state_dict(state)
                assert (len(resumed), resumed.remaining) == (len(whole), len(whole) - done)
                assert list(resumed) == whole[done:]
                assert (resumed.position, resumed.remaining) == (min(len(whole) * world, sampler.epoch_length), 0)
                assert list(resumed) == whole


def test_the_state_of_a_resumed_iteration_goes_on_from_where_it_was() -> None:
    [sampler], [again] = ranks_of(1), ranks_of(1)
    whole = list(sampler)
    sampler.load_state_dict(sampler.state_dict(position=40))
    indices = iter(sampler)
    assert list(islice(indices, 7)) == whole[40:47]
    again.load_state_dict(sampler.state_dict())
    assert list(again) == whole[47:]


def test_reports_and_lengths_do_not_stop_the_position() -> None:
    sampler = ranks_of(2)[1]
    indices, whole = iter(sampler), list(ranks_of(2)[1])
    assert list(islice(indices, 10)) == whole[:10]
    assert len(sampler) == 55
    assert sampler.remaining == 45
    sampler.report()
    sampler.take(3, 50)
    sampler.padded()
    sampler.set_epoch(0)  # the epoch it is in
    assert sampler.state_dict()["position"] == 20
    assert list(indices) == whole[10:]
    assert sampler.state_dict()["position"] == 110


def test_after_a_break_the_epoch_begins_anew() -> None:
    [sampler] = ranks_of(1)
    whole = list(sampler)
    assert list(islice(sampler, 9)) == whole[:9]
    assert sampler.position == 9
    indices = iter(sampler)
    assert sampler.position == 9  # a loader may make an iterator that it never uses
    assert next(indices) == whole[0]
    assert sampler.position == 1
    assert list(indices) == whole[1:]


def test_only_the_latest_iteration_reports_its_position() -> None:
    [sampler] = ranks_of(1)
    one, two = iter(sampler), iter(sampler)
    whole = list(ranks_of(1)[0])
    assert list(islice(one, 30)) == whole[:30]
    assert list(islice(two, 4)) == whole[:4]
    assert sampler.position == 4
    assert list(one) == whole[30:]
    assert sampler.position == 4


# -- set_epoch and states ----------------------------------------------------------------------------------------


def saved(epoch: int, position: int) -> Any:
    [sampler] = ranks_of(1)
    sampler.set_epoch(epoch)
    return sampler.state_dict(position=position)


def test_a_set_epoch_wins_over_a_state_of_an_older_epoch_that_is_loaded_after_it() -> None:
    [sampler] = ranks_of(1)
    sampler.set_epoch(1)
    sampler.load_state_dict(saved(0, 110))
    assert (sampler.epoch, sampler.position) == (1, 0)
    sampler.load_state_dict(saved(0, 60))  # some loaders load twice
    assert (sampler.epoch, sampler.position, len(list(sampler))) == (1, 0, 110)


def test_a_loaded_position_outlives_a_state_of_an_older_epoch() -> None:
    [sampler] = ranks_of(1)
    sampler.load_state_dict(saved(2, 60))
    sampler.set_epoch(2)
    sampler.load_state_dict(saved(0, 30))
    assert (sampler.epoch, sampler.position) == (2, 60)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_state_of_the_same_or_a_newer_epoch_wins(epoch: int) -> None:
    [sampler] = ranks_of(1)
    sampler.set_epoch(1)
    sampler.load_state_dict(saved(epoch, 60))
    assert (sampler.epoch, sampler.position) == (epoch, 60)


def test_an_epoch_that_was_iterated_no_longer_wins() -> None:
    [sampler] = ranks_of(1)
    sampler.set_epoch(5)
    next(iter(sampler))
    sampler.load_state_dict(saved(3, 60))  # back to an earlier checkpoint
    assert (sampler.epoch, sampler.position) == (3, 60)


def test_the_loaded_position_is_kept_by_its_own_epoch_only() -> None:
    [sampler] = ranks_of(1)
    sampler.load_state_dict(saved(3, 60))
    sampler.set_epoch(3)
    assert sampler.position == 60
    sampler.set_epoch(4)
    assert sampler.position == 0
    sampler.set_epoch(3)
    assert sampler.position == 0


# -- In loaders --------------------------------------------------------------------------------------------------


def stateful_loader(workers: int, batch_size: int | None = 8) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    data = Numbers(0, 130)
    sampler = WeightedDistributedSampler(data, {(0, 100): 0.5, (100, 130): 2}, seed=4)
    return loaders.StatefulDataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=workers)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in _flat(batch)]


@IGNORE_TORCHDATA
@pytest.mark.parametrize(
    ("workers", "batch_size", "cut"), [(0, 8, 1), (0, 8, 5), (0, None, 33), (2, 8, 5), (2, None, 33)]
)
def test_the_stateful_loader_resumes_with_exactly_the_rest(workers: int, batch_size: int | None, cut: int) -> None:
    loader = stateful_loader(workers, batch_size)
    loader.sampler.set_epoch(3)
    first, state = [], {}
    for done, batch in enumerate(loader, start=1):
        first.append(batch)
        if done == cut:
            state = loader.state_dict()
    whole = numbers(first)
    again = stateful_loader(workers, batch_size)
    again.load_state_dict(state)
    assert numbers(again) == whole[cut * (batch_size or 1) :]
    assert again.sampler.epoch == 3
    assert numbers(again) == whole  # and the iteration after that is whole


@IGNORE_TORCHDATA
@pytest.mark.parametrize("workers", [0, 2])
def test_after_the_state_of_an_epochs_end_set_epoch_gives_the_next_one_whole(workers: int) -> None:
    loader = stateful_loader(workers)
    list(loader)
    state = loader.state_dict()
    loader.sampler.set_epoch(1)
    whole = numbers(loader)
    again = stateful_loader(workers)
    again.load_state_dict(state)  # kept by the loader until iter()
    again.sampler.set_epoch(1)
    assert numbers(again) == whole


@IGNORE_TORCHDATA
@pytest.mark.parametrize("cut", [0, 1, 50, 109, 110])
def test_torchdata_nodes_resume_with_exactly_the_rest(cut: int) -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def load() -> Any:
        return nodes.Loader(nodes.SamplerWrapper(ranks_of(1)[0], initial_epoch=2))

    def epochs(loader: Any) -> list[int]:
        return [*loader, *loader]

    loader, again = load(), load()
    expected = epochs(load())
    list(islice(loader, cut))
    again.load_state_dict(loader.state_dict())
    assert epochs(again)[: 220 - cut] == expected[cut:]


# -- Fingerprints ------------------------------------------------------------------------------------------------


def test_equal_options_have_equal_fingerprints_whatever_their_types() -> None:
    options: list[dict[str, Any]] = [
        {"weights": [1, 2, 1], "seed": 3, "drop_last": True},
        {"weights": np.array([1.0, 2.0, 1.0]), "seed": np.int64(3), "drop_last": np.True_},
        {"weights": np.array([1, 2, 1], np.int32), "seed": np.uint8(3), "drop_last": True},
        {"weights": torch.tensor([1, 2, 1], dtype=torch.float32), "seed": 3, "drop_last": True},
    ]
    assert len({WeightedDistributedSampler(range(3), **each).fingerprint for each in options}) == 1
    ranges: list[dict[Any, Any]] = [
        {(0, 50): 1, (50, 90): 0.5},
        {(np.int64(50), np.int64(90)): np.float32(0.5), (0, 50): np.float64(1)},
    ]
    assert len({WeightedDistributedSampler(range(100), each, epoch_length=50).fingerprint for each in ranges}) == 1


def test_the_fingerprint_is_hex_and_knows_data_options_and_seed() -> None:
    class Marked(Numbers):
        def __init__(self, fingerprint: str) -> None:
            super().__init__(0, 20)
            self.fingerprint = fingerprint

    made = [
        WeightedDistributedSampler(Marked("a"), {(0, 20): 1}),
        WeightedDistributedSampler(Marked("b"), {(0, 20): 1}),
        WeightedDistributedSampler(NamedConcatDataset({"x": Marked("a")}), {(0, 20): 1}),
        WeightedDistributedSampler(range(20), {(0, 20): 1}),
        WeightedDistributedSampler(range(20), {(0, 20): 1}, seed=1),
        WeightedDistributedSampler(range(20), {(0, 20): 1}, drop_last=True),
        WeightedDistributedSampler(range(20), {(0, 20): 2}),
        WeightedDistributedSampler(range(21), {(0, 20): 1}),
    ]
    assert len({sampler.fingerprint for sampler in made}) == len(made)
    assert all(int(sampler.fingerprint, 16) for sampler in made)
    with pytest.raises(ValueError, match="state was saved with other data"):
        made[0].load_state_dict(made[1].state_dict())
    with pytest.raises(ValueError, match=r"state was saved with seed=1, .* construct it with seed=1"):
        made[3].load_state_dict(made[4].state_dict())
    with pytest.raises(ValueError, match=r"state was saved with other options: .* drop_last"):
        made[3].load_state_dict(made[5].state_dict())
    with pytest.raises(ValueError, match=r"state\['fingerprint'\] must be 44 hex digits, got 5"):
        made[3].load_state_dict({**made[3].state_dict(), "fingerprint": 5})


# -- A schedule that changes its future --------------------------------------------------------------------------


def scheduled(*schedule: tuple[int, Any]) -> WeightedDistributedSampler:
    return WeightedDistributedSampler(
        NamedConcatDataset({"a": range(3000), "b": range(500)}), [1, 0], epoch_length=4000, schedule=schedule, seed=2
    )


@pytest.mark.parametrize(
    ("position", "old", "new"),
    [
        (1024, [], [(1024, [1, 1])]),
        (1000, [], [(1024, [1, 1])]),
        (2000, [(500, [0, 1])], [(500, [0, 1]), (2600, [1, 1])]),
        (2000, [(500, [0, 1]), (3000, [1, 3])], [(500, [0, 1])]),
        (4000, [], [(4000, [1, 1])]),
        (0, [(1, [1, 1])], []),
    ],
)
def test_a_resume_accepts_another_future(position: int, old: list[Any], new: list[Any]) -> None:
    before, after = scheduled(*old), scheduled(*new)
    after.load_state_dict(before.state_dict(position=position))
    assert before.take(0, position).tolist() == after.take(0, position).tolist()
    assert list(after) == after.take(position, 4000).tolist()


@pytest.mark.parametrize(
    ("position", "old", "new"),
    [
        (1000, [], [(999, [1, 1])]),
        (1000, [(990, [1, 1])], []),
        (2000, [(500, [0, 1])], [(500, [1, 1])]),
        (2000, [(500, [0, 1])], [(501, [0, 1])]),
        (2000, [(500, [0, 1])], []),
        (4000, [], [(3999, [1, 1])]),
    ],
)
def test_a_resume_refuses_another_past(position: int, old: list[Any], new: list[Any]) -> None:
    before, after = scheduled(*old), scheduled(*new)
    with pytest.raises(ValueError, match="an earlier part of the schedule"):
        after.load_state_dict(before.state_dict(position=position))
