"""Resuming: from every place, after looking, with an argument changed, and before there is a process group."""

import copy
import inspect
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_worker
from doors import sampler_with
from processes import run_in

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler
from headrace.size_aware_batching.testing import check_resumes

SIZES = np.random.default_rng(0).integers(1, 100, 203)
PADDED = {"strategy": "bucketed", "cost": "padded"}
PAIRS = np.arange(203) // 2
LABELS = np.random.default_rng(1).choice(["text", "code", "speech"], 203, p=[0.7, 0.27, 0.03])


class Order:
    """An order of another library, which knows its epochs and can be sliced."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(SIZES)

    def take(self, start: int, stop: int) -> Any:
        return np.random.default_rng(self.epoch).permutation(len(SIZES))[start:stop]


class WithoutTake(Order):
    take = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(np.random.default_rng(self.epoch).permutation(len(SIZES)).tolist())


del WithoutTake.take
SPLIT = {"oversize": "split", "max_total_size": 40}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "packed": {"strategy": "packed"},
    "padded": PADDED,
    "few shapes": PADDED | {"shapes": 4, "num_replicas": 3, "rank": 2},
    "labels": {"by": LABELS, "num_replicas": 3, "rank": 2},
    "one label a step": {"by": LABELS, "label_per": "step", "num_replicas": 3, "rank": 2},
    "one label a step of slices": {"by": LABELS, "label_per": "step", "sampler": Order, "num_replicas": 2, "rank": 1},
    "groups": {"group_by": PAIRS, "num_replicas": 3, "rank": 2},
    "padded groups": PADDED | {"group_by": PAIRS**2 // 100, "max_total_size": 2500, "num_replicas": 3, "rank": 2},
    "a curriculum": PADDED | {"curriculum": 40, "num_replicas": 2, "rank": 1},
    "a curriculum of mixed sizes": {"curriculum": 40, "num_replicas": 2, "rank": 1},
    "a curriculum of optimizer steps": {"curriculum": 9, "tokens_per_step": 2000, "num_replicas": 2, "rank": 1},
    "in order": {"strategy": "sequential", "shuffle": False},
    "a rank of four": {"num_replicas": 4, "rank": 1},
    "dropped tail": {"num_replicas": 8, "rank": 7, "tail": "drop"},
    "padded tail": {"num_replicas": 8, "rank": 7, "tail": "pad"},
    "an order with slices": {"sampler": Order},
    "tokens in a step": {"tokens_per_step": 2000, "num_replicas": 2, "rank": 1},
    "pieces": SPLIT,
    "pieces of a rank": SPLIT | {"num_replicas": 3, "rank": 2},
    "pieces of an order with slices": SPLIT | {"sampler": Order},
    "pieces of tokens in a step": SPLIT | {"max_length": 10, "tokens_per_step": 400, "num_replicas": 2, "rank": 1},
}


def made(**options: Any) -> Any:
    options = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    return sampler_with(options.pop("sizes", SIZES), **{"max_total_size": 300} | options)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [2, pytest.param(50, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
def test_it_resumes_everywhere(case: str, cuts: int) -> None:
    check_resumes(lambda: made(**CASES[case]), most_cuts=cuts)


LOOKS: dict[str, Callable[[Any], object]] = {
    "repr": repr,
    "str": str,
    "len": len,
    "copy": lambda one: list(copy.copy(one)),
    "deepcopy": lambda one: list(copy.deepcopy(one)),
    "pickle": lambda one: list(pickle.loads(pickle.dumps(one))),
    "a debugger": lambda one: [getattr(one, name, None) for name in dir(one)],
    "inspect": inspect.getmembers,
    "plan": lambda one: one.plan(0),
    "report": lambda one: str(one.report(2)),
    "another iterator that is dropped": iter,
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("case", ["default", "padded", "an order with slices"])
def test_what_only_looks_moves_nothing(case: str, look: str) -> None:
    whole = list(made(**CASES[case]))
    sampler = made(**CASES[case])
    LOOKS[look](sampler)
    batches = iter(sampler)
    begun = list(islice(batches, 3))
    state = sampler.state_dict()
    LOOKS[look](sampler)
    assert sampler.state_dict() == state
    assert begun + list(batches) == whole
    resumed = made(**CASES[case])
    resumed.load_state_dict(state)
    LOOKS[look](resumed)
    assert list(resumed) == whole[3:]


REFUSED: dict[str, list[tuple[dict[str, Any], Any]]] = {  # by the argument: other options, and its other value
    "sizes": [({}, SIZES + 1), ({}, SIZES[:-1]), ({}, SIZES[::-1])],
    "max_total_size": [({}, 301), ({}, 299.5)],
    "strategy": [({"cost": "sum"}, name) for name in ("sequential", "bucketed", "packed")],
    "cost": [({"strategy": "bucketed", "cost": "sum"}, "padded"), (PADDED, lambda n, largest: n * largest**2 / 100)],
    "sampler": [({}, Order)],
    "shuffle": [({}, False)],
    "seed": [({}, 1)],
    "max_items": [({}, 5)],
    "batch_size_multiple": [(PADDED, 4)],
    "length_multiple": [(PADDED, 8)],
    "shapes": [(PADDED, 4), (PADDED | {"shapes": 8}, 4)],
    "oversize": [({}, "skip"), ({}, "own_batch"), ({}, "split"), (SPLIT, "own_batch")],
    "tail": [({}, "drop"), ({}, "pad")],
    "max_length": [({}, 50)],
    "extra_per_sample": [({}, 2)],
    "curriculum": [(PADDED, 100), (PADDED | {"curriculum": 50}, 100)],
    "window": [({}, 50)],
    "balanced_ranks": [({}, 8), ({"balanced_ranks": 8}, 64), ({"balanced_ranks": 8}, 6)],
    "work": [({}, SIZES**2)],
    "by": [({}, LABELS), ({"by": LABELS}, None), ({"by": LABELS}, LABELS[::-1])],
    "label_per": [({"by": LABELS}, "step")],
    "group_by": [({}, PAIRS), ({"group_by": PAIRS}, None), ({"group_by": PAIRS}, np.arange(1, 204) // 2)],
    "tokens_per_step": [
        ({}, 2000),
        ({"tokens_per_step": 2000}, None),
        ({"tokens_per_step": 2000}, [(0, 2000), (5, 3000)]),
    ],
}
ACCEPTED: dict[str, list[dict[str, Any]]] = {  # a resume may change these: the rest is dealt to other ranks
    "num_replicas": [{"num_replicas": 2, "rank": 0}, {"num_replicas": 4, "rank": 0}],
    "rank": [{"num_replicas": 2, "rank": 1}, {"num_replicas": 1, "rank": "all"}],
    "mesh": [{"mesh": type("Mesh", (), {"size": lambda self: 2, "get_local_rank": lambda self: 1})}],
    "accumulate": [{"tokens_per_step": 2000, "accumulate": 9}],
    "plan_cache": [{"plan_cache": "plans"}],
}


def test_every_argument_is_refused_or_accepted_when_it_changes() -> None:
    doors = (DistributedSizeAwareBatchSampler, OptimizerStepBatchSampler)
    arguments = {name for door in doors for name in inspect.signature(door).parameters}
    assert arguments == REFUSED.keys() | ACCEPTED.keys()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in REFUSED for case in range(len(REFUSED[name]))])
def test_another_value_of_an_argument_that_decides_the_batches_is_refused(name: str, case: int) -> None:
    options, value = REFUSED[name][case]
    saved, other = made(**options), made(**options | {name: value})
    batches = iter(saved)
    for _ in range(3):
        next(batches)
    with pytest.raises(ValueError, match=f"state.*{name}"):
        other.load_state_dict(saved.state_dict())
    assert list(other) == list(made(**options | {name: value}))  # a refusal leaves it as it was


def test_a_function_as_cost_is_named_only_if_it_is_another_one() -> None:
    """It is compared by what it allows within the budget, and another one cannot be accepted."""
    sizes = np.arange(10, 210)

    def sampler(budget: int, factor: float = 2.0, sizes: Any = sizes) -> DistributedSizeAwareBatchSampler:
        def cost(count: int, largest: Any) -> float:
            return factor * count * float(largest)

        return DistributedSizeAwareBatchSampler(sizes, budget, cost=cost, strategy="bucketed")

    running = sampler(5000)
    next(iter(running))
    state = running.state_dict()
    with pytest.raises(ValueError, match=r"differs in max_total_size \(here 4000\): .* accept=\['max_total_size'\]"):
        sampler(4000).load_state_dict(state)
    sampler(4000).load_state_dict(state, accept={"max_total_size"})
    other = (
        r"cost \(another function, which cannot be accepted: give that of the run\): construct [^;]*, or start a new"
    )
    for budget in (4000, 5000):
        for accept in ((), {"cost"}, {"cost", "max_total_size"}):
            with pytest.raises(ValueError, match=f"differs in .*{other}") as caught:
                sampler(budget, 2.5).load_state_dict(state, accept=accept)
            assert "accept=" not in str(caught.value)
    for others in (sizes + 5, sizes[:150]):  # of which the function may allow others
        with pytest.raises(ValueError, match=r"differs in .*sizes") as caught:
            sampler(5000, sizes=others).load_state_dict(state)
        assert "another function" not in str(caught.value)


def test_other_balanced_ranks_are_accepted_by_name_and_the_rest_comes_in_their_order() -> None:
    saved = made(num_replicas=1, rank=0)
    delivered = [index for batch in islice(saved, 3) for index in batch]
    changed = made(num_replicas=1, rank=0, balanced_ranks=1)
    changed.load_state_dict(saved.state_dict(), accept={"balanced_ranks"})
    assert changed.step(2) == saved.step(2)
    assert sorted(delivered + [index for batch in changed for index in batch]) == list(range(len(SIZES)))
    assert [change.get("options") for change in changed.state_dict()["run"][1:]] == [{"balanced_ranks": 1}]


@pytest.mark.parametrize("options", [case for cases in ACCEPTED.values() for case in cases])
def test_other_ranks_resume_each_sample_once(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = made(**{name: value for name, value in options.items() if name == "tokens_per_step"})
    batches = iter(saved)
    delivered = [index for batch in islice(batches, 3) for index in batch]
    count = made(**options).num_replicas
    ranks = (
        [options]
        if options.get("rank") == "all"
        else [options | {"num_replicas": count, "rank": r, "mesh": None} for r in range(count)]
    )
    for of_rank in ranks:
        resumed = made(**of_rank)
        resumed.load_state_dict(saved.state_dict())
        delivered += [index for batch in resumed for index in batch]
    assert sorted(delivered) == list(range(len(SIZES)))


def test_a_change_of_the_sizes_afterwards_moves_no_budget() -> None:
    sizes = SIZES.copy()
    sampler = made(sizes=sizes)
    before = list(sampler)
    sizes[:] = 899
    assert list(sampler) == before
    with pytest.raises(ValueError, match="read-only"):
        sampler.sizes[0] = 1


def test_masked_sizes_are_refused_as_nulls_are() -> None:
    masked = np.ma.masked_array(SIZES, mask=SIZES[7] == SIZES)
    with pytest.raises(ValueError, match=r"sizes must hold a value for each sample, got a masked array .* at index"):
        made(sizes=masked)
    assert list(made(sizes=np.ma.masked_array(SIZES))) == list(made())


def test_ranks_come_from_torchruns_environment_until_there_is_a_process_group(tmp_path: Path) -> None:
    answers = [
        run_in({"RANK": str(rank), "WORLD_SIZE": "2"}, rank_worker.before_the_group, tmp_path) for rank in range(2)
    ]
    assert answers[0][0] == answers[1][0] == len(answers[0][1]) == len(answers[1][1])
    assert sorted(index for _, batches in answers for batch in batches for index in batch) == list(range(100))
