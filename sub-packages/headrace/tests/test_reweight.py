"""Weights of a mixture that change in a run of loaders: nothing is lost or repeated, and the past is known."""

import copy
import json
import pickle
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reweight_worker import BATCHES, LENGTH, MIXTURES, SIZES, WEIGHTS, N, loader, mixture
from runs import run_script, torchrun
from simulated_run import SimulatedRun

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import WeightedDistributedSampler


def named(key: Any) -> Any:
    return key if isinstance(key, int) else (key.index, key.start)


class Run(SimulatedRun):
    """A run whose weights change, and what it delivered, counted with no help of the record."""

    def __init__(self, kind: str, mixed: str, world: int, workers: int = 0) -> None:
        self.kind, self.mixed, self.world, self.workers = kind, mixed, world, workers
        self.steps: list[tuple[int, Counter[Any]]] = []  # of this epoch: the number of a step, and its new samples
        self.schedule: list[tuple[int, Any]] = []
        self.felt: list[tuple[int, int]] = []  # draws, and steps
        self.out = set[int]()
        super().__init__()

    def make(self) -> list[ResumableLoader]:
        ranks = range(self.world)
        return [loader(self.kind, self.mixed, self.workers, num_replicas=self.world, rank=rank) for rank in ranks]

    def delivered_by_step(self, new: list[Any]) -> None:
        new = [named(key) for key in new]
        assert self.out.isdisjoint(self.samples(new))
        self.steps.append((len(self.log) - 1, Counter(new)))

    @staticmethod
    def samples(keys: Any) -> set[int]:
        return {key if isinstance(key, int) else key[0] for key in keys}

    def draws(self, start: int, stop: int) -> Counter[Any]:
        """What the mixture draws in this epoch, by its schedule."""
        planned = mixture(**MIXTURES[self.mixed], schedule=self.schedule)
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

    def check_past(self) -> None:
        state = self.state()
        assert state["batch_sampler"]["step"] == len(self.log)
        alone = loader(self.kind, self.mixed, num_replicas=1, rank=0)
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
        pytest.param(0, 3, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(0, 300, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]),
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


def drawn(schedule: list[tuple[int, Any]], epoch: int = 0) -> Counter[int]:
    """What a mixture draws in an epoch that knew of the changes from its beginning."""
    planned = mixture(schedule=schedule)
    planned.set_epoch(epoch)
    return Counter(planned.take(0, LENGTH).tolist())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("stratified", 2), ("equal", 0)])
def test_two_ranks_change_the_weights_and_one_goes_on(tmp_path: Path, kind: str, workers: int) -> None:
    place, environments = torchrun(2)
    ranks = run_script(
        Path(__file__).parent / "reweight_worker.py", [kind, [0, 0], workers, tmp_path], tmp_path, environments
    )
    del place
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first, second = [json.loads(rank.stdout) for rank in ranks]
    assert first["changed"] == second["changed"]
    steps = [list(step) for step in zip(first["came"], second["came"], strict=True)]
    schedule = [(first["changed"][0], WEIGHTS[0])]
    assert Counter(index for step in steps for batch in step for index in batch) == drawn(schedule)
    alone = loader(kind, num_replicas=1, rank=0)
    alone.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [alone.step(number) for number in range(20)] == steps[:20]
    rest = Counter(index for batch in alone for index in batch)
    assert rest + Counter(index for step in steps[:20] for batch in step for index in batch) == drawn(schedule)


@pytest.mark.slow
def test_other_weights_on_one_rank_are_an_error_on_every_rank(tmp_path: Path) -> None:
    place, environments = torchrun(2)
    script = Path(__file__).parent / "reweight_worker.py"
    ranks = run_script(script, ["stratified", [0, 1], 0, tmp_path], tmp_path, environments)
    del place
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first, second = [json.loads(rank.stdout) for rank in ranks]
    assert first["said"] == second["said"]
    begin = "the ranks differ in what the train loader is to deliver: give every rank the same shards, sizes, options"
    assert first["said"].startswith(begin), "the cure comes first"
    assert "call exclude, skip, reshard and reweight on every rank at the same step (" in first["said"]
    assert "reweight of change 1 of the run: rank 0 has [[" in first["said"]
    assert len(first["said"]) < 700, "equal parts of the states are left out"
    assert len(first["came"]) == 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_an_epoch_that_begins_anew_keeps_the_weights(kind: str) -> None:
    one = loader(kind, num_replicas=1, rank=0)
    for _ in one:
        if one.steps == 10:
            draw, _ = one.reweight(WEIGHTS[0])
            break
    again = Counter(index for batch in one for index in batch)
    assert again == drawn([(draw, WEIGHTS[0])])
    assert [index for number in range(3) for index in one.step(number)[0]] == [
        index for number in range(3) for index in loader(kind, num_replicas=1, rank=0).step(number)[0]
    ], "before the draw nothing is another"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "stratified"])
