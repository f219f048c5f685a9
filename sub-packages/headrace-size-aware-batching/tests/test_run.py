"""The record of a run: changes in the middle of it lose and repeat no sample, and every past step is known."""

import copy
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from doors import sampler_with
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.size_aware_batching._shared.state_mismatch import StateMismatchError
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.strategies import BatchLists

SIZES = np.random.default_rng(0).integers(1, 50, 700)
OPTIONS: dict[str, list[Any]] = {
    "max_total_size": [120, 180, 300],
    "strategy": ["stratified", "packed", "sequential", "bucketed"],
    "max_items": [None, 9],
    "tail": ["split", "pad", "drop"],
    "window": [None, 64],
    "balanced_ranks": [None, 1, 6],
    "extra_per_sample": [None, 2, 5],
}


def named(key: Any) -> Any:
    return key if isinstance(key, int) else (key.index, key.start)


class Order:
    """An order of another library, read in slices: every sample once, some epochs in another order."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def take(self, start: int, stop: int) -> Any:
        return np.random.default_rng(self.epoch).permutation(self.n)[start:stop]


class Listed(Order):
    """The same, read as a whole."""

    take = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(self.n).tolist())


del Listed.take


class Run:
    """A run on simulated ranks, and what it delivered, counted with no help of the record."""

    def __init__(self, n: int, world: int, order: type[Order] | None = None, **options: Any) -> None:
        self.order, self.n, self.world = order, n, world
        self.options: dict[str, Any] = {"max_total_size": 180, "cost": "sum", **options}
        self.ranks = self.make()
        self.log: list[list[list[Any]]] = []
        self.epoch = 0
        self.delivered: list[Counter[Any]] = [Counter()]
        self.out: set[int] = set()
        self.may_miss: set[Any] = set()  # in this epoch: excluded or skipped

    def keys(self, samples: Iterable[int]) -> set[Any]:
        """What batches hold of these samples: they, or their pieces."""
        longest = self.options.get("max_length", 10**9)
        return {
            (sample, start) if SIZES[sample] > longest else sample
            for sample in samples
            for start in range(0, SIZES[sample], longest)
        }

    def make(self) -> list[DistributedSizeAwareBatchSampler]:
        return [
            DistributedSizeAwareBatchSampler(
                SIZES[: self.n],
                num_replicas=self.world,
                rank=rank,
                sampler=None if self.order is None else self.order(self.n),  # type: ignore[arg-type]  # has take
                **self.options,
            )
            for rank in range(self.world)
        ]

    def train(self, steps: int) -> None:
        """Deliver so many steps of this epoch; at its end, check it and go to the next one."""
        before = self.ranks[0].state_dict()
        iterators = [iter(rank) for rank in self.ranks]
        for _ in range(steps):
            batches = [batch for iterator in iterators for batch in islice(iterator, 1)]
            if not batches:
                self.end()
                return
            assert len(batches) == self.world
            self.log.append(batches)
            position, new = self.ranks[0].state_dict()["position"], [named(key) for batch in batches for key in batch]
            own = new[: position - before["position"]]  # without what the last step repeats
            assert len(set(own)) == len(own)
            assert self.keys(self.out).isdisjoint(new)
            self.delivered[-1].update(own)
            before = self.ranks[0].state_dict()
        self.resume(before)

    def end(self) -> None:
        counts = self.delivered[-1]
        assert max(counts.values(), default=0) <= 1
        missing = self.keys(range(self.n)) - counts.keys() - self.may_miss
        if self.options.get("tail") != "drop":
            assert not missing
        self.epoch += 1
        self.delivered.append(Counter())
        self.may_miss = self.keys(self.out)
        for rank in self.ranks:
            rank.set_epoch(self.epoch)

    def resume(self, state: dict[str, Any], accept: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.ranks = self.make()
        for rank in self.ranks:
            rank.load_state_dict(json.loads(json.dumps(state)), accept=accept)

    def kill(self, world: int, changed: dict[str, Any], grow: int) -> None:
        states = [rank.state_dict() for rank in self.ranks]
        assert all(state == states[0] for state in states)
        self.world = world
        if (self.options | changed).get("strategy") == "sequential":  # which has none
            changed = changed | {"balanced_ranks": None}
        accept = {name for name, value in changed.items() if self.options.get(name) != value}
        if grow:
            accept.add("data")
            self.n += grow
        self.options |= changed
        self.resume(states[0], accept)

    def exclude(self, indices: list[int]) -> None:
        self.out |= set(indices)
        self.may_miss |= self.keys(indices)
        for rank in self.ranks:
            rank.exclude(indices)

    def skip(self, steps: int) -> None:
        skipped = [rank.skip(steps).tolist() for rank in self.ranks]
        assert all(one == skipped[0] for one in skipped)
        if "max_length" not in self.options:
            assert not self.delivered[-1].keys() & set(skipped[0])
        self.may_miss |= self.keys(skipped[0])

    def check_past(self) -> None:
        rank = self.ranks[-1]
        assert rank.state_dict()["step"] == len(self.log)
        for number, batches in enumerate(self.log):
            assert rank.step(number) == batches, number


ORDERS = st.sampled_from([None, None, Order, Listed])
CUT = {"oversize": "split", "max_length": 20}
STRATEGIES = st.sampled_from(OPTIONS["strategy"])
EVENTS = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 40)),
    st.tuples(st.just("kill"), st.integers(1, 5)),
    st.tuples(st.just("change"), st.dictionaries(st.sampled_from(list(OPTIONS)), st.integers(0, 3), max_size=2)),
    st.tuples(st.just("grow"), st.integers(1, 60)),
    st.tuples(st.just("exclude"), st.lists(st.integers(0, 299), min_size=1, max_size=8)),
    st.tuples(st.just("skip"), st.integers(1, 5)),
    st.tuples(st.just("reshard"), st.integers(1, 5)),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:successive steps hold")
@pytest.mark.parametrize("examples", [20, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])])
def test_whatever_happens_each_sample_comes_once_and_the_past_is_known(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        STRATEGIES, ORDERS, st.sampled_from([{}, {}, CUT]), st.integers(1, 5), st.lists(EVENTS, min_size=1, max_size=12)
    )
    def check(
        strategy: str, order: type[Order] | None, cut: dict[str, Any], world: int, events: list[tuple[str, Any]]
    ) -> None:
        run = Run(300, world, order, strategy=strategy, **cut)
        for what, value in events:
            if what == "train":
                run.train(value)
            elif what == "kill":
                run.kill(value, {}, 0)
            elif what == "change":
                changed = {name: OPTIONS[name][place % len(OPTIONS[name])] for name, place in value.items()}
                if cut:  # other pieces come with the next epoch only
                    changed.pop("extra_per_sample", None)
                run.kill(run.world, changed, 0)
            elif what == "grow" and order is None:
                run.kill(run.world, {}, min(value, len(SIZES) - run.n))
            elif what == "exclude":
                run.exclude(value)
            elif what == "skip":
                run.skip(value)
            elif what == "reshard":
                state = run.ranks[0].state_dict()
                run.world = value
                run.ranks = run.ranks[:1] + run.make()[1:]
                for rank, sampler in enumerate(run.ranks):
                    if rank:
                        sampler.load_state_dict(state)
                    else:
                        sampler.reshard(value, 0)
        run.train(1000)
        run.check_past()

    check()


def made(**options: Any) -> Any:
    sizes = options.pop("sizes", SIZES)
    usual: dict[str, Any] = {"max_total_size": 180, "cost": "sum", "num_replicas": 2, "rank": 1}
    return sampler_with(sizes, **usual | options)


def part_way(steps: int = 7, **options: Any) -> Any:
    sampler = made(**options)
    list(islice(sampler, steps))
    return sampler


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OPTIONS["strategy"])
@pytest.mark.parametrize("order", [None, Order])
def test_coming_steps_are_those_that_come(strategy: str, order: type[Order] | None) -> None:
    def samplers() -> list[DistributedSizeAwareBatchSampler]:
        one = None if order is None else order(len(SIZES))
        return [made(rank=rank, strategy=strategy, sampler=one) for rank in range(2)]

    told, (first, second) = samplers()[0], samplers()
    number = 0
    for epoch in range(3):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        for batches in zip(first, second, strict=True):
            assert told.step(number) == list(batches)
            assert told.step(number, rank=1) == batches[1]
            number += 1
    assert told.state_dict()["step"] == 0, "to ask moves nothing"
    assert first.step(number - 1) == told.step(number - 1)
    if order is None:
        others = [made(num_replicas=5, rank=rank, strategy=strategy) for rank in range(5)]
        assert told.step(3, num_replicas=5) == [next(islice(other, 3, None)) for other in others]


def test_a_running_iteration_goes_on_with_the_rest() -> None:
    sampler = made(num_replicas=1, rank=0)
    delivered: list[int] = []
    for number, batch in enumerate(sampler):
        delivered += batch
        if number == 5:
            left_out = sorted(set(range(len(SIZES))) - set(delivered))[:50]
            sampler.exclude(left_out)
    assert sorted(delivered + left_out) == list(range(len(SIZES)))
    assert sampler.excluded_indices.tolist() == left_out
    sampler.set_epoch(1)
    assert sorted(chain.from_iterable(sampler)) == sorted(delivered), "in later epochs, too"


@pytest.mark.parametrize("again", ["exclude", "skip", "reshard"])
def test_a_running_iteration_takes_two_changes_at_one_step(again: str) -> None:
    sampler = made(num_replicas=1, rank=0)
    delivered: list[int] = []
    left_out: list[int] = []
    for number, batch in enumerate(sampler):
        delivered += batch
        if number == 5:
            left_out = sorted(set(range(len(SIZES))) - set(delivered))[:50]
            sampler.exclude(left_out[:30])
            if again == "exclude":
                sampler.exclude(left_out[30:])
            elif again == "skip":
                left_out = [*left_out[:30], *sampler.skip(2).tolist()]
            else:
                left_out = left_out[:30]
                sampler.reshard(1, 0)
    assert sorted(delivered + left_out) == list(range(len(SIZES)))


def test_an_epoch_that_begins_anew_forgets_what_changed_in_it() -> None:
    sampler = part_way()
    sampler.skip(3)
    sampler.exclude([5])
    assert len(sampler.state_dict()["run"]) > 1
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    state = sampler.state_dict()
    resumed = made_without(5)
    resumed.load_state_dict(state)
    whole = list(sampler)
    assert whole == list(fresh := made_without(5)) == list(resumed)
    assert len(sampler) == len(whole)
    assert sampler.state_dict()["run"] == fresh.state_dict()["run"]


def made_without(*indices: int) -> Any:
    sampler = made()
    sampler.exclude(indices)
    return sampler


def test_the_length_after_a_change_is_that_of_the_epoch_as_it_was_delivered() -> None:
    for changed in ({"max_total_size": 100}, {"strategy": "packed", "max_total_size": 400}):
        state = part_way(7).state_dict()
        sampler = made(**changed)
        sampler.load_state_dict(state, accept=changed.keys())
        length, remaining = len(sampler), sampler.remaining
        assert length == 7 + remaining
        assert len(list(sampler)) == remaining
        assert len(sampler) == length


def test_budgets_hold_after_a_change() -> None:
    sampler = made(max_total_size=90)
    sampler.load_state_dict(part_way().state_dict(), accept={"max_total_size"})
    assert all(SIZES[batch].sum() <= 90 for batch in sampler)


@pytest.mark.filterwarnings("ignore:139 samples are left out")
def test_what_was_too_large_comes_where_a_larger_budget_holds_it() -> None:
    small = made(max_total_size=40, oversize="skip", num_replicas=1, rank=0)
    delivered = list(chain.from_iterable(islice(small, 9)))
    large = made(num_replicas=1, rank=0, oversize="skip")
    large.load_state_dict(small.state_dict(), accept={"max_total_size"})
    assert sorted([*delivered, *chain.from_iterable(large)]) == list(range(len(SIZES)))


@pytest.mark.parametrize("strategy", OPTIONS["strategy"])
def test_what_an_epoch_drops_at_its_end_does_not_come_again(strategy: str) -> None:
    def sampler(world: int, rank: int, n: int = 300, tail: str = "drop") -> Any:
        return made(sizes=SIZES[:n], num_replicas=world, rank=rank, tail=tail, strategy=strategy)

    dropped = []
    for world in (7, 8, 9):
        ranks = [sampler(world, rank) for rank in range(world)]
        came = {index for rank in ranks for batch in islice(rank, len(rank)) for index in batch}
        dropped.append(300 - len(came))
        assert [rank.state_dict()["position"] for rank in ranks] == [300] * world, "all have had their turn"
        skipped, finished = sampler(world, 0), sampler(world, 0)
        assert len(skipped.skip(10**6)) == len(came)
        assert list(finished)
        for ended in (ranks[0], skipped, finished):
            state = ended.state_dict()
            fewer, split, grown = sampler(1, 0), sampler(1, 0, tail="split"), sampler(1, 0, 330)
            fewer.load_state_dict(state)
            split.load_state_dict(state, accept={"tail"})
            grown.load_state_dict(state, accept={"data"})
            assert list(fewer) == list(split) == []
            assert sorted(chain.from_iterable(grown)) == list(range(300, 330))
    assert any(dropped)


def folded(*words: int) -> int:
    """The key of some words: SplitMix64 of each in turn, in Python's integers."""

    def mixed(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    key = 0
    for word in words:
        key = mixed(key ^ mixed(word))
    return key


@pytest.mark.parametrize("strategy", OPTIONS["strategy"])
@pytest.mark.parametrize(("order", "n"), [(None, 700), (None, 40_000), (Order, 700)])
def test_the_rest_of_an_epoch_is_planned_by_seed_epoch_and_position(
    strategy: str, order: type[Order] | None, n: int
) -> None:
    """As the samples that are left, with a key of their own: that of the epoch would deal like samples as it did."""
    epoch, seed = 3, 11
    options: dict[str, Any] = {
        "strategy": strategy,
        "cost": "sum",
        "seed": seed,
        "num_replicas": 1,
        "rank": 0,
        "window": 64,
    }
    sizes = np.random.default_rng(1).integers(1, 50, n)
    sampler = made(**options, sizes=sizes, sampler=None if order is None else order(n))
    sampler.set_epoch(epoch)
    came: list[int] = []
    excluded: list[int] = []
    for steps, key in ((9, folded(seed, epoch)), (5, None), (4, None)):
        position = len(came)
        gone = {*came, *excluded}
        left = [index for index in range(n) if index not in gone]
        if key is None:
            key = folded(seed, epoch, position)
        plan = planned_alone(sampler, left, key, steps) if order is None else None
        if order is not None and position:
            assert key_of(sampler) in (key, None)
        begun = list(islice(sampler, steps))
        assert plan is None or begun == plan
        came += chain.from_iterable(begun)
        new = next(index for index in left if index not in came)
        sampler.exclude([new])
        excluded.append(new)


def key_of(sampler: DistributedSizeAwareBatchSampler) -> int | None:
    """The key of the batches that come; None where their order is the user's alone."""
    key: int | None = getattr(sampler._run.current_plan().batch_list, "key", None)  # type: ignore[attr-defined]
    return key


def planned_alone(sampler: DistributedSizeAwareBatchSampler, left: list[int], key: int, count: int) -> list[list[int]]:
    """Plan some samples as a list of their own; return its first batches."""
    sized = prepare(sampler.sizes, 180, sampler.options)
    planned = BatchLists(replace(sized, kept=np.array(left)), sampler.options).of_epoch(key, sampler.num_replicas)
    batches = (
        indices[begin:end].tolist()
        for indices, offsets in planned.batches()
        for begin, end in pairwise(offsets.tolist())
    )
    return list(islice(batches, count))


@pytest.mark.parametrize(
    ("accept", "changed", "message"),
    [
        ({"max_total_size"}, {"strategy": "packed"}, r"differs in strategy.*accept=\['max_total_size', 'strategy'\]"),
        ((), {"max_total_size": 100}, r"differs in max_total_size \(here 100\).*accept=\['max_total_size'\]"),
        ((), {"sizes": SIZES[:-1]}, r"differs in sizes \([0-9]+ samples, here [0-9]+\): construct"),
        ({"data"}, {"sizes": SIZES[:-1]}, r"differs in sizes \([0-9]+ samples, here [0-9]+\): construct"),
        (
            {"data"},
            {"sizes": np.append(SIZES[::-1], 3)},
            r"differs in sizes \([0-9]+ samples, here [0-9]+\): construct",
        ),
        ((), {"sizes": np.append(SIZES, 3)}, r"differs in sizes \([0-9]+ samples, here [0-9]+\): .*accept=\['data'\]"),
        ({"budget"}, {}, r"accept must be one of .*max_total_size.*, data, got 'budget'"),
    ],
)
def test_what_is_not_accepted_is_refused(accept: Any, changed: dict[str, Any], message: str) -> None:
    sampler = made(**changed)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(part_way().state_dict(), accept=accept)
    assert list(sampler) == list(made(**changed)), "a refusal leaves it as it was"


@pytest.mark.parametrize(
    "options", [{"tokens_per_step": 2000}, {"strategy": "bucketed", "cost": "padded", "curriculum": 40}]
)
def test_plans_that_depend_on_what_came_before_change_at_the_beginning_of_an_epoch(options: dict[str, Any]) -> None:
    sampler, name = made(**options), "tokens_per_step" if "tokens_per_step" in options else "curriculum"
    sampler.exclude([3])
    assert all(3 not in batch for batch in sampler)
    sampler = part_way(4, **options)
    with pytest.raises(ValueError, match=f"{name}=.* allows changes at the beginning of an epoch only"):
        sampler.exclude([3])
    assert not len(sampler.excluded_indices)
    rest = list(sampler)
    assert len(rest) in (len(sampler), len(sampler) - 4)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": -1},
        {"starts": [5, 3]},
        {"starts": [0, 0, 0]},
        {"run": [{"epoch": 0}]},
        {"run": [{"epoch": 7, "position": 0, "step": 0}]},
        {"run": "x"},
        {"run": [{"epoch": 0, "position": 0, "step": 0, "world": 0}]},
        {"run": [{"epoch": 0, "position": 0, "step": 0, "options": 3}]},
        {"run": [{"epoch": 0, "position": 0, "step": 0, "exclude": ["a"]}]},
        {"run": [{"epoch": 0, "position": 0, "step": 0, "exclude": [10**9]}]},
        {"step": 3.5},
    ],
)
def test_a_damaged_record_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it was changed"):
        made().load_state_dict(part_way().state_dict() | damage)


