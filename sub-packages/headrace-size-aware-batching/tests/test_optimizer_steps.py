"""Tokens of an optimizer step: the same samples at any world size, within every budget, resumed at every place."""

import copy
import cProfile
import json
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies_of_sizes import cases, examples
from torch.utils.data import DataLoader, RandomSampler

from headrace.size_aware_batching import OptimizerStepBatchSampler
from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.prepared import prepare
from headrace.size_aware_batching.planning.token_schedule import TokenSchedule
from headrace.size_aware_batching.planning.token_steps import fewest_micro_batches, pack_step
from headrace.size_aware_batching.testing import check_resumes

SIZES = np.random.default_rng(0).integers(1, 100, 303)
PADDED: dict[str, Any] = {"cost": "padded"}
WORLDS = (1, 2, 3, 8)


class Mixture:
    """An order with repeats, another one in each epoch, of epochs that hold other numbers of tokens."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1000

    def take(self, start: int, stop: int) -> Any:
        return np.random.default_rng(self.epoch).integers(0, len(SIZES), 1000)[start:stop]


def quadratic(count: int, largest: float) -> float:
    return float(count * largest**1.5 / 10)


def half_as_much_work() -> Any:
    return SIZES.astype(float) ** 2


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "padded": PADDED,
    "padded to multiples": PADDED | {"length_multiple": 8},
    "function": {"cost": quadratic},
    "in order": {"shuffle": False},
    "at most so many": {"max_items": 9},
    "work": {"work": half_as_much_work},
    "padded work": PADDED | {"work": half_as_much_work},
    "cut": {"max_length": 60},
    "two columns": {"sizes": lambda: np.stack([SIZES, SIZES[::-1]], axis=1), "max_total_size": [500, 520]},
    "two padded columns": PADDED
    | {"sizes": lambda: np.stack([SIZES, SIZES[::-1]], axis=1), "max_total_size": [500, 520]},
    "fractions": {"sizes": lambda: SIZES / 7, "max_total_size": 500 / 7, "tokens_per_step": 4000 / 7},
    "skipped": {"max_total_size": 90, "oversize": "skip"},
    "batches of their own": {"max_total_size": 90, "oversize": "own_batch"},
    "dropped": {"tail": "drop"},
    "mixture": {"sampler": Mixture},
    "schedule": {"tokens_per_step": [(0, 4000), (3, 7000), (8, 5000)]},
    "schedule of a mixture": {"sampler": Mixture, "tokens_per_step": [(0, 4000), (14, 7000)]},
    "more than needed": {"accumulate": 6, "max_total_size": 700},
}


def made(rank: Any = 0, world: int = 1, **options: Any) -> OptimizerStepBatchSampler:
    options = {"max_total_size": 500, "tokens_per_step": 4000} | options
    options = {name: value() if callable(value) and name not in ("cost",) else value for name, value in options.items()}
    return OptimizerStepBatchSampler(options.pop("sizes", SIZES), num_replicas=world, rank=rank, **options)


def of_all_ranks(world: int, epoch: int = 0, **options: Any) -> list[list[list[list[int]]]]:
    """Return the batches of an epoch as ``[step][micro-batch][rank]``."""
    ranks = [made(rank, world, **options) for rank in range(world)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    of_rank = [list(sampler.optimizer_steps(sampler)) for sampler in ranks]
    return [[list(row) for row in zip(*step, strict=True)] for step in zip(*of_rank, strict=True)]


def counts_of(sampler: OptimizerStepBatchSampler) -> list[int]:
    counts: list[int] = sampler.accumulation.tolist()
    return counts


def flat(batches: Any) -> list[Any]:
    return list(chain.from_iterable(batches))


def samples_of(step: list[list[list[int]]]) -> list[int]:
    return sorted(flat(flat(step)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* left out as larger than:UserWarning")
@pytest.mark.filterwarnings("ignore:tail='split'. the last batches hold too few:UserWarning")
@pytest.mark.parametrize(
    ("worlds", "epochs"), [((3, 8), (1,)), pytest.param((1, 2, 3, 8), (0, 1, 2), marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("case", CASES)
def test_every_law_holds(case: str, worlds: tuple[int, ...], epochs: tuple[int, ...]) -> None:
    options, sampler = CASES[case], made(**CASES[case])
    tokens = (sampler.sizes if sampler.sizes.ndim == 1 else sampler.sizes[:, 0]).astype(float)
    tokens = np.minimum(tokens, options.get("max_length", np.inf))
    for epoch in epochs:
        sampler.set_epoch(epoch)
        before = sum(sampler.num_optimizer_steps(earlier) for earlier in range(epoch))
        at_one_rank = [samples_of(step) for step in of_all_ranks(1, epoch, **options)]
        for world in worlds:
            steps = of_all_ranks(world, epoch, **options)
            found = [samples_of(step) for step in steps]
            if len(found[-1]) > len(at_one_rank[-1]):  # a last step of fewer samples than batches: some come once more
                assert len(found[-1]) == world * len(steps[-1])
                assert {*found[-1]} == {*at_one_rank[-1]}
                found[-1] = at_one_rank[-1]
            assert found == at_one_rank  # the same samples at any world size
            assert len(steps) == sampler.num_optimizer_steps(epoch)
            for number, step in enumerate(steps):
                target = sampler.tokens_at(before + number)
                off = abs(tokens[samples_of(step)].sum() - target)
                assert off <= tokens.max() + 1e-6 or (number == len(steps) - 1 and options.get("tail") != "drop")
            report = made(0, world, **options).report(epoch)
            assert report.over_budget == (
                len(sampler.oversize_indices) if options.get("oversize") == "own_batch" else 0
            )
            counts = np.array([len(step) for step in steps])
            ranked = made(world - 1, world, **options)
            ranked.set_epoch(epoch)
            assert counts_of(ranked) == counts.tolist()
            assert len(ranked) == counts.sum() == ranked.remaining
            assert len(made("all", world, **options)) % world == 0
        if "sampler" not in options and options.get("tail") != "drop":
            expected = sorted(set(range(len(SIZES))) - set(sampler.skipped_indices.tolist()))
            assert sorted(flat(at_one_rank)) == expected  # each sample once


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [2, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
def test_it_resumes_everywhere(case: str, cuts: int) -> None:
    check_resumes(lambda: made(1, 2, **CASES[case]), most_cuts=cuts)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["default", "padded", "mixture", "two columns"])
@pytest.mark.parametrize("rank", [0, "all"])
@pytest.mark.parametrize("places", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_every_place_resumes_on_any_number_of_ranks_with_nothing_lost_or_repeated(
    case: str, rank: Any, places: int
) -> None:
    options = CASES[case]
    whole = Counter(flat(made(**options)))
    ranks = [made("all", 3, **options)] if rank == "all" else [made(r, 3, **options) for r in range(3)]
    running, done = [iter(sampler) for sampler in ranks], Counter[int]()
    for number in range(places):
        for other in ((1, 8), (2, 3))[number % 2]:
            rest = Counter[int]()
            for r in range(other):
                resumed = made(r, other, **options)
                resumed.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())))
                assert resumed.state_dict() == ranks[0].state_dict()
                with warnings.catch_warnings(record=True) as repeated:
                    warnings.simplefilter("always")
                    remaining, batches = resumed.remaining, list(resumed.optimizer_steps(resumed))
                assert sum(map(len, batches)) == remaining
                assert [len(step) for step in batches] == counts_of(resumed)
                rest += Counter(flat(flat(batches)))
            if repeated:  # fewer samples were left of a step than there are ranks
                rest = rest & (whole - done)
            assert done + rest == whole, (number, other)
        for iterator in running:
            done += Counter(next(iterator))


def test_a_step_that_is_stopped_again_and_again_on_other_ranks_goes_on() -> None:
    whole, done = Counter(flat(made())), Counter[int]()
    long = {"tokens_per_step": 14000}
    state = made(**long).state_dict()
    assert state["inside_step"] == []
    for world in (3, 2, 2, 1, 5, 1, 4):
        ranks = [made(rank, world, **long) for rank in range(world)]
        for sampler in ranks:
            sampler.load_state_dict(state)
            done += Counter(next(iter(sampler)))
        assert all(sampler.state_dict() == ranks[0].state_dict() for sampler in ranks)
        state = ranks[0].state_dict()
    assert [world for world, *_ in state["inside_step"]] == [3, 2, 1, 5, 1, 4]  # two stops on 2 ranks are one segment
    last = made(**long)
    last.load_state_dict(state)
    copies = [copy.copy(last), copy.deepcopy(last), pickle.loads(pickle.dumps(last))]
    rest = list(last)
    assert all(list(one) == rest for one in copies)
    assert done + Counter(flat(rest)) == whole


@pytest.mark.parametrize("case", ["default", "padded", "mixture", "schedule", "more than needed"])
def test_every_step_can_be_asked_for_whatever_ranks_delivered_it(case: str) -> None:
    """Steps of one batch on each rank, through stops inside optimizer steps on other ranks, and of the next epoch."""
    options, delivered, state = CASES[case], list[list[list[int]]](), made(**CASES[case]).state_dict()
    for world, steps in ((3, 2), (2, 2), (2, 1), (1, 4), (4, 1), (3, 10**6)):
        ranks = [made(rank, world, **options) for rank in range(world)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        before, coming = len(delivered), [ranks[0].step(len(delivered) + number) for number in range(2)]
        delivered += [list(row) for row in zip(*(islice(sampler, steps) for sampler in ranks), strict=True)]
        assert delivered[before:][:2] == coming[:steps]
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        assert state["step"] == len(delivered)
    for sampler in (ranks[-1], made(0, 1, **options)):
        sampler.load_state_dict(state)
        assert [sampler.step(number) for number in range(len(delivered))] == delivered
        following = [made(rank, 2, **options) for rank in range(2)]
        for other in following:
            other.set_epoch(1)
        next_epoch = [next(iter(other)) for other in following]
        assert sampler.step(len(delivered), num_replicas=2) == next_epoch


def test_a_step_keeps_the_micro_batches_that_it_had_where_their_number_changes() -> None:
    before = made(0, 2, accumulate=9)
    delivered = [[batch] for batch in islice(before, 12)]
    after = made(0, 2, accumulate=7)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    rest = list(after)
    assert [change.get("accumulate") for change in after.state_dict()["run"]] == [9, 7]
    assert [[after.step(number)[0]] for number in range(12)] == delivered
    assert [after.step(12 + number)[0] for number in range(len(rest))] == rest


def test_whole_optimizer_steps_can_be_skipped() -> None:
    steps, ranks = of_all_ranks(2), [made(rank, 2) for rank in range(2)]
    counts = counts_of(ranks[0])
    running = [iter(sampler) for sampler in ranks]
    begun = [[next(iterator) for iterator in running] for _ in range(counts[0])]
    skipped = [sampler.skip(counts[1] + counts[2]).tolist() for sampler in ranks]
    assert skipped[0] == skipped[1]
    assert sorted(skipped[0]) == sorted(samples_of(steps[1]) + samples_of(steps[2]))
    rest = [list(row) for row in zip(*running, strict=True)]
    assert begun + rest == flat(steps[:1] + steps[3:])
    resumed = made(0, 2)
    resumed.load_state_dict(json.loads(json.dumps(ranks[0].state_dict())))
    assert [resumed.step(number) for number in range(len(begun + rest))] == begun + rest


def test_a_part_of_an_optimizer_step_cannot_be_skipped() -> None:
    sampler = made(0, 2)
    state = sampler.state_dict()
    with pytest.raises(
        ValueError, match=r"skip\(\) must begin and end between two optimizer steps, got one that divides"
    ):
        sampler.skip(1)
    assert sampler.state_dict() == state
    next(iter(sampler))
    with pytest.raises(ValueError, match="must begin and end between two optimizer steps"):
        sampler.skip(counts_of(sampler)[0])
    assert list(sampler) == list(made(0, 2))


def test_between_two_steps_the_rest_of_the_epoch_is_the_same_steps_on_other_ranks() -> None:
    sampler = made(0, 3)
    steps = iter(sampler.optimizer_steps(sampler))
    for _ in range(4):
        next(steps)
    state = sampler.state_dict()
    assert set(state) == {"version", "seed", "epoch", "position", "fingerprint", "step", "starts", "run", "inside_step"}
    assert state["inside_step"] == []
    for world in WORLDS:
        ranks = [made(rank, world) for rank in range(world)]
        for one in ranks:
            one.load_state_dict(state)
        of_rank = [[flat(step) for step in one.optimizer_steps(one)] for one in ranks]
        rest = [sorted(flat(step)) for step in zip(*of_rank, strict=True)]
        assert rest == [samples_of(step) for step in of_all_ranks(world)[4:]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tail='split'. the last batches hold too few:UserWarning")
@given(case=cases(), share=st.floats(1.0, 9.0), padded=st.booleans(), drops=st.booleans(), seed=st.integers(0, 3))
@examples(30)
def test_the_laws_hold_for_any_sizes(case: Any, share: float, padded: bool, drops: bool, seed: int) -> None:
    sizes, budget = case
    assume(len(sizes) and sizes.max() > 0)
    tokens = int(sizes.max() * share) + 1
    options = {"sizes": sizes, "max_total_size": budget, "tokens_per_step": tokens, "seed": seed}
    options |= {"tail": "drop"} if drops else {}
    options |= PADDED if padded else {}
    expected: list[list[int]] | None = None
    for world in WORLDS:
        try:
            ranks = [list(one.optimizer_steps(one)) for one in (made(rank, world, **options) for rank in range(world))]
        except ValueError as error:
            if "too few" in str(error) or "must leave a whole step" in str(error):
                continue
            raise
        steps = [[list(row) for row in zip(*step, strict=True)] for step in zip(*ranks, strict=True)]
        found = [samples_of(step) for step in steps]
        expected = expected or found
        assert found[:-1] == expected[:-1]
        assert sorted({*found[-1]}) == expected[-1]
        # Samples that are too few for all ranks are given to some of them once more.
        assert found == expected or (not drops and len(found[-1]) == world * len(steps[-1]))
        assert len({len(rank) for rank in ranks}) == 1
        for number, step in enumerate(steps):
            for batch in flat(step):
                cost = sizes[batch].max() * len(batch) if padded else sizes[batch].sum()
                assert batch
                assert cost <= budget
            if number < len(steps) - 1 or drops:
                assert abs(int(sizes[expected[number]].sum()) - tokens) <= sizes.max()
    if expected is not None and not drops:
        assert sorted(flat(expected)) == list(range(len(sizes)))


def test_steps_of_a_few_large_samples_take_fewer_micro_batches_where_they_can() -> None:
    sizes = np.tile([*[90] * 10, *[10] * 90], 3)  # the steps of small samples need fewer batches than those of large
    sampler = made(0, 5, sizes=lambda: sizes, shuffle=False, max_total_size=100, tokens_per_step=900)
    assert counts_of(sampler) == [2] * 6
    large = made(0, 6, sizes=lambda: np.full(60, 60), max_total_size=100, tokens_per_step=480)
    with pytest.raises(ValueError, match="gives a step of 8 samples, too few for 2 micro-batches on each of 6 ranks"):
        len(large)
    uneven = [100] * 12 + [100] + [10] * 10
    sampler = made(0, 6, sizes=lambda: np.array(uneven), shuffle=False, max_total_size=150, tokens_per_step=1200)
    assert counts_of(sampler) == [2, 1]


def test_the_global_batch_stays_when_the_number_of_ranks_changes() -> None:
    steps = {world: of_all_ranks(world, tokens_per_step=7000) for world in (8, 6)}
    accumulate = {world: made(0, world, tokens_per_step=7000).accumulate for world in steps}
    assert accumulate == {8: 2, 6: 3}
    assert [samples_of(step) for step in steps[8]] == [samples_of(step) for step in steps[6]]


def test_the_ranks_of_a_micro_batch_have_like_work() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 603)
    assert made(0, 8, sizes=sizes).report().imbalance < 1.02
    assert made(0, 8, sizes=sizes, **PADDED).report().imbalance < 1.1
    assert made(0, 8, work=half_as_much_work).report().imbalance < 1.02


def test_the_ranks_have_like_work_where_the_budget_leaves_little_room() -> None:
    sizes = np.minimum(np.random.default_rng(0).lognormal(np.log(360), 0.8, 20_000), 2048).astype(int)
    tight = made(0, 8, sizes=lambda: sizes, max_total_size=16_384, tokens_per_step=2**20 - 2**12)
    assert counts_of(tight)[:-1] == [8] * (len(counts_of(tight)) - 1)
    assert tight.report().imbalance < 1.0003


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=40),
    columns=st.integers(1, 2),
    most=st.none() | st.integers(1, 9),
    ranks=st.integers(1, 4),
    more=st.integers(0, 2),
)
@examples(100)
def test_a_step_fits_into_the_micro_batches_that_it_was_promised_and_into_more(
    sizes: list[tuple[int, int]], columns: int, most: int | None, ranks: int, more: int
) -> None:
    table, budgets = np.array(sizes)[:, :columns], np.array([60, 40])[:columns]
    given_sizes, budget = (table, budgets.tolist()) if columns > 1 else (table[:, 0], 60)
    sized = prepare(given_sizes, budget, Options(max_items=most))
    samples = np.arange(len(table))
    accumulate = fewest_micro_batches(sized, [samples], ranks) + more
    packed = pack_step(sized, samples, ranks, accumulate)
    assert packed is not None
    assert sorted(packed[0].tolist()) == samples.tolist()
    assert len(packed[1]) - 1 == min(len(samples), ranks * accumulate)
    for start, stop in pairwise(packed[1].tolist()):
        assert 0 < stop - start <= (most or len(samples))
        assert (table[packed[0][start:stop]].sum(axis=0) <= budgets).all()


def test_a_schedule_changes_the_tokens_at_its_step_in_the_middle_of_an_epoch() -> None:
    sampler = made(0, 4, tokens_per_step=[(0, 2500), (5, 5000)])
    first = [int(SIZES[flat(step)].sum()) * 4 for step in sampler.optimizer_steps(sampler)]
    assert np.allclose(first[:5], 2500, rtol=0.1)
    assert np.allclose(first[5:-1], 5000, rtol=0.1)
    assert counts_of(sampler)[:-1] == [2] * 5 + [3] * (len(first) - 6)
    assert [sampler.tokens_at(step) for step in (0, 4, 5, 10**6)] == [2500, 2500, 5000, 5000]
    sampler.set_epoch(1)
    assert counts_of(sampler)[0] == 3  # the second epoch begins in the second stage
    assert sampler.num_optimizer_steps(1) < sampler.num_optimizer_steps(0) == len(first)


def test_accumulate_follows_the_batches() -> None:
    sampler = made(0, 4, tokens_per_step=[(0, 2500), (5, 5000)])
    assert sampler.accumulate == 2
    seen = [sampler.accumulate for _ in sampler]
    assert seen == flat([count] * count for count in counts_of(sampler))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_gets_whole_steps_from_a_loader_that_reads_ahead(workers: int) -> None:
    sampler = made(0, 4, tokens_per_step=[(0, 2500), (5, 5000)])
    loader: Any = DataLoader(
        range(len(SIZES)),  # type: ignore[arg-type]  # has a length and indices
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=workers,
    )
    expected = list(made(0, 4, tokens_per_step=[(0, 2500), (5, 5000)]))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        steps = list(sampler.optimizer_steps(loader))
        if epoch == 0:
            assert flat(steps) == expected
        assert [len(step) for step in steps] == counts_of(sampler)


def plain_loader(sampler: OptimizerStepBatchSampler) -> Any:
    return DataLoader(range(len(SIZES)), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]  # see above


def test_an_epoch_that_is_taken_batch_by_batch_warns_once() -> None:
    sampler = made()
    with pytest.warns(UserWarning, match="nothing asked which batches belong to a step") as caught:
        batches = list(plain_loader(sampler))
    steps = sampler.num_optimizer_steps()
    assert steps < len(batches)
    assert f"{len(batches)} batches" in str(caught[0].message)
    assert f"{steps} optimizer steps" in str(caught[0].message)
    assert [warning.filename for warning in caught] == [__file__]
    sampler.set_epoch(1)
    assert list(plain_loader(sampler))  # no second warning


@pytest.mark.parametrize(
    "use",
    [
        lambda sampler: list(sampler.optimizer_steps(plain_loader(sampler))),
        lambda sampler: [sampler.accumulation, *plain_loader(sampler)],
        lambda sampler: [sampler.accumulate for _ in plain_loader(sampler)],
        lambda sampler: list(islice(plain_loader(sampler), len(sampler) - 1)),
        list,
    ],
    ids=["optimizer_steps", "accumulation", "accumulate", "a break", "no loader"],
)
def test_whoever_asks_for_steps_or_only_looks_is_not_warned(use: Callable[[Any], Any]) -> None:
    assert use(made())


def test_where_each_batch_is_a_step_or_the_number_was_given_there_is_no_warning() -> None:
    single = made(0, 8, tokens_per_step=8 * 300)
    assert len(list(plain_loader(single))) == single.num_optimizer_steps()
    assert list(plain_loader(made(accumulate=12)))


def test_a_loader_of_other_batches_is_an_error() -> None:
    sampler = made()
    with pytest.raises(RuntimeError, match=r"the loader must give the batches of this sampler, got 1 of"):
        list(sampler.optimizer_steps([[0]]))
    with pytest.raises(RuntimeError, match="got more of them"):
        list(sampler.optimizer_steps([*made(), [0]]))


def test_a_state_that_does_not_say_how_a_step_was_packed_is_refused() -> None:
    sampler = made(0, 2)
    next(iter(sampler))
    state = sampler.state_dict()
    assert state["inside_step"] == [[2, sampler.accumulate, state["position"]]]
    broken = [{"inside_step": inside} for inside in (None, [], [[2, 8]], [[2, 8, 1]], "x", [[0, 8, 3]])]
    for wrong in broken:
        fresh = made()
        with pytest.raises(ValueError, match=r"state\['inside_step'\] must tell how"):
            fresh.load_state_dict(state | wrong)
        assert list(fresh) == list(made())
    place = next(sampler.batches_from()).place._replace(plan_state=())
    with pytest.raises(ValueError, match="place must tell how"):
        next(sampler.batches_from(place))
    begun = list(islice(made(0, 2), 4))
    fresh = made(0, 2)
    fresh.load_state_dict(made(0, 2).state_dict(len(flat(begun)) + len(flat(islice(made(1, 2), 4)))))
    assert begun + list(fresh) == list(made(0, 2))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({"tokens_per_step": 0}, ValueError, "tokens_per_step must be more than 0"),
    "no number": ({"tokens_per_step": "1M"}, TypeError, "tokens_per_step must be a real number, got '1M'"),
    "infinite": ({"tokens_per_step": float("inf")}, ValueError, "tokens_per_step must be more than 0 and less than"),
    "no stages": ({"tokens_per_step": []}, ValueError, "or a list of .first step, tokens., got an empty list"),
    "no pair": ({"tokens_per_step": [7000]}, TypeError, r"tokens_per_step\[0\] must be a pair .first step, tokens."),
    "late": ({"tokens_per_step": [(5, 7000)]}, ValueError, r"\[0\]\[0\], the first step of a stage, must be 0, got 5"),
    "backwards": ({"tokens_per_step": [(0, 7000), (9, 8000), (9, 9000)]}, ValueError, "must be more than 9, the one"),
    "a sample fills it": ({"tokens_per_step": 99}, ValueError, "must be more than 99, the size of the longest sample"),
    "none": ({"tokens_per_step": None}, TypeError, "tokens_per_step must be a real number, got None"),
    "repeats": ({"tail": "pad"}, ValueError, "tail must be one of split, drop, got 'pad'"),
    "strategy": ({"strategy": "packed"}, TypeError, "no argument 'strategy'|unexpected keyword argument 'strategy'"),
    "accumulate nothing": ({"accumulate": 0}, ValueError, "accumulate must be an int >= 1, got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_at_once(case: str) -> None:
    options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        made(**options)


def drawn() -> Any:
    return RandomSampler(range(9))


LATER: dict[str, tuple[Callable[[], Any], str]] = {
    "too few micro-batches": (lambda: made(accumulate=3), "accumulate=3 must be at least 9 for steps of 4000 tokens"),
    "too few samples": (lambda: made(0, 99), "gives a step of .* samples, too few for 1 micro-batch on each of 99"),
    "no whole step": (lambda: made(tail="drop", tokens_per_step=10**6), "tail='drop' must leave a whole step"),
    "an order that cannot be read again": (
        lambda: made(
            sampler=lambda: RandomSampler(range(9)), tokens_per_step=[(0, 7000), (5, 9000)]
        ).num_optimizer_steps(1),
        "epoch must be 0 for this sampler, got 1",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_what_the_ranks_or_the_order_make_impossible_is_refused_before_the_first_batch(case: str) -> None:
    make, message = LATER[case]
    with pytest.raises(ValueError, match=message):
        len(make())


def test_too_few_samples_at_the_end_are_given_to_some_ranks_once_more() -> None:
    sizes = np.full(103, 10)
    with pytest.warns(UserWarning, match="the last batches hold too few samples for one on each of 8 ranks"):
        steps = of_all_ranks(8, sizes=lambda: sizes, tokens_per_step=200, max_total_size=50)
    assert [len(set(samples_of(step))) for step in steps] == [20, 20, 20, 20, 20, 3]
    assert len(samples_of(steps[-1])) == 8


def test_no_samples_and_samples_without_tokens_make_steps_too() -> None:
    assert list(made(sizes=lambda: np.zeros(0, int))) == []
    assert made(sizes=lambda: np.zeros(0, int)).num_optimizer_steps() == 0
    assert samples_of(of_all_ranks(2, sizes=lambda: np.zeros(5, int))[0]) == [0, 1, 2, 3, 4]
    zeros = np.concatenate([np.zeros(9, int), SIZES, np.zeros(9, int)])
    assert sorted(flat(made(sizes=lambda: zeros))) == list(range(len(zeros)))


def test_any_way_to_write_the_same_schedule_is_the_same() -> None:
    same = [7000, 7000.0, np.int64(7000), [(0, 7000)], ((0, 7000.0),), [[0, np.float32(7000)]]]
    assert len({made(tokens_per_step=value).fingerprint for value in same}) == 1
    assert made(tokens_per_step=7001).fingerprint != made(tokens_per_step=7000).fingerprint
    assert TokenSchedule.from_argument([(0, 5), (7, 9)]).value == ((0, 5), (7, 9))


def test_batches_are_found_by_their_number() -> None:
    sampler = made(0, 3)
    assert [sampler.batch(number) for number in (0, 17, len(sampler.plan()) - 1)] == [
        sampler.plan()[number].tolist() for number in (0, 17, -1)
    ]
    assert list(made("all", 3)) == [batch.tolist() for batch in sampler.plan()]
    assert len(sampler.worst_batches(3)) == 3


def test_the_first_batch_comes_soon_where_the_number_of_samples_is_limited_too() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(360), 0.8, 60_000).clip(8, 2048).astype(np.int64)

    def calls(max_items: int | None) -> int:
        """Return the function calls to the first batch, which do not depend on the machine."""
        sampler = OptimizerStepBatchSampler(
            lengths, 17_000, num_replicas=8, rank=0, tokens_per_step=2**20, max_items=max_items
        )
        profile = cProfile.Profile()
        profile.runcall(lambda: next(iter(sampler)))
        return sum(entry.callcount for entry in profile.getstats())

    usual = calls(None)
    for max_items in (30, 36, 40, 64):  # a batch holds 34 on average
        assert calls(max_items) < 3 * usual
