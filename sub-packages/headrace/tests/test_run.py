"""A run of loaders over batches by size, changed in its middle: nothing is lost or repeated, and the past is known."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import SimulatedRun

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.webdatamodule import ResumableLoader

SIZES = np.random.default_rng(0).integers(1, 50, 400)
OPTIONS: dict[str, list[Any]] = {
    "max_total_size": [120, 180, 300],
    "strategy": ["stratified", "packed", "sequential", "bucketed"],
    "max_items": [None, 9],
    "tail": ["split", "pad"],
}


class Run(SimulatedRun):
    """A run whose options change, and what it delivered, counted with no help of the record."""

    def __init__(self, workers: int, world: int, strategy: str) -> None:
        self.n, self.workers, self.world = 300, workers, world
        self.options: dict[str, Any] = {"max_total_size": 180, "strategy": strategy}
        self.delivered, self.out, self.may_miss = Counter[int](), set[int](), set[int]()
        super().__init__()

    def make(self) -> list[ResumableLoader]:
        own = [
            DistributedSizeAwareBatchSampler(
                SIZES[: self.n], cost="sum", num_replicas=self.world, rank=rank, **self.options
            )
            for rank in range(self.world)
        ]
        samples = list(range(self.n))
        return [ResumableLoader(samples, one, collate_fn=list, num_workers=self.workers) for one in own]

    def delivered_by_step(self, new: list[int]) -> None:
        assert self.out.isdisjoint(index for batch in self.log[-1] for index in batch)
        self.delivered.update(new)

    def end(self) -> None:
        assert max(self.delivered.values(), default=0) <= 1
        assert not set(range(self.n)) - self.delivered.keys() - self.may_miss
        self.epoch += 1
        self.delivered, self.may_miss = Counter(), set(self.out)
        for rank in self.ranks:
            rank.set_epoch(self.epoch)

    def train(self, before: int, change: tuple[str, Any], after: int) -> None:
        """Deliver some steps, change something while they go on, and deliver more."""
        iterators = [iter(rank) for rank in self.ranks]
        if not all(self.step(iterators) for _ in range(before)):
            return
        what, value = change
        if what == "exclude":
            self.out |= set(value)
            self.may_miss |= set(value)
            for rank in self.ranks:
                rank.exclude(value)
        elif what == "skip":
            skipped = [rank.skip(value).tolist() for rank in self.ranks]
            assert all(one == skipped[0] for one in skipped)
            self.may_miss |= set(skipped[0])
        if all(self.step(iterators) for _ in range(after)):
            self.kill(self.world, {}, 0)

    def kill(self, world: int, changed: dict[str, Any], grow: int) -> None:
        state, accept = self.state(), {name for name, value in changed.items() if self.options.get(name) != value}
        accept |= {"data"} if grow else set()
        self.world, self.n, self.options = world, self.n + grow, self.options | changed
        self.close()
        self.ranks = self.make()
        for rank in self.ranks:
            rank.load_state_dict(state, accept=accept)


CHANGES = st.one_of(
    st.tuples(st.just("exclude"), st.lists(st.integers(0, 299), min_size=1, max_size=8)),
    st.tuples(st.just("skip"), st.integers(1, 5)),
    st.tuples(st.just(""), st.none()),
)
OTHERS = st.dictionaries(st.sampled_from(list(OPTIONS)), st.integers(0, 3), max_size=2)


@pytest.mark.parametrize(
    ("workers", "examples"),
    [
        pytest.param(0, 5, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(0, 400, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
        pytest.param(2, 40, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
    ],
)
@pytest.mark.filterwarnings("ignore:successive steps hold")
def test_whatever_happens_to_a_loop_over_batches_by_size(workers: int, examples: int) -> None:
    ranks, some = st.integers(1, 2 if workers else 4), st.integers(1, 15)
    events = st.one_of(
        st.tuples(st.just("train"), some, CHANGES, some),
        st.tuples(st.just("kill"), ranks, OTHERS, st.sampled_from([0, 0, 7, 30])),
    )

    @settings(max_examples=examples, deadline=None)
    @given(st.sampled_from(OPTIONS["strategy"]), ranks, st.lists(events, min_size=1, max_size=6))
    def check(strategy: str, world: int, events: list[Any]) -> None:
        run = Run(workers, world, strategy)
        for what, *values in events:
            if what == "train":
                run.train(*values)
            else:
                world, places, grow = values
                changed = {name: OPTIONS[name][place % len(OPTIONS[name])] for name, place in places.items()}
                run.kill(world, changed, min(grow, len(SIZES) - run.n))
        run.train(1000, ("", None), 0)
        assert run.state()["batch_sampler"]["step"] == len(run.log)
        for number, batches in enumerate(run.log):
            assert run.ranks[-1].step(number) == batches, number
        run.close()

    check()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_continues_unchanged_where_the_batch_sampler_allows_no_change(workers: int) -> None:
    def loader(workers: int) -> ResumableLoader:
        batches = OptimizerStepBatchSampler(SIZES, 180, tokens_per_step=1000)
        return ResumableLoader(list(range(len(SIZES))), batches, collate_fn=list, num_workers=workers)

    one, came = loader(workers), []
    for batch in one:
        came.append(batch)
        if one.steps in (3, 8):
            with pytest.raises(ValueError, match="allows changes at the beginning of an epoch only"):
                one.exclude([5])
            with pytest.raises(ValueError, match="must begin and end between two optimizer steps"):
                one.skip(2)
    assert came == list(loader(0))
    one.set_epoch(1)
    one.exclude([5])
    assert sorted(index for batch in one for index in batch) == [i for i in range(len(SIZES)) if i != 5]
    one.close()