def test_wrong_arguments_are_named() -> None:
    sampler = part_way()
    with pytest.raises(ValueError, match="indices must be"):
        sampler.exclude([len(SIZES)])
    with pytest.raises(TypeError, match="indices must be"):
        sampler.exclude(["key"])
    with pytest.raises(ValueError, match="number must be"):
        sampler.step(-1)
    with pytest.raises(ValueError, match="rank of step 1 must be"):
        sampler.step(1, rank=2)
    with pytest.raises(ValueError, match="steps must be"):
        sampler.skip(0)
    with pytest.raises(IndexError, match="number must be"):
        made(sizes=[]).step(0)


def test_a_copy_has_a_record_of_its_own() -> None:
    sampler = part_way()
    for other in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        before = sampler.state_dict()
        other.exclude([1, 2, 3])
        list(other)
        assert sampler.state_dict() == before
        assert not len(sampler.excluded_indices)
        assert sampler.step(3) == other.step(3)


def test_a_state_stays_small() -> None:
    sampler = made(sizes=SIZES, num_replicas=10_000, rank=9_999, tail="pad")
    for changes in range(20):
        sampler.exclude([changes])
    sampler.skip(1)
    assert len(json.dumps(sampler.state_dict())) < 4096


class AlwaysAlike:
    """A sampler that looks the same whatever its data: it lists what it has."""

    fingerprint = "listed"

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.count).tolist())