def test_copies_and_looks_have_the_weights_and_move_nothing(kind: str) -> None:
    one = loader(kind, num_replicas=1, rank=0)
    batches = iter(one)
    came = list(islice(batches, 10))
    draw, step = one.reweight(WEIGHTS[0])
    assert [one.step(number)[0] for number in range(10)] == came
    state = one.state_dict()
    others = [copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
    next(iter(one))
    coming = one.step(step)[0]
    assert one.state_dict() == state
    rest = list(batches)
    assert rest[step - 10] == coming
    assert Counter(index for batch in came + rest for index in batch) == drawn([(draw, WEIGHTS[0])])
    for other in others:
        assert list(other) == rest
        other.reweight(WEIGHTS[1])
    assert one.step(step)[0] == coming, "a copy has a mixture of its own"


@pytest.mark.parametrize("kind", ["equal", "stratified", "sequential"])
def test_a_state_is_small_and_needs_the_weights_of_the_beginning(kind: str) -> None:
    one = loader(kind, num_replicas=1, rank=0)
    list(islice(one, 10))
    before = len(json.dumps(one.state_dict()))
    one.reweight(WEIGHTS[1])
    state = one.state_dict()
    assert len(json.dumps(state)) - before < 130
    order = mixture(schedule=[(2048, WEIGHTS[0])])
    other = loader(kind, num_replicas=1, rank=0)
    changed = (
        DistributedBatchSampler(N, 20, sampler=order)
        if kind == "equal"
        else DistributedSizeAwareBatchSampler(SIZES, sampler=order, **BATCHES[kind])
    )
    told = "weights, semantics, .* a reweight of its run at draw 1,024 .* with the weights of the run's beginning"
    with pytest.raises(ValueError, match=rf"fingerprint.*its data, {told}"):
        changed.load_state_dict(state["batch_sampler"])
    assert order.reweights == [], "a refusal leaves the mixture as it was"
    for damage in ("x", [[1024]], [[1024, ["1/0", 1, 1]]], [[1024, [1, 1]]], [[0, [1, 1, 1]]], [[7, [1, 1, 1]]]):
        run = [
            {**change, "reweight": damage} if "reweight" in change else change
            for change in state["batch_sampler"]["run"]
        ]
        with pytest.raises(ValueError, match=r"it was changed|reweights|differs in|checkpoint has"):
            other.load_state_dict({**state, "batch_sampler": {**state["batch_sampler"], "run": run}})


def test_where_weights_cannot_change_the_error_names_the_cure() -> None:
    def plain(batches: Any) -> ResumableLoader:
        one = ResumableLoader(list(range(N)), batches, collate_fn=list)
        next(iter(one))
        return one

    cure = "sampler must mix sources by weight for that, got NoneType: give a WeightedDistributedSampler"
    for batches in (DistributedBatchSampler(N, 20), DistributedSizeAwareBatchSampler(SIZES, 600)):
        with pytest.raises(TypeError, match=cure):
            plain(batches).reweight(WEIGHTS[0])
    listed = torch.utils.data.BatchSampler(mixture(), 20, drop_last=False)
    with pytest.raises(
        TypeError, match=r"batch_sampler must have reweight\(\) for that, got BatchSampler: use Distributed"
    ):
        plain(listed).reweight(WEIGHTS[0])
    by_tokens = OptimizerStepBatchSampler(SIZES, 600, sampler=mixture(), tokens_per_step=1200)
    with pytest.raises(
        ValueError,
        match=r"reweight\(\) must leave the weights of optimizer steps, got .*: give them to the mix",
    ):
        plain(by_tokens).reweight(WEIGHTS[0])
    fresh = loader("equal", num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="reweight must come after the first samples: construct the sampler with"):
        fresh.reweight(WEIGHTS[0])
    for kind in ("equal", "stratified"):
        one = loader(kind, num_replicas=1, rank=0)
        running = iter(one)
        began = list(islice(running, 5))
        with pytest.raises(ValueError, match="names 'poems'"):
            one.reweight({"poems": 1})
        with pytest.raises(ValueError, match="at least one weight above 0"):
            one.reweight({"web": 0, "books": 0, "code": 0})
        assert began + list(running) == list(loader(kind, num_replicas=1, rank=0)), "the loop goes on"
    scheduled = mixture(schedule=[(9000, WEIGHTS[1])])
    one = plain(DistributedBatchSampler(N, 20, sampler=scheduled))
    told = (
        "position must not lie before the last change of the schedule, at 9000, got 1024: wait until the run is there"
    )
    with pytest.raises(ValueError, match=told):
        one.reweight(WEIGHTS[0])


def test_weights_that_wait_for_the_next_epoch_say_so() -> None:
    sizes = np.random.default_rng(0).integers(5, 60, 6000)

    def of(**options: Any) -> DistributedSizeAwareBatchSampler:
        weights = {(0, 3000): 1, (3000, 6000): 1}
        order = WeightedDistributedSampler(range(6000), weights, num_replicas=1, rank=0)
        made = DistributedSizeAwareBatchSampler(sizes, 2000, sampler=order, num_replicas=1, rank=0, **options)
        next(iter(made))
        return made

    whole = of(strategy="bucketed", cost="padded")
    with pytest.warns(UserWarning, match=r"the weights change in epoch 1, at step \d+ of the run: .* smaller window="):
        draw, _ = whole.reweight({(0, 3000): 1, (3000, 6000): 3})
    assert draw == 6144
    for options in ({"strategy": "sequential"}, {"strategy": "bucketed", "cost": "padded", "window": 1024}):
        draw, step = of(**options).reweight({(0, 3000): 1, (3000, 6000): 3})
        assert draw <= 2048
        assert step > 0
