"""The plan of one optimizer step: its laws for every input, and how near to the best it is."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies_of_sizes import Case, cases, examples

from headrace.size_aware_batching import StepPlan, plan_step
from headrace.size_aware_batching.planning.packing import martello_toth

Sizes = NDArray[np.int64]


def batches_of(plan: StepPlan) -> list[NDArray[np.int64]]:
    return [batch for rank in plan.micro_batches for batch in rank]


def fewest_possible(sizes: Sizes, budget: int) -> int:
    """Volume and L2, by the book: every alpha that is a size, and 0."""
    least = -(-int(sizes.sum()) // budget)
    for alpha in {0, *sizes[sizes <= budget // 2].tolist()}:
        large = sizes[sizes > budget - alpha]
        middle = sizes[(sizes <= budget - alpha) & (sizes > budget / 2)]
        small = sizes[(sizes >= alpha) & (sizes <= budget / 2)]
        room = len(middle) * budget - int(middle.sum())
        least = max(least, len(large) + len(middle) + max(0, -(-(int(small.sum()) - room) // budget)))
    return max(1, least)


def check_laws(
    plan: StepPlan, sizes: Any, budget: Any, ranks: int, multiple: int = 1, cost: str = "sum", max_items: int = 10**9
) -> None:
    """Each sample once, no budget exceeded, as many on every rank, none empty, and figures that are true."""
    sizes = np.asarray(sizes)
    batches = batches_of(plan)
    count = plan.num_micro_batches
    assert len(plan.micro_batches) == ranks
    assert {len(rank) for rank in plan.micro_batches} == {count}
    assert count % multiple == 0
    assert count >= plan.fewest >= 1
    assert min(len(batch) for batch in batches) > 0
    joined = np.concatenate(batches)
    expected = Counter(range(len(sizes))) + Counter(plan.repeated.tolist())
    assert Counter(joined.tolist()) == expected
    assert np.array_equal(joined[plan.restore], np.arange(len(sizes)))
    own = set(plan.oversize.tolist())
    for rank, number in itertools.product(range(ranks), range(count)):
        batch = plan.micro_batches[rank][number]
        assert len(batch) <= max_items
        chosen = sizes[batch]
        costs = chosen.sum(axis=0) if cost == "sum" else len(chosen) * chosen.max(axis=0)
        assert np.allclose(plan.cost[rank, number], costs)
        if own & set(batch.tolist()):
            assert (chosen > 0).sum() == 1
        else:
            assert np.all(costs <= budget)
    assert plan.imbalance >= plan.bound >= 0
    mean = plan.work.sum() / ranks
    value = plan.work.max(axis=0).sum() if plan.meet == "micro_batch" else plan.work.sum(axis=1).max()
    assert plan.imbalance == pytest.approx(value / mean if mean else 1)
    assert str(plan.num_micro_batches) in repr(plan)


def small_step(generator: np.random.Generator) -> dict[str, Any]:
    """Arguments of a small random step, of any kind."""
    count, budget = int(generator.integers(1, 40)), int(generator.integers(1, 60))
    least = int(generator.integers(0, 2))
    largest = int(generator.integers(least, budget + 1))
    sizes = generator.integers(least, largest + 1, count)
    kind = int(generator.integers(6))
    max_total_size: Any = budget
    if kind == 0:
        sizes = np.stack([sizes, generator.integers(0, 9, count)], axis=1)
        max_total_size = [budget, 16]
    options: dict[str, Any] = {}
    if kind == 1:
        options["cost"] = "padded"
    if kind == 2:
        options["max_items"] = int(generator.integers(1, 9))
    if generator.random() < 0.5:
        options["work"] = generator.integers(0, 100, count) if generator.random() < 0.5 else generator.random(count)
    return {
        "sizes": sizes,
        "max_total_size": max_total_size,
        "num_replicas": int(generator.integers(1, 7)),
        "multiple_of": int(generator.integers(1, 3)),
        "meet": ("micro_batch", "step")[int(generator.integers(2))],
        "pad": bool(generator.integers(2)),
        **options,
    }


def planned(step: dict[str, Any]) -> StepPlan | None:
    """Return the plan, None where there are too few samples and nothing else is wrong."""
    try:
        return plan_step(**step)
    except ValueError as error:
        if step["pad"] or "pad=True" not in str(error):
            raise
    return None


@pytest.mark.parametrize("count", [300, pytest.param(1_000_000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(3 * 60 * 60)
def test_no_random_step_breaks_a_law(count: int, request: pytest.FixtureRequest) -> None:
    generator = np.random.default_rng(request.config.getoption("seed"))
    for _ in range(count):
        step = small_step(generator)
        plan = planned(step)
        if plan is None:
            continue
        check_laws(
            plan,
            step["sizes"],
            step["max_total_size"],
            step["num_replicas"],
            step["multiple_of"],
            step.get("cost", "sum"),
            step.get("max_items", 10**9),
        )


@examples(150)
@given(cases(), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["micro_batch", "step"]), st.booleans())
def test_each_sample_once_and_within_the_budget(case: Case, ranks: int, multiple: int, meet: Any, padded: bool) -> None:
    sizes, budget = case
    cost: Any = "padded" if padded else "sum"
    if len(sizes):
        plan = plan_step(sizes, budget, num_replicas=ranks, multiple_of=multiple, meet=meet, cost=cost, pad=True)
        check_laws(plan, sizes, budget, ranks, multiple, cost)
        if not padded:
            assert plan.num_micro_batches >= fewest_possible(sizes, budget) / ranks


@examples(100)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_the_lower_bound_is_that_of_martello_and_toth(sizes: list[int], budget: int) -> None:
    assert martello_toth(np.array(sizes), budget) >= fewest_possible(np.array(sizes), budget)
