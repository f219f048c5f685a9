"""Batches of equal count: even over ranks, whole, and resumed at any number of ranks."""

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from indexed_runs import Mesh
from torch.utils.data import DataLoader

from headrace.webdatamodule import DistributedBatchSampler
from headrace.webdatamodule.loading.equal_plan import equal_share, n_steps, step_span

Batches = list[list[int]]


class Listed:
    """An order that has to be listed, another one in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stretched(Listed):
    """The same order, asked for stretches."""

    fingerprint = "stretched"

    @property
    def epoch_length(self) -> int:
        return self.count

    def take(self, start: int, stop: int) -> Any:
        return np.array(list(self), np.int64)[start:stop]

    def __iter__(self) -> Iterator[int]:
        return super().__iter__()


def ranks(count: int, size: int, world: int, **options: Any) -> list[DistributedBatchSampler]:
    return [DistributedBatchSampler(count, size, num_replicas=world, rank=rank, **options) for rank in range(world)]


def flat(batches: list[Batches]) -> list[int]:
    return [sample for own in batches for batch in own for sample in batch]


def step_by_step(batches: list[Batches]) -> list[int]:
    return [sample for step in zip(*batches, strict=True) for batch in step for sample in batch]


counts, sizes, worlds = st.integers(0, 300), st.integers(1, 20), st.integers(1, 9)


@given(counts, sizes, worlds, st.integers(0, 2**64 - 1), st.integers(0, 3), st.booleans())
@example(2**14 + 5, 3, 2, 0, 0, True)  # more than are worked out together
def test_every_sample_once_in_equally_many_batches(
    count: int, size: int, world: int, seed: int, epoch: int, shuffle: bool
) -> None:
    samplers = ranks(count, size, world, seed=seed, shuffle=shuffle)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths = {len(sampler) for sampler in samplers}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [list(sampler) for sampler in samplers]
    assert {len(own) for own in batches} == lengths == {n_steps(count, size, world)}
    assert all(1 <= len(batch) <= size for own in batches for batch in own)
    assert set(flat(batches)) == set(range(count))
    extra = len(flat(batches)) - count
    if caught:  # fewer samples than ranks, and no batch before that could lend some
        assert 0 < extra < world
        assert size == 1 or count < world
        assert all(f"repeats {extra} sample" in str(one.message) for one in caught)
    else:
        assert extra == 0
    if not shuffle and not extra:
        assert step_by_step(batches) == list(range(count))


@pytest.mark.slow
@given(st.data(), st.integers(1, 200), sizes, worlds, worlds, st.sampled_from([None, Listed, Stretched]))
def test_what_is_left_is_the_same_at_any_number_of_ranks(
    data: st.DataObject, count: int, size: int, world: int, then: int, order: type[Listed] | None
) -> None:
    made = order and order(count)
    samplers = ranks(count, size, world, seed=5, sampler=made)
    for sampler in samplers:
        sampler.set_epoch(2)
    steps = data.draw(st.integers(0, len(samplers[0])))
    taken = [[batch for _, batch in zip(range(steps), sampler, strict=False)] for sampler in samplers]
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    others = ranks(count, size, then, seed=5, sampler=order and order(count))
    for sampler in others:
        sampler.load_state_dict(json.loads(json.dumps(states[0])))
    left = [sampler.remaining for sampler in others]
    rest = [list(sampler) for sampler in others]
    assert [len(own) for own in rest] == left == left[:1] * then
    assert set(flat(taken)) | set(flat(rest)) == set(range(count))
    repeated = len(flat(taken)) + len(flat(rest)) - count
    if size > 1 and count >= world and count - len(flat(taken)) >= then:
        assert repeated == 0
    if world == then:
        again = ranks(count, size, world, seed=5, sampler=order and order(count))
        for sampler in again:
            sampler.set_epoch(2)
        assert [a + b for a, b in zip(taken, rest, strict=True)] == [list(sampler) for sampler in again]
    # The next iteration is the whole epoch again.
    assert {len(sampler) for sampler in others} == {n_steps(count, size, then)}


pytestmark = pytest.mark.filterwarnings("ignore:the last step has")


def test_a_stretch_and_a_list_of_one_order_are_one() -> None:
    listed, stretched = (list(DistributedBatchSampler(50, 4, sampler=order(50))) for order in (Listed, Stretched))
    assert listed == stretched


def test_each_epoch_has_an_order_of_its_own_and_keeps_it() -> None:
    sampler = DistributedBatchSampler(40, 4, seed=1)
    epochs = []
    for epoch in (0, 1, 2, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[3] != epochs[1] != epochs[2]
    assert list(DistributedBatchSampler(40, 4, seed=2)) != epochs[0]
    plain = DistributedBatchSampler(40, 4, shuffle=False)
    plain.set_epoch(3)
    assert list(plain) == [list(range(start, start + 4)) for start in range(0, 40, 4)]


def test_a_position_holds_for_its_epoch() -> None:
    sampler = DistributedBatchSampler(10, 2)
    next(iter(sampler))
    saved = sampler.state_dict()
    sampler.load_state_dict(saved)
    assert (len(sampler), sampler.remaining) == (5, 4)
    sampler.set_epoch(0)
    assert (len(sampler), sampler.remaining) == (5, 4)
    sampler.set_epoch(1)
    assert (len(sampler), sampler.remaining) == (5, 5)


def test_a_last_step_of_too_few_samples_names_those_that_come_again() -> None:
    first, second = ranks(3, 1, 2, shuffle=False)
    with pytest.warns(UserWarning, match=r"has 1 sample for 2 ranks, and repeats 1 sample: \[2\]"):
        assert list(first) == [[0], [2]]
    with pytest.warns(UserWarning, match="repeats"):
        assert list(second) == [[1], [2]]


@given(st.integers(0, 500), st.integers(1, 30), worlds)
def test_steps_touch_and_end_where_the_samples_end(end: int, size: int, world: int) -> None:
    spans = [step_span(step, 0, end, size, world) for step in range(n_steps(end, size, world))]
    assert [0, *(high for _, high in spans)] == [*(low for low, _ in spans), end]
    assert all(0 < high - low <= size * world for low, high in spans)
    for low, high in spans:
        stretches = [equal_share(low, high, rank, world) for rank in range(world)]
        assert stretches[0][0] == low
        assert stretches[-1][1] == high
        lengths = [high - low for low, high in stretches]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 99}, "another version of headrace"),
        ({"seed": 8}, "checkpoint has seed=8, got seed=0: use that seed"),
        ({"fingerprint": "x"}, "batch size or budget"),
        ({"position": 41}, "must be an int from 0 to 40"),
        ({"position": -1}, "must be an int from 0 to"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], told: str) -> None:
    sampler = DistributedBatchSampler(40, 4)
    with pytest.raises(ValueError, match=told):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.state_dict() == DistributedBatchSampler(40, 4).state_dict()


@pytest.mark.parametrize("other", [{"n_samples": 41}, {"batch_size": 5}, {"shuffle": False}, {"sampler": Listed(40)}])
def test_a_state_is_of_count_batch_size_and_order(other: dict[str, Any]) -> None:
    options: dict[str, Any] = {"n_samples": 40, "batch_size": 4, **other}
    with pytest.raises(ValueError, match="saved with other samples"):
        DistributedBatchSampler(**options).load_state_dict(DistributedBatchSampler(40, 4).state_dict())


@pytest.mark.parametrize("state", [None, [], "state"])
def test_a_state_that_is_none_is_a_type_error(state: Any) -> None:
    with pytest.raises(TypeError, match="what state_dict"):
        DistributedBatchSampler(4, 2).load_state_dict(state)


@pytest.mark.parametrize("missing", ["version", "seed", "epoch", "position", "fingerprint"])
def test_a_state_that_lacks_something_says_what(missing: str) -> None:
    sampler = DistributedBatchSampler(4, 2)
    with pytest.raises(ValueError, match=missing):
        sampler.load_state_dict({name: value for name, value in sampler.state_dict().items() if name != missing})


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 1.5}, TypeError, "batch_size"),
        ({"num_replicas": 0}, ValueError, "num_replicas"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "rank must be from 0 to 1 with num_replicas=2, got 2"),
        ({"rank": -1}, ValueError, "rank must be an int >= 0, got -1"),
        ({"sampler": iter([1])}, TypeError, "read in every epoch"),
        ({"sampler": 3}, TypeError, "read in every epoch"),
        ({"seed": -1}, ValueError, "seed must be an int >= 0"),
        ({"seed": 2**64}, ValueError, "seed must be an int from 0 to"),
        ({"seed": "x"}, TypeError, "seed"),
    ],
)
def test_arguments_that_are_not_allowed(options: dict[str, Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        DistributedBatchSampler(**{"n_samples": 10, "batch_size": 2, **options})


def test_the_last_batches_are_shared_out() -> None:
    sizes = [[len(batch) for batch in sampler] for sampler in ranks(17, 4, 4)]
    assert np.array(sizes).tolist() == [[2, 2], [2, 2], [2, 2], [2, 3]]


@given(counts, sizes, worlds, st.sampled_from([None, Listed, Stretched]))
def test_a_last_step_that_is_not_whole_is_dropped_when_asked(
    count: int, size: int, world: int, order: type[Listed] | None
) -> None:
    samplers = ranks(count, size, world, drop_last=True, sampler=order and order(count))
    steps = count // (size * world)
    if count and not steps:
        for ask in (list, len):
            with pytest.raises(ValueError, match=r"drop_last=True leaves no batch: .* use a smaller batch_size"):
                ask(samplers[0])
        return
    assert {len(sampler) for sampler in samplers} == {steps}
    batches = [list(sampler) for sampler in samplers]
    assert all(len(batch) == size for own in batches for batch in own)
    assert len(set(flat(batches))) == len(flat(batches)) == steps * size * world


def test_ranks_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    late, meshed = DistributedBatchSampler(40, 4), DistributedBatchSampler(40, 4, mesh=Mesh(2, 1))
    assert (len(late), len(meshed)) == (10, 5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert len(late) == 5
    assert list(late) == list(meshed)
    with pytest.raises(ValueError, match="mesh and rank=1 were both given"):
        DistributedBatchSampler(40, 4, mesh=Mesh(2, 1), rank=1)


def test_a_position_is_that_of_the_latest_iteration() -> None:
    sampler = DistributedBatchSampler(40, 4)
    first = iter(sampler)
    next(first)
    second = iter(sampler)
    next(second)
    taken = next(first)
    assert sampler.state_dict()["position"] == 4
    assert taken == list(DistributedBatchSampler(40, 4))[1]
    len(sampler), sampler.remaining, sampler.fingerprint
    assert next(second) == taken
    assert (sampler.state_dict()["position"], sampler.remaining, len(sampler)) == (8, 8, 10)


def test_a_later_set_epoch_wins_over_an_older_state() -> None:
    sampler = DistributedBatchSampler(40, 4)
    next(iter(sampler))
    state = sampler.state_dict()
    other = DistributedBatchSampler(40, 4)
    other.set_epoch(1)
    other.load_state_dict(state)
    assert (other.epoch, other.remaining) == (1, 10)
    list(other)  # the choice has been iterated
    other.load_state_dict(state)
    assert (other.epoch, other.remaining) == (0, 9)
    other.set_epoch(0)
    assert other.remaining == 9


def test_iterating_again_begins_the_same_epoch_anew() -> None:
    sampler = DistributedBatchSampler(40, 4)
    whole = list(sampler)
    for batch in sampler:
        if batch == whole[3]:
            break
    assert list(sampler) == whole
    generator = torch.Generator().manual_seed(3)
    drawn = DistributedBatchSampler(40, 4, sampler=torch.utils.data.RandomSampler(range(40), generator=generator))
    whole = list(drawn)
    next(iter(drawn))
    assert list(drawn) == whole
    drawn.set_epoch(0)
    assert list(drawn) == whole
    drawn.set_epoch(1)
    drawn.set_epoch(0)
    assert list(drawn) == whole
    next(iter(drawn))
    drawn.load_state_dict(drawn.state_dict())
    assert list(drawn) == whole[1:]
    drawn.set_epoch(1)
    assert list(drawn) != whole


def test_equal_options_have_equal_fingerprints() -> None:
    one = DistributedBatchSampler(40, 4, seed=1)
    same = DistributedBatchSampler(np.int64(40), np.int32(4), seed=np.uint8(1), shuffle=np.True_)  # type: ignore[arg-type]
    assert one.fingerprint == same.fingerprint
    assert int(one.fingerprint, 16) >= 0
    others = [{"seed": 2}, {"drop_last": True}, {"shuffle": False}, {"sampler": Stretched(40)}]
    assert len({DistributedBatchSampler(40, 4, **options).fingerprint for options in others} | {one.fingerprint}) == 5  # type: ignore[arg-type]


def test_a_dataset_in_place_of_its_length_is_not_printed_whole() -> None:
    with pytest.raises(
        TypeError, match=r"n_samples must be an int >= 0, got \[0, 1, .*\] of type list: give len\(dataset\)$"
    ) as caught:
        DistributedBatchSampler(list(range(100_000)), 8)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_refused_position_leaves_a_running_iteration_its_own(epoch: int) -> None:
    batches = DistributedBatchSampler(40, 4)
    running = iter(batches)
    taken = [next(running) for _ in range(2)]
    with pytest.raises(ValueError, match="position must be an int from 0 to 40"):
        batches.load_state_dict({**batches.state_dict(), "epoch": epoch, "position": 41})
    taken.append(next(running))
    state = batches.state_dict()
    assert (state["epoch"], state["position"]) == (0, 12)
    resumed = DistributedBatchSampler(40, 4)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == list(DistributedBatchSampler(40, 4))


@pytest.mark.parametrize("order", [None, Listed, Stretched])
def test_a_copy_while_it_is_iterated_goes_its_own_way(order: type[Listed] | None) -> None:
    batches = DistributedBatchSampler(40, 4, sampler=None if order is None else order(40))
    whole = list(batches)
    running = iter(batches)
    assert [next(running) for _ in range(3)] == whole[:3]
    copied = copy.deepcopy(batches)
    assert copied.state_dict() == batches.state_dict()
    copied.load_state_dict(copied.state_dict())
    assert list(copied) == whole[3:]
    assert batches.state_dict()["position"] == 12
    assert list(running) == whole[3:]


def test_a_copy_of_a_seeded_random_order_while_it_is_iterated() -> None:
    order = torch.utils.data.RandomSampler(range(40), generator=torch.Generator().manual_seed(3))
    batches = DistributedBatchSampler(40, 4, sampler=order)
    running = iter(batches)
    next(running)
    assert list(copy.deepcopy(batches)) == list(running)


def test_as_the_sampler_of_a_data_loader_it_is_refused() -> None:
    rows = torch.arange(40)
    batches = DistributedBatchSampler(40, 4, num_replicas=1, rank=0)
    with pytest.raises(TypeError, match=r"got a DistributedBatchSampler, .*: give it as batch_sampler="):
        list(DataLoader(rows, sampler=batches))  # type: ignore[arg-type]  # a tensor has what a dataset needs
    whole: Any = DataLoader(rows, sampler=batches, batch_size=None)  # type: ignore[arg-type]
    assert sum(map(len, whole)) == 40
