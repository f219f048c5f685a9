"""Weights of a mixture that change in a run of loaders: nothing is lost or repeated, and the past is known."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

N, LENGTH, SEED = 520, 2500, 4
DATA = NamedConcatDataset({"web": range(400), "books": range(90), "code": range(30)})
SIZES = np.random.default_rng(0).integers(1, 50, N)
TOKENS = SIZES + 3
FIRST = {"web": 5, "books": 3, "code": 2}
WEIGHTS: list[dict[str, Any]] = [
    {"web": 1, "books": 1, "code": 4},
    {"web": 0.7, "books": 0.3, "code": 0},
    {"text": (0.4, {"web": 3, "books": 1}), "code": 0.6},
]
BATCHES: dict[str, dict[str, Any]] = {
    "equal": {"batch_size": 20},
    "stratified": {"max_total_size": 600, "window": 256},
    "packed": {"max_total_size": 600, "strategy": "packed", "window": 300},
    "bucketed": {"max_total_size": 600, "strategy": "bucketed", "cost": "padded", "window": 128},
    "sequential": {"max_total_size": 600, "strategy": "sequential", "batch_size_multiple": 2},
    "one window": {"max_total_size": 600},
    "pieces": {"max_total_size": 600, "max_length": 20, "oversize": "split", "window": 256},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "samples": {},
    "tokens": {"per": "token", "sizes": TOKENS},
    "caps": {"max_passes": {"code": 31}},
}


def mixture(**options: Any) -> WeightedDistributedSampler:
    own: dict[str, Any] = {"epoch_length": LENGTH, "num_replicas": 1, "rank": 0, "seed": SEED}
    return WeightedDistributedSampler(DATA, FIRST, **own | options)


def made(kind: str, mixed: dict[str, Any], workers: int = 0, **ranks: Any) -> ResumableLoader:
    options, order = dict(BATCHES[kind]), mixture(**mixed)
    batches: Any
    if "batch_size" in options:
        batches = DistributedBatchSampler(N, sampler=order, **options, **ranks)
    else:
        batches = DistributedSizeAwareBatchSampler(SIZES, sampler=order, **options, **ranks)
    return ResumableLoader(Indices(), batches, collate_fn=list, num_workers=workers)


class Indices:
    """Samples that are their own indices, and pieces."""

    fingerprint = "indices"

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> Any:
        return key


def named(key: Any) -> Any:
    return key if isinstance(key, int) else (key.index, key.start)


class Run:
    """A run on simulated ranks, and what it delivered, counted with no help of the record."""

    def __init__(self, kind: str, mixed: str, world: int, workers: int = 0) -> None:
        self.kind, self.mixed, self.world, self.workers, self.epoch = kind, MIXTURES[mixed], world, workers, 0
        self.ranks = self.make()
        self.log: list[list[list[Any]]] = []
        self.delivered = Counter[Any]()
        self.steps: list[tuple[int, Counter[Any]]] = []  # of this epoch: the number of a step, and its new samples
        self.schedule: list[tuple[int, Any]] = []
        self.felt: list[tuple[int, int]] = []  # draws, and steps
        self.out = set[int]()

    def make(self) -> list[ResumableLoader]:
        ranks = range(self.world)
        return [made(self.kind, self.mixed, self.workers, num_replicas=self.world, rank=rank) for rank in ranks]

    def state(self) -> dict[str, Any]:
        states = [json.loads(json.dumps(rank.state_dict())) for rank in self.ranks]
        assert all(state == states[0] for state in states)
        return dict(states[0])

    def step(self, iterators: list[Iterator[Any]]) -> bool:
        before = self.state()["batch_sampler"]["position"]
        batches = [next(iterator, None) for iterator in iterators]
        if None in batches:
            assert not any(batches)
            self.end()
            return False
        self.log.append(batches)  # type: ignore[arg-type]  # no None
        new = [named(key) for batch in self.log[-1] for key in batch]
        new = new[: self.state()["batch_sampler"]["position"] - before]  # without repeats
        assert self.out.isdisjoint(self.samples(new))
        self.steps.append((len(self.log) - 1, Counter(new)))
        return True

    @staticmethod
    def samples(keys: Any) -> set[int]:
        return {key if isinstance(key, int) else key[0] for key in keys}

    def draws(self, start: int, stop: int) -> Counter[Any]:
        """What the mixture draws in this epoch, by its schedule."""
        planned = mixture(**self.mixed, schedule=self.schedule)
        planned.set_epoch(self.epoch)
        longest = BATCHES[self.kind].get("max_length", 10**9)
        return Counter(
            (sample, begin) if SIZES[sample] > longest else sample
            for sample in planned.take(start, max(start, stop)).tolist()
            for begin in range(0, SIZES[sample], longest)
        )

    def end(self) -> None:
        delivered, drawn = sum((new for _, new in self.steps), Counter[Any]()), self.draws(0, LENGTH)
        assert not delivered - drawn, "nothing comes again"
        assert self.samples((drawn - delivered).keys()) <= self.out, "nothing is lost"
        for draw, felt in self.felt:
            place = min(max(0, draw - self.epoch * LENGTH), LENGTH)
            before = sum((new for number, new in self.steps if number < felt), Counter[Any]())
            assert not before - self.draws(0, place), "no step before has a later draw"
        self.epoch, self.steps = self.epoch + 1, []
        for rank in self.ranks:
            rank.set_epoch(self.epoch)

    def train(self, before: int, change: tuple[str, Any], after: int) -> None:
        """Deliver some steps, change something while they go on, and deliver more."""
        iterators = [iter(rank) for rank in self.ranks]
        if not all(self.step(iterators) for _ in range(before)):
            return
        what, value = change
        self.forget_steps()
        if what == "exclude":
            self.out |= set(value)
            for rank in self.ranks:
                rank.exclude(value)
        elif what == "reweight":
            self.reweight(WEIGHTS[value])
        if all(self.step(iterators) for _ in range(after)):
            self.kill(self.world)

    def reweight(self, weights: Any) -> None:
        done = self.state()["batch_sampler"]
        if not done["step"]:
            for rank in self.ranks:
                with pytest.raises(ValueError, match="construct the sampler with these weights"):
                    rank.reweight(weights)
            return
        [(draw, step)] = {rank.reweight(weights) for rank in self.ranks}
        assert draw % 1024 == 0
        assert draw >= self.epoch * LENGTH
        assert step >= len(self.log)
        if self.kind in ("equal", "sequential") and not self.out:
            assert draw - (self.epoch * LENGTH + done["position"]) < 1024
        self.schedule = [one for one in self.schedule if one[0] < draw] + [(draw, weights)]
        self.felt.append((draw, step))

    def forget_steps(self) -> None:
        """A change lets coming steps have other numbers."""
        self.felt = [(draw, step) for draw, step in self.felt if step <= len(self.log)]

    def kill(self, world: int) -> None:
        if world != self.world:
            self.forget_steps()
        state, self.world = self.state(), world
        self.close()
        self.ranks = self.make()
        for rank in self.ranks:
            rank.load_state_dict(state)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def check_past(self) -> None:
        state = self.state()
        assert state["batch_sampler"]["step"] == len(self.log)
        alone = made(self.kind, self.mixed, num_replicas=1, rank=0)
        alone.load_state_dict(state)
        for number, batches in enumerate(self.log):
            assert alone.step(number) == batches, number
            assert number % 5 or self.ranks[-1].step(number) == batches, number


CHANGES = st.one_of(
    st.tuples(st.just("reweight"), st.integers(0, len(WEIGHTS) - 1)),
    st.tuples(st.just("reweight"), st.integers(0, len(WEIGHTS) - 1)),
    st.tuples(st.just("exclude"), st.lists(st.integers(0, N - 1), min_size=1, max_size=5)),
)


@pytest.mark.parametrize(
    ("workers", "examples"),
    [
        pytest.param(0, 25, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(0, 600, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
        pytest.param(2, 20, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
    ],
)
def test_whatever_happens_the_epoch_has_the_draws_of_its_schedule(workers: int, examples: int) -> None:
    ranks, some = st.integers(1, 2 if workers else 4), st.integers(0, 40)
    events = st.one_of(
        st.tuples(st.just("train"), some, CHANGES, some),
        st.tuples(st.just("kill"), ranks),
    )

    @settings(max_examples=examples, deadline=None)
    @given(
        st.sampled_from(list(BATCHES)), st.sampled_from(list(MIXTURES)), ranks, st.lists(events, min_size=1, max_size=5)
    )
    def check(kind: str, mixed: str, world: int, events: list[Any]) -> None:
        run = Run(kind, mixed, world, workers)
        for what, *values in events:
            getattr(run, what)(*values)
        run.train(1000, ("", None), 0)
        run.check_past()
        run.close()

    check()
