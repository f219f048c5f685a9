"""The order of the steps: random by default, balanced for the ranks with which a run began, and kept by a resume."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from doors import sampler_with

from headrace.size_aware_batching import BlockwiseSizeAwareBatchSampler

BUDGET = 16384
# Three short chains for each long one.
CHAINS = np.random.default_rng(0).permutation(
    np.clip(np.random.default_rng(1).lognormal(np.log([120] * 30_000 + [700] * 10_000), 0.4), 20, 2000).astype(int)
)
LONG = 350
LENGTHS = np.clip(np.random.default_rng(2).lognormal(np.log(60), 0.7, 3000), 4, 400).astype(int)


def made(sizes: Any = LENGTHS, budget: int = 1000, cost: Any = "padded", **options: Any) -> Any:
    return sampler_with(sizes, budget, cost=cost, **options)


def blocks(**options: Any) -> Any:
    shards = np.array_split(LENGTHS, 5)
    return BlockwiseSizeAwareBatchSampler(shards, 1000, cost="padded", block=1500, **options)


class Order:
    """An order of another library, read in slices."""

    fingerprint = "order"

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(LENGTHS)

    def take(self, start: int, stop: int) -> Any:
        return np.random.default_rng(self.epoch).permutation(len(LENGTHS))[start:stop]


MAKERS: dict[str, Any] = {
    "padded": made,
    "stratified": lambda **options: made(cost="sum", **options),
    "packed": lambda **options: made(cost="sum", strategy="packed", **options),
    "windows": lambda **options: made(window=500, shuffle=False, **options),
    "order": lambda **options: made(sampler=Order(), window=500, **options),
    "curriculum": lambda **options: made(curriculum=20, **options),
    "blocks": blocks,
}


def dealt(make: Any, world: int, state: Any = None, epoch: int | None = None) -> list[list[int]]:
    """The batches of all ranks, step by step."""
    ranks = []
    for rank in range(world):
        sampler = make(num_replicas=world, rank=rank)
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        if epoch is not None:
            sampler.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "successive steps hold")
            ranks.append(list(sampler))
    return list(chain.from_iterable(zip(*ranks, strict=True)))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("cost", ["padded", "sum"])
def test_a_mixture_of_short_and_long_chains_is_mixed_from_the_first_steps_on(world: int, cost: str) -> None:
    ranks = {"num_replicas": world, "rank": 0}
    usual, of_64 = (made(CHAINS, BUDGET, cost, **options, **ranks) for options in ({}, {"balanced_ranks": 64}))
    report, waves = usual.report(), of_64.report()
    assert abs(report.autocorrelation) < 0.2 < 0.5 < waves.autocorrelation
    assert (report.batches, report.padding, report.fill) == (waves.batches, waves.padding, waves.fill)
    assert report.imbalance < waves.imbalance + 0.002
    steps = [np.concatenate(batches) for batches in zip(*[iter(usual.plan())] * world, strict=False)][:60]
    means = np.array([CHAINS[step].mean() for step in steps])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.35  # of 59 pairs: 2.7 times what chance makes
    share = np.concatenate([CHAINS[step] > LONG for step in steps]).mean()
    assert 0.15 < share < 0.35, "a quarter of the chains"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_resume_on_other_ranks_keeps_the_order(kind: str) -> None:
    make, taken = MAKERS[kind], 6
    ranks = [make(num_replicas=4, rank=rank) for rank in range(4)]
    begun = [list(islice(sampler, taken)) for sampler in ranks]
    state = ranks[0].state_dict()
    ordered = list(chain.from_iterable(zip(*begun, strict=True)))
    rest, following = dealt(make, 4, state), dealt(make, 4, state, epoch=1)
    assert ordered + rest == dealt(make, 4)
    for world in (1, 3, 8):
        whole = len(rest) - 2 * max(world, 4)  # the last steps of an epoch are made of smaller batches
        assert dealt(make, world, state)[:whole] == rest[:whole], world
        whole = len(following) - 2 * max(world, 4)
        assert dealt(make, world, state, epoch=1)[:whole] == following[:whole], world
        assert dealt(make, world)[:20] != dealt(make, 4)[:20], "a run that begins with others has another order"


def test_a_change_in_mid_epoch_keeps_the_ranks_of_the_run() -> None:
    def excluded(world: int) -> list[list[int]]:
        state = began.state_dict()

        def make(**ranks: Any) -> Any:
            sampler = made(**ranks)
            sampler.load_state_dict(state)
            sampler.exclude([7, 8])
            return sampler

        return dealt(make, world)

    began = made(num_replicas=4, rank=0)
    list(islice(began, 5))
    rest = excluded(4)
    assert excluded(1)[:-16] == excluded(8)[:-16] == rest[:-16]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_notebook_with_one_process_tells_the_steps_of_a_run_on_several_ranks(kind: str) -> None:
    make = MAKERS[kind]
    ranks = [make(num_replicas=4, rank=rank) for rank in range(4)]
    steps = list(zip(*ranks, strict=True))
    alone = make()
    assert alone.step(5, num_replicas=4) == list(steps[5]), "a run that has not begun"
    stopped = make(num_replicas=4, rank=2)
    list(islice(stopped, 3))
    alone.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [alone.step(number, num_replicas=4) for number in (1, 9)] == [list(steps[1]), list(steps[9])]


def test_a_run_that_is_resumed_at_its_beginning_begins_with_the_ranks_of_then() -> None:
    begun = made(num_replicas=4, rank=0)
    begun.set_epoch(3)
    batches = iter(begun)
    next(batches)
    state = begun.state_dict(0)
    assert dealt(made, 8, state) == dealt(made, 8, epoch=3)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_default_is_the_number_of_ranks(kind: str) -> None:
    make = MAKERS[kind]

    def asked(**options: Any) -> Any:
        return make(balanced_ranks=8, **options)

    assert dealt(make, 8) == dealt(asked, 8)
    assert dealt(make, 3)[:20] != dealt(asked, 3)[:20]
    state = make(num_replicas=8, rank=0).state_dict()
    assert state["run"][0]["options"]["balanced_ranks"] is None


def test_a_report_tells_the_number_that_it_assumed() -> None:
    cases: list[tuple[dict[str, Any], int]] = [({}, 1), ({"num_replicas": 8, "rank": 0}, 8), ({"balanced_ranks": 6}, 6)]
    for options, number in cases:
        report = made(**options).report()
        assert report.balanced_ranks == made(**options).plan().balanced_ranks == number
        assert f"balanced ranks  {number}".split() in [line.split() for line in str(report).splitlines()]
    run = made(num_replicas=4, rank=0)
    next(iter(run))
    notebook = made()
    notebook.load_state_dict(run.state_dict())
    with pytest.warns(UserWarning, match="balanced for 4 ranks, with which the run began"):
        report = notebook.report()
    assert (report.balanced_ranks, report.num_replicas) == (4, 1)
    without: list[dict[str, Any]] = [{"strategy": "sequential"}, {"tokens_per_step": 9000}]
    for options in without:
        assert made(**options).report().balanced_ranks is None
        assert ["balanced", "ranks", "-"] in [line.split() for line in str(made(**options).report()).splitlines()]


def began_on_64(make: Any) -> Any:
    run = make(num_replicas=64, rank=0)
    next(iter(run))
    return run.state_dict()


@pytest.mark.parametrize("make", [made, blocks])
def test_a_run_that_goes_on_with_fewer_ranks_is_told_of_waves_once(make: Any) -> None:
    resumed = make(num_replicas=1, rank=0)
    resumed.load_state_dict(began_on_64(make))
    with pytest.warns(UserWarning, match=r"similar size: .* for 64 ranks, .* now it has 1 rank\. bal") as told:
        list(resumed)
    assert [warning.filename for warning in told] == [__file__]
    resumed.set_epoch(1)
    list(resumed)  # warnings are errors


def test_a_report_of_a_run_that_goes_on_with_fewer_ranks_warns_once() -> None:
    notebook = made(num_replicas=1, rank=0)
    notebook.load_state_dict(began_on_64(made))
    with pytest.warns(UserWarning, match=r"balanced_ranks=1 makes .* random, with accept={'balanced_ranks'}"):
        assert notebook.report().autocorrelation > 0.5
    notebook.report()
    cured = made(num_replicas=1, rank=0, balanced_ranks=1)
    cured.load_state_dict(began_on_64(made), accept={"balanced_ranks"})
    list(cured)
    assert abs(cured.report(1).autocorrelation) < 0.2


@pytest.mark.parametrize("options", [{"balanced_ranks": 64}, {"curriculum": 100}, {"strategy": "sequential"}])
def test_who_chose_an_order_is_told_nothing(options: dict[str, Any]) -> None:
    sizes = np.sort(LENGTHS) if "strategy" in options else LENGTHS

    def make(**ranks: Any) -> Any:
        return made(sizes, shuffle="strategy" not in options, **options, **ranks)

    resumed = make(num_replicas=1, rank=0)
    resumed.load_state_dict(began_on_64(make))
    list(resumed)
    resumed.report()
