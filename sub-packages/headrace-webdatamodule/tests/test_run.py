"""The record of a run: changes in the middle of it lose and repeat no sample, and every past step is known."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader

OPTIONS: dict[str, list[Any]] = {"batch_size": [2, 5, 9], "drop_last": [False, True], "shuffle": [True, False]}
MOST = 400
pytestmark = pytest.mark.filterwarnings("ignore:the last step has", "ignore:the train loader has loaded a state")


class Listed:
    """Somebody's order, another one in each epoch; some samples come in none of them."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(300)[:280].tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Sliced(Listed):
    """The same order, of which slices are taken."""

    fingerprint = "sliced"
    epoch_length = 280

    def take(self, start: int, stop: int) -> Any:
        return np.array(list(self), np.int64)[start:stop]


class Run:
    """A run on simulated ranks, and what it delivered, counted with no help of the record."""

    def __init__(self, n: int, world: int, **options: Any) -> None:
        self.n, self.world, self.options = n, world, {"batch_size": 5} | options
        self.ranks: list[Any] = self.make()
        self.log: list[list[list[int]]] = []
        self.epoch = 0
        self.delivered: list[Counter[int]] = [Counter()]
        self.out: set[int] = set()
        self.may_miss: set[int] = set()  # in this epoch: excluded, skipped, or new since

    def batches(self, rank: int) -> DistributedBatchSampler:
        order = self.options.get("sampler")
        own = {**self.options, "sampler": order and order()}
        return DistributedBatchSampler(self.n, num_replicas=self.world, rank=rank, **own)

    def make(self) -> list[Any]:
        return [self.batches(rank) for rank in range(self.world)]

    def position(self) -> int:
        return int(self.ranks[0].state_dict()["position"])

    def train(self, steps: int) -> None:
        """Deliver so many steps of this epoch; at its end, check it and go to the next one."""
        iterators = [iter(rank) for rank in self.ranks]
        for _ in range(steps):
            if not self.step(iterators):
                self.end()
                return
        self.resume(self.ranks[0].state_dict())

    def during(self, what: str, value: Any, before: int, after: int) -> None:
        """Deliver some steps, change something while they go on, and deliver more."""
        iterators = [iter(rank) for rank in self.ranks]
        if not all(self.step(iterators) for _ in range(before)):
            self.end()
            return
        first = iterators[0]
        getattr(self, what)(value)
        if what == "reshard":
            iterators = [first, *(iter(rank) for rank in self.ranks[1:])]
        if not all(self.step(iterators) for _ in range(after)):
            self.end()
            return
        self.resume(self.ranks[0].state_dict())

    def step(self, iterators: list[Iterator[Any]]) -> bool:
        before = self.position()
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert not any(batches)
            return False
        self.log.append([[int(index) for index in batch] for batch in batches])  # type: ignore[union-attr]
        new = [index for batch in self.log[-1] for index in batch]
        assert self.out.isdisjoint(new)
        own = new[: self.position() - before] if len(new) >= self.world else new  # without what it repeats
        assert len(set(own)) == len(own)
        self.delivered[-1].update(own)
        return True

    def end(self) -> None:
        counts = self.delivered[-1]
        assert max(counts.values(), default=0) <= 1
        whole = set(range(self.n)) if "sampler" not in self.options else set(self.listed())
        if not self.options.get("drop_last"):
            assert not whole - counts.keys() - self.may_miss
        self.epoch += 1
        self.delivered.append(Counter())
        self.may_miss = set(self.out)
        for rank in self.ranks:
            rank.set_epoch(self.epoch)

    def listed(self) -> list[int]:
        order: Listed = self.options["sampler"]()
        order.set_epoch(self.epoch)
        return list(order)

    def resume(self, state: dict[str, Any], accept: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.close()
        self.ranks = self.make()
        for rank in self.ranks:
            rank.load_state_dict(json.loads(json.dumps(state)), accept=accept)

    def close(self) -> None:
        pass

    def kill(self, world: int, changed: dict[str, Any], grow: int) -> None:
        states = [rank.state_dict() for rank in self.ranks]
        assert all(state == states[0] for state in states)
        self.world = world
        accept = {name for name, value in changed.items() if self.options.get(name) != value}
        if grow:
            accept.add("data")
            self.n += grow
        self.options |= changed
        self.resume(states[0], accept)

    def exclude(self, indices: list[int]) -> None:
        self.out |= set(indices)
        self.may_miss |= set(indices)
        for rank in self.ranks:
            rank.exclude(indices)
            assert set(rank.excluded_indices.tolist()) == self.out

    def skip(self, steps: int) -> None:
        skipped = [rank.skip(steps).tolist() for rank in self.ranks]
        assert all(one == skipped[0] for one in skipped)
        assert not self.delivered[-1].keys() & set(skipped[0])
        self.may_miss |= set(skipped[0])

    def reshard(self, world: int) -> None:
        state = self.ranks[0].state_dict()
        self.world = world
        first, *others = self.ranks
        self.ranks = others
        self.close()
        self.ranks = [first, *self.make()[1:]]
        for rank, one in enumerate(self.ranks):
            if rank:
                one.load_state_dict(state)
            else:
                one.reshard(world, 0)

    def apply(self, events: list[tuple[str, Any]]) -> None:
        for what, value in events:
            if what == "train":
                self.train(value)
            elif what == "during":
                self.during(*value)
            elif what == "kill":
                self.kill(value, {}, 0)
            elif what == "change":
                changed = {name: OPTIONS[name][place % len(OPTIONS[name])] for name, place in value.items()}
                if "sampler" in self.options:
                    changed.pop("shuffle", None)
                self.kill(self.world, changed, 0)
            elif what == "grow":
                if "sampler" not in self.options:
                    self.kill(self.world, {}, min(value, MOST - self.n))
            else:
                getattr(self, what)(value)
        self.train(1000)
        self.check_past()
        self.close()

    def check_past(self) -> None:
        rank = self.ranks[-1]
        assert self.numbered() == len(self.log)
        for number, batches in enumerate(self.log):
            assert rank.step(number) == batches, number
        coming = rank.step(len(self.log))
        self.step([iter(one) for one in self.ranks])
        assert coming == self.log[-1]

    def numbered(self) -> int:
        return int(self.ranks[-1].state_dict()["step"])


class RunOfLoaders(Run):
    """The same through loaders, whose workers read ahead."""

    def __init__(self, n: int, world: int, workers: int, **options: Any) -> None:
        self.workers = workers
        super().__init__(n, world, **options)

    def make(self) -> list[Any]:
        return [
            ResumableLoader(list(range(self.n)), self.batches(rank), collate_fn=list, num_workers=self.workers)
            for rank in range(self.world)
        ]

    def position(self) -> int:
        return int(self.ranks[0].state_dict()["batch_sampler"]["position"])

    def numbered(self) -> int:
        return int(self.ranks[-1].state_dict()["batch_sampler"]["step"])

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


ORDERS = st.sampled_from([None, None, Listed, Sliced])
EXCLUDED = st.lists(st.integers(0, 299), min_size=1, max_size=8)


def events(most_ranks: int) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """What may happen to a run, one thing after another."""
    ranks, some = st.integers(1, most_ranks), st.integers(1, 20)
    change = st.dictionaries(st.sampled_from(list(OPTIONS)), st.integers(0, 3), max_size=2)
    changes = {"exclude": EXCLUDED, "skip": st.integers(1, 5), "reshard": ranks}
    plain = {"train": st.integers(1, 40), "kill": ranks, "change": change, "grow": st.integers(1, 60), **changes}
    meanwhile = st.one_of([st.tuples(st.just(name), values, some, some) for name, values in changes.items()])
    every = {**plain, "during": meanwhile}
    return st.lists(
        st.one_of([st.tuples(st.just(name), values) for name, values in every.items()]), min_size=1, max_size=12
    )


@pytest.mark.parametrize("examples", [25, pytest.param(1500, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])])
@pytest.mark.slow
def test_whatever_happens_each_sample_comes_once_and_the_past_is_known(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(ORDERS, st.integers(1, 5), events(5))
    def check(order: type[Listed] | None, world: int, events: list[tuple[str, Any]]) -> None:
        Run(300, world, **({} if order is None else {"sampler": order})).apply(events)

    check()


@pytest.mark.parametrize(
    ("workers", "examples"),
    [
        (0, 15),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(0, 600, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
        pytest.param(2, 60, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
    ],
)
@pytest.mark.slow
def test_a_loop_loses_and_repeats_nothing_whatever_happens(workers: int, examples: int) -> None:
    most_ranks = 2 if workers else 4

    @settings(max_examples=examples, deadline=None)
    @given(ORDERS, st.integers(1, most_ranks), events(most_ranks))
    def check(order: type[Listed] | None, world: int, events: list[tuple[str, Any]]) -> None:
        RunOfLoaders(300, world, workers, **({} if order is None else {"sampler": order})).apply(events)

    check()
