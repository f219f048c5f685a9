"""When a node needs its samples next, against all epochs listed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.webdatamodule import DistributedBatchSampler
from headrace.webdatamodule.loading import next_use
from headrace.webdatamodule.loading.batch_plans import planned_uses_of
from headrace.webdatamodule.loading.next_use import ranks_of_node
from headrace.webdatamodule.loading.permutation import SHORT, Shuffle

HORIZON = 8
RANKS = {"nodes": st.integers(2, 5), "local": st.integers(1, 3), "node": st.integers(0, 4)}


@pytest.mark.parametrize("size", [1, 2, 10, SHORT - 1, SHORT, SHORT + 1, 3 * SHORT + 17])
def test_places_are_where_the_numbers_are(size: int) -> None:
    shuffle = Shuffle(size, 5, 1)
    whole = shuffle.take(0, size)
    assert np.array_equal(shuffle.places(whole), np.arange(size))
    some = np.array([size // 2, 0, size - 1, size // 2])
    assert np.array_equal(whole[shuffle.places(some)], some)


def batches(sampler: DistributedBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@settings(max_examples=80, deadline=None)
@given(
    steps=st.integers(1, 9),
    rest=st.integers(0, 100),
    batch=st.integers(1, 7),
    **RANKS,
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
    window=st.sampled_from([1, 3, 32]),
    left_out=st.sets(st.integers(0, 20), max_size=5),
)
def test_next_uses_are_those_of_the_listed_epochs(
    steps: int, rest: int, batch: int, nodes: int, local: int, node: int, shuffle: bool, seed: int, epoch: int,
    window: int, left_out: set[int],
) -> None:  # fmt: skip
    """In epochs of full steps; where the last ones share what is left, a use is told a little too early or late."""
    node, world = node % nodes, nodes * local
    rest %= batch * world
    left_out = {one for one in left_out if one < steps * batch * world}
    n = steps * batch * world + rest + len(left_out)

    def of_rank(rank: int) -> DistributedBatchSampler:
        made = DistributedBatchSampler(
            n, batch, shuffle=shuffle, drop_last=rest > 0, num_replicas=world, rank=rank, seed=seed
        )
        made.exclude(left_out)
        return made

    ranks = [of_rank(node * local + one) for one in range(local)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        patch.delenv("WORLD_SIZE", raising=False)
        patch.setattr(next_use, "_LEAST", window)
        uses = ranks[0].next_uses()
    assert uses is not None
    later = {  # sample -> the window of the first later step in which this node gets it
        sample: (number * steps + step) // window
        for number in range(epoch + min(HORIZON, nodes), epoch, -1)
        for rank in ranks
        for step, samples in enumerate(batches(rank, number))
        for sample in samples
    }
    for rank in ranks:
        for step, samples in enumerate(batches(rank, epoch)):
            found = uses.of(epoch, step, samples)
            assert found.now == (epoch * steps + step) // window
            assert found.windows == {sample: later[sample] for sample in samples if sample in later}


@pytest.mark.parametrize(
    ("given_", "world", "rank", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 9, range(8, 12)),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 16, 15, range(12, 16)),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 16, 3, range(8)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 6, 5, range(4, 6)),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 4, 1, range(2)),  # four processes hold a model
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32"}, 2, 1, range(1, 2)),  # a model on two nodes
        ({"LOCAL_WORLD_SIZE": "8"}, 8, 7, range(8)),
        ({"LOCAL_WORLD_SIZE": "4"}, 6, 5, range(4, 6)),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "10"}, 3, 1, None),
        ({"LOCAL_WORLD_SIZE": "0"}, 4, 1, None),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 16, 1, None),
        ({}, 16, 1, None),
    ],
)
def test_ranks_of_a_node_are_what_the_launcher_says(
    given_: dict[str, str], world: int, rank: int, expected: range | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given_.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_node(world, rank) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: DistributedBatchSampler(40, 4, num_replicas=4, rank=1),  # the node gets all samples
        lambda: DistributedBatchSampler(40, 4, num_replicas=8, rank=1, sampler=range(40)),
        lambda: DistributedBatchSampler(0, 4, num_replicas=8, rank=1),
    ],
)
def test_where_no_choice_is_better_no_next_use_is_told(
    make: Callable[[], DistributedBatchSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert make().next_uses() is None


class Planned:
    """A batch sampler that plans epochs, of different numbers of batches, as those of other packages do."""

    fingerprint = "planned"

    def __init__(self, n: int, world: int, rank: int, seed: int = 0) -> None:
        self.sizes, self._world, self._rank, self._seed = np.ones(n), world, rank, seed

    def plan(self, epoch: int) -> SimpleNamespace:
        chance = np.random.default_rng((self._seed, epoch))
        n = len(self.sizes)
        cuts = chance.choice(np.arange(1, n), int(chance.integers(0, n)), replace=False)
        return SimpleNamespace(indices=chance.permutation(n), offsets=np.sort([0, *cuts.tolist(), n]))

    def batches(self, epoch: int, rank: int) -> list[list[int]]:
        plan = self.plan(epoch)
        every = [part.tolist() for part in np.split(plan.indices, plan.offsets[1:-1])]
        return every[rank :: self._world]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 300),
    **RANKS,
    epoch=st.integers(0, 3),
    least=st.sampled_from([1, 3, 32]),
    seed=st.integers(0, 3),
)
def test_next_uses_of_planned_epochs_are_those_of_the_listed_batches(
    n: int, nodes: int, local: int, node: int, epoch: int, least: int, seed: int
) -> None:
    node, world = node % nodes, nodes * local
    sampler = Planned(n, world, node * local, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        patch.delenv("WORLD_SIZE", raising=False)
        patch.setattr(next_use, "_LEAST", least)
        uses = planned_uses_of(sampler, world, node * local)
        assert uses is not None
        assert uses.prepare(epoch)
        later = dict[int, tuple[int, float]]()  # sample -> the first later epoch in which this node gets it, and where
        for number in range(epoch + min(HORIZON, nodes), epoch, -1):
            steps = -(-len(sampler.plan(number).offsets[1:]) // world)
            for rank in range(node * local, node * local + local):
                for step, samples in enumerate(sampler.batches(number, rank)):
                    later.update(dict.fromkeys(samples, (number, step / steps)))
        for step, samples in enumerate(sampler.batches(epoch, node * local)):
            found = uses.of(epoch, step, samples)
            assert set(found.windows) == {sample for sample in samples if sample in later}
            for sample, window in found.windows.items():
                number, place = later[sample]
                assert number * 64 <= window <= number * 64 + int(64 * place)
            steps = -(-len(sampler.plan(epoch).offsets[1:]) // world)
            # What is needed in this step, or up to `least` steps before it, is not taken for passed.
            earlier = max(0, step - least) if least > 1 else step
            assert found.now - 1 <= epoch * 64 + 64 * earlier // steps


def test_plans_are_not_asked_for_where_they_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert planned_uses_of(Planned(40, 4, 0), 4, 0) is None  # a single node
    assert planned_uses_of(Planned(40, 8, 0), 8, 0) is not None
    assert planned_uses_of(Bare(), 8, 0) is None
    monkeypatch.setattr(next_use, "_MOST_PLANNED", 30)
    assert planned_uses_of(Planned(40, 8, 0), 8, 0) is None


class Bare:
    """One that plans, and does not say that its sizes mean what those of headrace mean."""

    sizes = np.ones(40)

    def plan(self, epoch: int) -> SimpleNamespace:
        return Planned(40, 8, 0).plan(epoch)


@pytest.mark.parametrize("plan", [lambda _: None, lambda epoch: [[epoch]], lambda epoch: int(f"epoch {epoch}")])
def test_a_plan_that_cannot_be_used_is_left_alone(plan: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    sampler = Planned(40, 8, 0)
    monkeypatch.setattr(sampler, "plan", plan)
    uses = planned_uses_of(sampler, 8, 0)
    assert uses is not None
    assert not uses.prepare(0)


def test_the_plans_of_later_epochs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sampler, asked = Planned(40, 8, 0), list[int]()
    plan = sampler.plan

    def asking(epoch: int) -> SimpleNamespace:
        asked.append(epoch)
        return plan(epoch)

    monkeypatch.setattr(sampler, "plan", asking)
    uses = planned_uses_of(sampler, 8, 0)
    assert uses is not None
    for epoch, expected in ((0, [4, 3, 2, 1, 0]), (1, [5]), (1, []), (4, [8, 7, 6]), (3, [3])):
        asked.clear()
        assert uses.prepare(epoch)
        uses.of(epoch, 0, [1, 2])
        assert asked == expected
