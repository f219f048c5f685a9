"""Laws of batch samplers, each written once and held to every class that promises it."""

import copy
import io
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
from doors import sampler_with
from golden import Sliced, integers

from headrace.size_aware_batching import (
    BlockwiseSizeAwareBatchSampler,
    DistributedSizeAwareBatchSampler,
    OptimizerStepBatchSampler,
)
from headrace.size_aware_batching.integrations.accelerate import PreparedBatchSampler
from headrace.webdatamodule import DistributedBatchSampler, ResumableLoader
from headrace.weighted_sampler import WeightedDistributedSampler

Maker = Callable[..., Any]
SIZES = 1 + integers(110, 0, 40, 1) * integers(110, 0, 40, 2) // 40
LABELS = ["web"] * 70 + ["books", "code"] * 20
SHARDS = [SIZES[:33], SIZES[33:60], SIZES[60:61], SIZES[61:90], SIZES[90:]]


def mixture() -> WeightedDistributedSampler:
    weights: Any = {(0, 30): 5, (30, 70): 3, (70, 110): 2}
    return WeightedDistributedSampler(range(len(SIZES)), weights, num_replicas=1, rank=0, seed=5, epoch_length=120)


def by_size(**options: Any) -> Maker:
    """Return what makes samplers of epochs planned as a whole; ``sampler`` makes the order."""
    options = {"strategy": "stratified", "cost": "sum", "max_total_size": 60, **options}

    def make(**changed: Any) -> Any:
        arguments = options | changed
        if "sampler" in arguments:
            arguments["sampler"] = arguments["sampler"]()
        return sampler_with(SIZES, **arguments)

    return make


def by_block(**options: Any) -> Maker:
    options = {"strategy": "stratified", "cost": "sum", "max_total_size": 60, "block": 40, **options}
    return lambda **changed: BlockwiseSizeAwareBatchSampler(SHARDS, **options | changed)


def by_count(**options: Any) -> Maker:
    def make(**changed: Any) -> DistributedBatchSampler:
        arguments = options | changed
        if "sampler" in arguments:
            arguments["sampler"] = arguments["sampler"]()
        return DistributedBatchSampler(len(SIZES), 5, **arguments)

    return make


def mixed() -> Maker:
    options: dict[str, Any] = {"weights": {(0, 30): 5, (30, 110): 3}, "epoch_length": 120}
    return lambda **changed: WeightedDistributedSampler(range(len(SIZES)), **options | changed)


def loaded(batches: Maker) -> Maker:
    def make(n: int = len(SIZES), **ranks: Any) -> ResumableLoader:
        made = batches(**ranks) if n == len(SIZES) else DistributedBatchSampler(n, 5, **ranks)
        return ResumableLoader(range(n), made, collate_fn=list)

    return make