def test_a_listed_order_grows_at_the_beginning_of_an_epoch_alone() -> None:
    def make(count: int) -> DistributedSizeAwareBatchSampler:
        return DistributedSizeAwareBatchSampler(SIZES[:count], 300, sampler=AlwaysAlike(count), num_replicas=1, rank=0)

    old = make(len(SIZES) - 20)
    rest = iter(old)
    next(rest)
    inside = old.state_dict()
    new = make(len(SIZES))
    for state in (inside, old.state_dict(position=len(SIZES) - 20)):
        with pytest.raises(ValueError, match=r"accept=\{'data'\} needs a state of the beginning of an epoch"):
            new.load_state_dict(state, accept={"data"})
    steps = [[next(rest)] for _ in range(3)]
    old.set_epoch(1)
    new.load_state_dict(old.state_dict(), accept={"data"})
    assert sorted(index for batch in new for index in batch) == list(range(len(SIZES)))
    with pytest.raises(ValueError, match=r"before the data grew, as a Weighted.*, got AlwaysAlike: look"):
        new.step(len(steps))


def rectangle(count: Any, largest: Any) -> Any:
    return count * largest


@pytest.mark.parametrize("accept", [(), {"cost"}, {"cost", "strategy"}])
def test_a_function_of_the_run_cannot_be_accepted_away(accept: Any) -> None:
    """A state does not hold it, so nobody can tell that all else is the same."""
    run = DistributedSizeAwareBatchSampler(SIZES, 180, cost=rectangle, num_replicas=1, rank=0)
    next(iter(run))
    now = DistributedSizeAwareBatchSampler(SIZES, 180, cost="padded", num_replicas=1, rank=0)
    message = r"differs in cost \(a function in the run, which cannot be accepted: give that of the run\): construct"
    with pytest.raises(StateMismatchError, match=message) as refused:
        now.load_state_dict(run.state_dict(), accept=accept)
    assert not refused.value.acceptable


def test_equal_budgets_of_other_types_are_one_setting() -> None:
    """Ranks compare their states before they train."""
    states, budgets = [], list[Any]([200, 200.0, np.float32(200)])
    for budget in budgets:
        run = DistributedSizeAwareBatchSampler(SIZES, budget, max_length=48.0, num_replicas=1, rank=0)
        next(iter(run))
        states.append(json.dumps(run.state_dict()))
    assert len(set(states)) == 1