PLANNED = {
    "stratified": by_size(),
    "packed": by_size(strategy="packed", balanced_ranks=3),
    "sequential, drop": by_size(strategy="sequential", tail="drop"),
    "labels": by_size(by=LABELS),
    "one label a step": by_size(by=LABELS, label_per="step", balanced_ranks=2),
    "one label a step of a mixture": by_size(by=LABELS, label_per="step", sampler=mixture, window=60),
    "pairs": by_size(group_by=[index // 2 for index in range(len(SIZES))], max_total_size=70),
    "padded, pad": by_size(strategy="bucketed", cost="padded", max_total_size=90, tail="pad"),
    "in order": by_size(shuffle=False),
    "skip": by_size(max_total_size=34, oversize="skip"),
    "pieces": by_size(oversize="split", max_length=20),
    "order": by_size(sampler=lambda: Sliced(len(SIZES)), window=40),
    "mixture": by_size(sampler=mixture, strategy="sequential"),
}
CURRICULUM = {"curriculum": by_size(curriculum=12)}
TOKENS = {"tokens": by_size(tokens_per_step=300)}
BLOCKS = {
    "blocks": by_block(),
    "blocks, drop": by_block(strategy="sequential", tail="drop"),
    "blocks, padded": by_block(strategy="bucketed", cost="padded", tail="pad", max_total_size=90),
}
COUNTED = {
    "count": by_count(),
    "count, drop": by_count(drop_last=True),
    "count in order": by_count(shuffle=False),
    "count of an order": by_count(sampler=lambda: Sliced(len(SIZES))),
    "count of a mixture": by_count(sampler=mixture),
}
LOADERS = {"loader by size": loaded(by_size()), "loader by count": loaded(by_count())}
STEPPED = PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED | LOADERS
CHANGING = PLANNED | COUNTED  # that leave out samples, skip steps and change their ranks in the middle of an epoch
FEW = {
    name: CHANGING[name]
    for name in ("stratified", "sequential, drop", "pieces", "order", "mixture", "count", "count of a mixture")
}
COPIED = FEW | CURRICULUM | TOKENS | {"blocks": BLOCKS["blocks"]}
pytestmark = pytest.mark.filterwarnings("ignore:.*(left out as larger|samples are repeated):UserWarning")


def through_pickle(thing: Any) -> Any:
    file = io.BytesIO()
    pickle.dump(thing, file)
    file.seek(0)
    return pickle.load(file)


COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": through_pickle}


def every(makers: dict[str, Maker]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", makers.values(), ids=makers)


def ranks_of(make: Maker, world: int) -> list[Any]:
    return [make(num_replicas=world, rank=rank) for rank in range(world)]


def saved(sampler: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(sampler.state_dict()))
    return state


def step_of(state: dict[str, Any]) -> int:
    step: int = state.get("batch_sampler", state)["step"]
    return step


def in_steps(iterators: list[Iterator[Any]], steps: int | None = None) -> list[list[Any]]:
    """Return what the ranks get, step by step; all end in the same step."""
    log: list[list[Any]] = []
    while steps is None or len(log) < steps:
        step = list(chain.from_iterable(islice(iterator, 1) for iterator in iterators))
        if not step:
            break
        assert len(step) == len(iterators)
        log.append(step)
    return log


def resumed(make: Maker, world: int, state: dict[str, Any]) -> list[Any]:
    ranks = ranks_of(make, world)
    for one in ranks:
        one.load_state_dict(state)
    return ranks


# Batches with their places


@every(PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED)
@pytest.mark.parametrize("begun", [0, 2])
def test_batches_come_with_the_place_behind_each_and_nothing_moves(make: Maker, begun: int) -> None:
    ranks = ranks_of(make, 3)
    for one in ranks:
        one.set_epoch(1)
    running = [iter(one) for one in ranks]
    in_steps(running, begun)
    state = saved(ranks[1])
    ahead = [list(one.batches_from(state["position"])) for one in ranks]
    assert saved(ranks[1]) == state
    assert [[batch.samples for batch in batches] for batches in zip(*ahead, strict=True)] == in_steps(running)
    assert len({tuple(batch.place for batch in batches) for batches in ahead}) == 1
    for number, batch in enumerate(ahead[1], 1):
        rest = ranks[1].batches_from(batch.place)
        assert [later.samples for later in rest] == [later.samples for later in ahead[1][number:]]


@every(PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED)
@pytest.mark.parametrize("again", [False, True])
def test_a_state_of_a_place_ahead_is_that_of_an_iteration_there(make: Maker, again: bool) -> None:
    planned, running = make(num_replicas=3, rank=1), make(num_replicas=3, rank=1)
    if again:  # on other ranks, from the middle of the epoch
        before = make(num_replicas=2, rank=0)
        list(islice(before, 3))
        for one in (planned, running):
            one.load_state_dict(saved(before))
    else:
        planned.set_epoch(1)
        running.set_epoch(1)
    states = [planned.state_dict(batch.place) for batch in planned.batches_from()]
    assert states == [running.state_dict() for _ in running]
    if again:
        assert saved(planned) == saved(before)


# An iteration that reads ahead


def resumed_from(make: Maker, state: dict[str, Any], **options: Any) -> Any:
    sampler = make(num_replicas=3, rank=1, **options)
    sampler.load_state_dict(state)
    return sampler


@every(PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED)
def test_batches_that_are_read_ahead_count_when_they_are_delivered(make: Maker) -> None:
    ahead, running = sampler_at(make, 1), sampler_at(make, 1)
    for _ in range(2):  # the second time the epoch begins anew
        before = list(ahead.begin())
        assert ahead.position == 0
        for batch, expected in zip(before[:4], running, strict=False):
            ahead.delivered(batch)
            assert batch.samples == expected
            assert ahead.place == batch.place
            assert saved(ahead) == saved(running)
        assert ahead.remaining == len(before) - 4


CHANGES: dict[str, Callable[[Any], Any]] = {
    "exclude": lambda sampler: sampler.exclude([1, 44, 77, 105]),
    "skip": lambda sampler: sampler.skip(2),
    "reshard": lambda sampler: sampler.reshard(2, 1),
    "reweight": lambda sampler: sampler.reweight({(0, 30): 1, (30, 70): 1, (70, 110): 1}),
}
CHANGED = [
    pytest.param(make, change, id=f"{name}, {what}")
    for name, make in CHANGING.items()
    for what, change in CHANGES.items()
    if what != "reweight" or "mixture" in name
]


@pytest.mark.parametrize(("make", "change"), CHANGED)
def test_a_change_acts_at_the_place_that_was_delivered(make: Maker, change: Callable[[Any], Any]) -> None:
    ahead, running = sampler_at(make, 1), sampler_at(make, 1)
    before = list(ahead.begin())
    batches = iter(running)
    for batch in before[:3]:
        assert next(batches) == batch.samples
        ahead.delivered(batch)
    change(ahead)
    change(running)
    assert saved(ahead) == saved(running)
    rest = list(ahead.begin())
    assert [batch.samples for batch in rest] == list(batches)
    for batch in rest:
        ahead.delivered(batch)
    assert saved(ahead) == saved(running)


@pytest.mark.parametrize(
    ("make", "change"), [case for case in CHANGED if "skip" not in str(case.id) and "reshard" not in str(case.id)]
)
@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_a_state_before_a_change_holds_it_there(make: Maker, change: Callable[[Any], Any], earlier: int) -> None:
    sampler, other = sampler_at(make, 1), sampler_at(make, 1)
    batches = list(sampler.begin())
    places = [sampler.place]
    for batch in batches[:4]:
        sampler.delivered(batch)
        places.append(batch.place)
    change(sampler)
    state = json.loads(json.dumps(sampler.state_dict(places[earlier])))
    for batch in list(other.begin())[:earlier]:
        other.delivered(batch)
    draws = [draw for entry in state["run"] for draw, _ in entry.get("reweight", ())]
    if draws:
        other.reweight({(0, 30): 1, (30, 70): 1, (70, 110): 1}, draws[0])
    else:
        change(other)
    expected = list(resumed_from(make, saved(other)))
    assert list(resumed_from(make, state)) == expected
    assert [batch.samples for batch in sampler.batches_from(places[earlier])] == expected
    sampler.go_to(places[earlier])
    assert saved(sampler) == state
    assert list(sampler) == expected


@every(PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED)
@pytest.mark.parametrize("back", [0, 2])
def test_a_run_goes_back_to_a_place(make: Maker, back: int) -> None:
    sampler = sampler_at(make, 1)
    batches = list(sampler.begin())
    places, states = [sampler.place], [saved(sampler)]
    for batch in batches[:4]:
        sampler.delivered(batch)
        places.append(batch.place)
        states.append(saved(sampler))
    sampler.go_to(places[back])
    assert saved(sampler)["step"] == states[back]["step"]
    assert sampler.remaining == len(batches) - back
    for again, state in zip(islice(sampler.begin(), 4 - back), states[back + 1 :], strict=True):
        sampler.delivered(again)
        assert saved(sampler) == state
    assert list(sampler.batches_from(places[-1])) == batches[4:]


@every(PLANNED | CURRICULUM | TOKENS | BLOCKS | COUNTED)
def test_every_step_is_in_an_epoch(make: Maker) -> None:
    sampler, counts = make(num_replicas=2, rank=0), []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        counts.append(len(list(sampler) if epoch < 2 else list(islice(sampler, 1))))
    expected = [0] * counts[0] + [1] * counts[1] + [2] * len(sampler)
    assert [sampler.epoch_of_step(number) for number in range(len(expected))] == expected
    assert sampler.epoch_of_step(len(expected)) == 3
    assert sampler.epoch_of_step(len(expected), num_replicas=1) == 2


# A step by its number


@every(STEPPED)
def test_a_step_is_what_was_delivered_on_every_rank(make: Maker) -> None:
    ranks = ranks_of(make, 3)
    log = in_steps([iter(one) for one in ranks])
    for one in ranks:
        one.set_epoch(1)
    log += in_steps([iter(one) for one in ranks], 4)
    state = saved(ranks[1])
    ranks = resumed(make, 2, state)
    log += in_steps([iter(one) for one in ranks], 3)
    ranks = resumed(make, 4, saved(ranks[0]))
    log += in_steps([iter(one) for one in ranks])
    for one in ranks:
        one.set_epoch(3)  # epoch 2 is left out
    log += in_steps([iter(one) for one in ranks], 2)
    for rank, one in enumerate(ranks):
        assert step_of(saved(one)) == len(log)
        own = range(rank, len(log), len(ranks))  # every step is asked of one rank
        assert [one.step(number) for number in own] == log[rank :: len(ranks)]
        assert one.step(own[-1], rank=1) == log[own[-1]][1]


@every(STEPPED)
def test_a_step_to_come_is_what_is_delivered_then(make: Maker) -> None:
    ranks = ranks_of(make, 3)
    log = in_steps([iter(one) for one in ranks], 2)
    coming = {number: ranks[2].step(number) for number in (0, 1, 2, 5, 9, 17, 25)}
    other = ranks[0].step(4, num_replicas=2)
    state = saved(ranks[0])
    ranks = resumed(make, 3, state)
    log += in_steps([iter(one) for one in ranks])
    for epoch in (1, 2, 3, 4):
        for one in ranks:
            one.set_epoch(epoch)
        log += in_steps([iter(one) for one in ranks])
    assert len(log) > 25
    assert coming == {number: log[number] for number in coming}
    ranks = resumed(make, 2, state)
    assert in_steps([iter(one) for one in ranks], 3)[2] == other


@every(CHANGING)
@pytest.mark.parametrize("first", ["exclude", "skip", "reshard"])
def test_a_step_is_what_was_delivered_whatever_changed_since(make: Maker, first: str) -> None:
    ranks = ranks_of(make, 3)
    running = [iter(one) for one in ranks]
    log = in_steps(running, 3)
    for change in [first, *({"exclude", "skip", "reshard"} - {first})]:
        if change == "exclude":
            for one in ranks:
                one.exclude([1, 77, *log[0][0][:1]] if type(log[0][0][0]) is int else [1, 77])
        elif change == "skip":
            skipped = [one.skip(1).tolist() for one in ranks]
            assert all(own == skipped[0] for own in skipped)
        else:
            for rank, one in enumerate(ranks[:2]):
                one.reshard(2, rank)
            ranks, running = ranks[:2], running[:2]
        log += in_steps(running, 1)
    log += in_steps(running)
    asked = [*ranks, resumed(make, 4, saved(ranks[0]))[1]]
    for rank, one in enumerate(asked):
        assert [one.step(number) for number in range(rank, len(log), 3)] == log[rank::3]


def there(sampler: Any) -> None:
    list(sampler)
    sampler.set_epoch(1)
    list(islice(sampler, 2))


def going_on(sampler: Any) -> None:
    list(sampler)
    sampler.set_epoch(2)


def going_back(sampler: Any) -> None:
    going_on(sampler)
    list(islice(sampler, 2))
    sampler.set_epoch(1)  # which was left out


@pytest.mark.parametrize(
    ("make", "lead"),
    [
        pytest.param(make, lead, id=f"{name}, {lead.__name__}")
        for name, make in (FEW | CURRICULUM | {"blocks": BLOCKS["blocks"]}).items()
        for lead in (there, going_on, going_back)
    ],
)
def test_the_step_of_a_state_is_the_one_that_comes_next(make: Maker, lead: Callable[[Any], None]) -> None:
    first, second = make(num_replicas=2, rank=1), make(num_replicas=2, rank=1)
    lead(first)
    lead(second)
    state = saved(first)
    coming = first.step(step_of(state))[1]
    second.load_state_dict(state)
    assert coming == next(iter(second))


# Copies


@every(COPIED)
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("cut", [0, 3])
def test_a_copy_resumes_where_the_original_stands(make: Maker, through: Callable[[Any], Any], cut: int) -> None:
    whole = sampler_at(make, 2)
    expected = list(whole)
    sampler = sampler_at(make, 2)
    batches = iter(sampler)
    assert list(islice(batches, cut)) == expected[:cut]
    state = sampler.state_dict()
    copied = through(sampler)
    assert copied.state_dict() == state == sampler.state_dict()
    assert (len(copied), copied.remaining) == (len(expected), len(expected) - cut)
    assert list(islice(copied, 2)) == expected[cut : cut + 2]
    assert sampler.state_dict() == state, "what the copy delivered"
    assert list(batches) == expected[cut:]
    assert copied.state_dict()["step"] - state["step"] == len(expected[cut : cut + 2])
    assert list(copied) == expected, "it was loaded once only"
    assert copied.state_dict() == sampler.state_dict()


@pytest.mark.parametrize(
    ("make", "through"),
    [
        pytest.param(make, through, id=f"{name}-{how}")
        for name, make in COPIED.items()
        for how, through in COPIES.items()
    ],
)
def test_a_copy_shares_no_epoch_and_no_end(make: Maker, through: Callable[[Any], Any]) -> None:
    sampler = sampler_at(make, 2)
    expected = list(sampler)
    copied = through(sampler)
    assert copied.state_dict() == sampler.state_dict()
    assert list(copied) == [], "it stands at the end"
    assert list(copied) == list(sampler) == expected
    copied.set_epoch(3)
    assert (sampler.epoch, copied.epoch) == (2, 3)
    other = sampler_at(make, 3)
    list(islice(copied, 1))
    assert list(sampler) == expected
    assert list(copied) == list(other)


@every(COPIED)
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
def test_a_copy_of_what_was_loaded_resumes_as_well(make: Maker, through: Callable[[Any], Any]) -> None:
    first, second = sampler_at(make, 1), make(num_replicas=3, rank=1)
    expected = list(sampler_at(make, 1))
    list(islice(first, 3))
    second.load_state_dict(saved(first))
    copied = through(second)
    assert list(copied) == expected[3:]
    assert list(second) == expected[3:]


@every(FEW)
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
def test_a_copy_shares_no_change(make: Maker, through: Callable[[Any], Any]) -> None:
    sampler = sampler_at(make, 1)
    expected = list(sampler_at(make, 1))
    batches = iter(sampler)
    list(islice(batches, 2))
    state = saved(sampler)
    copied = through(sampler)
    copied.exclude([3])
    copied.skip(1)
    copied.reshard(1, 0)
    assert saved(sampler) == state
    assert list(sampler.excluded_indices) == []
    assert sampler.num_replicas == 3
    assert list(batches) == expected[2:]
    changed = through(copied)
    assert list(changed.excluded_indices) == [3]
    assert list(changed) == list(copied)


def sampler_at(make: Maker, epoch: int) -> Any:
    sampler = make(num_replicas=3, rank=1)
    sampler.set_epoch(epoch)
    return sampler


# Batches of all ranks


ALL_RANKS = {
    name: make
    for name, make in (PLANNED | CURRICULUM | TOKENS | BLOCKS).items()
    if name not in ("order", "skip") and "mixture" not in name and "pad" not in name and "drop" not in name
}


def own_batches(batches: Iterable[Any], rank: int, world: int) -> Iterator[Any]:
    """Yield one batch of each step, as a prepared loader does on one process: it has read the next step by then."""
    iterator = iter(batches)
    step = list(islice(iterator, world))
    while step:
        following = list(islice(iterator, world))
        yield step[rank]
        step = following


def samples(batches: Iterable[Any]) -> Counter[Any]:
    return Counter(key if type(key) is int else (key.index, key.start) for batch in batches for key in batch)


@pytest.mark.parametrize("make", ALL_RANKS.values(), ids=ALL_RANKS)
@pytest.mark.parametrize("world", [1, 3])
def test_prepared_batches_of_all_ranks_resume_on_other_processes(make: Maker, world: int) -> None:
    whole = samples(make(num_replicas=1, rank=0))
    ranks = [PreparedBatchSampler(make(num_replicas=2, rank="all")) for _ in range(2)]
    loops = [one.delivered(own_batches(one, rank, 2)) for rank, one in enumerate(ranks)]
    delivered = in_steps(loops, 3)
    states = [saved(one) for one in ranks]
    assert states[0] == states[1]
    assert states[0]["step"] == ranks[0].run_steps == 3
    assert len(ranks[0]) == len(make(num_replicas=2, rank="all"))
    others = [PreparedBatchSampler(make(num_replicas=world, rank="all")) for _ in range(world)]
    for one in others:
        one.load_state_dict(states[0])
    rest = in_steps([one.delivered(own_batches(one, rank, world)) for rank, one in enumerate(others)])
    assert samples(chain.from_iterable(delivered + rest)) == whole
    assert set(whole.values()) == {1}
    assert [one.run_steps for one in others] == [3 + len(rest)] * world


# Constructions


class Constructions:
    """Counts the samplers that are constructed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        planned = (DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler, BlockwiseSizeAwareBatchSampler)
        for made in (*planned, DistributedBatchSampler):
            monkeypatch.setattr(made, "__init__", self.counted(made.__init__))

    def counted(self, construct: Any) -> Any:
        def count(constructed: Any, /, *arguments: Any, **options: Any) -> None:
            self.count += 1
            construct(constructed, *arguments, **options)

        return count


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (PLANNED["stratified"], {}),
        (PLANNED["stratified"], {"max_total_size": 80}),
        (PLANNED["packed"], {"max_items": 6, "tail": "pad"}),
        (PLANNED["order"], {"max_total_size": 80}),
        (PLANNED["mixture"], {"max_total_size": 80}),
        (PLANNED["pieces"], {"max_items": 6}),
        (CURRICULUM["curriculum"], {}),
        (TOKENS["tokens"], {}),
        (BLOCKS["blocks"], {}),
        (COUNTED["count"], {}),
        (COUNTED["count"], {"drop_last": True}),
        (COUNTED["count of a mixture"], {"drop_last": True}),
    ],
)
def test_a_resume_constructs_no_sampler(make: Maker, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = make(num_replicas=2, rank=1)
    list(islice(before, 3))
    state = saved(before)
    after = make(num_replicas=3, rank=0, **changed)
    constructions = Constructions(monkeypatch)
    after.load_state_dict(state, **({"accept": set(changed)} if changed else {}))
    next(iter(after))
    assert after.remaining > 0
    assert constructions.count == 0


# Refusals


def too_early(sampler: Any) -> None:
    sampler.reweight({(0, 30): 1, (30, 70): 1, (70, 110): 1}, 3)


def of_another_seed(sampler: Any) -> None:
    sampler.load_state_dict({**sampler.state_dict(), "seed": 12345})


REFUSED: dict[str, Callable[[Any], Any]] = {
    "exclude": lambda sampler: sampler.exclude([0, 9, 1000]),
    "exclude a float": lambda sampler: sampler.exclude([0, 9.5]),
    "skip": lambda sampler: sampler.skip(0),
    "set_epoch": lambda sampler: sampler.set_epoch(-1),
    "load": of_another_seed,
    "accept": lambda sampler: sampler.load_state_dict(sampler.state_dict(), accept={"nothing"}),
    "step": lambda sampler: sampler.step(-1),
    "reweight": too_early,
}


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        pytest.param(
            make,
            ask,
            id=f"{name}, {what}",
        )
        for name, make in FEW.items()
        for what, ask in REFUSED.items()
    ],
)
def test_what_is_refused_changes_nothing(make: Maker, refused: Callable[[Any], Any]) -> None:
    expected = list(sampler_at(make, 1))
    sampler = sampler_at(make, 1)
    batches = iter(sampler)
    list(islice(batches, 3))
    state = saved(sampler)
    with pytest.raises((TypeError, ValueError)):
        refused(sampler)
    assert saved(sampler) == state
    assert (len(sampler), sampler.remaining) == (len(expected), len(expected) - 3)
    assert list(batches) == expected[3:]


MISMATCHES: dict[str, tuple[Maker, dict[str, Any], set[str], bool]] = {
    "another budget": (by_size(), {"max_total_size": 50}, {"max_total_size"}, True),
    "another strategy and oversize": (by_size(), {"strategy": "packed", "tail": "drop"}, {"strategy", "tail"}, True),
    "another seed of sizes": (by_size(), {"seed": 3}, {"seed"}, False),
    "another order of sizes": (by_size(), {"sampler": mixture}, {"sampler"}, False),
    "other labels": (by_size(by=LABELS), {"by": LABELS[::-1]}, {"by"}, False),
    "one label a step": (by_size(by=LABELS), {"label_per": "step"}, {"label_per"}, False),
    "no labels": (by_size(by=LABELS), {"by": None}, {"by", "label_per"}, False),
    "another budget of blocks": (by_block(), {"max_total_size": 50}, {"max_total_size"}, False),
    "another seed": (by_count(), {"seed": 3}, {"seed"}, False),
    "another shuffle": (by_count(), {"shuffle": False}, {"shuffle"}, True),
    "another order": (by_count(), {"sampler": mixture}, {"fingerprint"}, False),
    "another seed of a mixture": (mixed(), {"seed": 3}, {"seed"}, False),
    "another weight": (mixed(), {"weights": {(0, 30): 1, (30, 110): 1}}, {"options"}, False),
    "other data of a loader": (loaded(by_count()), {"n": 3}, {"data"}, True),
}


@pytest.mark.parametrize(("make", "changed", "differences", "acceptable"), MISMATCHES.values(), ids=MISMATCHES)
def test_what_a_refused_state_differs_in_is_data(
    make: Maker, changed: dict[str, Any], differences: set[str], acceptable: bool
) -> None:
    sampler = make(num_replicas=1, rank=0)
    list(islice(sampler, 3))
    with pytest.raises(ValueError, match=r"state|checkpoint") as refused:
        make(num_replicas=1, rank=0, **changed).load_state_dict(saved(sampler))
    error: Any = through_pickle(refused.value)
    assert (set(error.differences), bool(error.acceptable)) == (differences, acceptable)
    assert str(error).startswith(error.reason)
    assert str(error) == str(refused.value)


@every(COPIED | LOADERS | {"mixture alone": mixed()})
@pytest.mark.parametrize("through", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("loads", [False, True])
def test_a_copy_of_what_left_an_iteration_unfinished_begins_where_it_was_sent(
    make: Maker, through: Callable[[Any], Any], loads: bool
) -> None:
    sampler = make(num_replicas=1, rank=0)
    running = iter(sampler)
    next(running)
    if loads:
        sampler.load_state_dict(saved(sampler))
    else:
        sampler.set_epoch(1)
    copied = through(sampler)
    assert list(copied) == list(sampler)
