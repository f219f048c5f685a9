"""The plan of one optimizer step: its laws for every input, and how near to the best it is."""

import itertools
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from exact_steps import best
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
    assert max(map(len, batches)) <= max_items
    begins = np.cumsum([0, *map(len, batches[:-1])])
    if cost == "sum":
        costs = np.add.reduceat(sizes[joined], begins, axis=0)
    else:
        costs = (np.maximum.reduceat(sizes[joined], begins, axis=0).T * list(map(len, batches))).T
    assert (plan.cost.reshape(costs.shape) == costs).all()
    over = (costs > np.array(budget)).reshape(len(batches), -1).any(axis=1)
    for number in np.flatnonzero(over).tolist():
        assert own & set(batches[number].tolist())
        assert (sizes[batches[number]] > 0).sum() == 1
    assert plan.imbalance >= plan.bound >= 0
    for name, work in plan.works.items():
        mean = work.sum() / ranks
        value = work.max(axis=0).sum() if plan.meet == "micro_batch" else work.sum(axis=1).max()
        assert abs(plan.imbalances[name] - (value / mean if mean else 1)) < 1e-9
    assert str(plan.num_micro_batches) in repr(plan)


def small_step(generator: np.random.Generator) -> dict[str, Any]:
    """Arguments of a small random step, of any kind."""
    count = int(generator.integers(1, 40 if generator.random() < 0.1 else 9))
    budget = int(generator.integers(1, 60))
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


def parts(steps: int, by_night: int) -> pytest.MarkDecorator:
    """Try so many random steps, and many more by night in twenty parts."""
    nightly = [pytest.param(by_night, part, marks=pytest.mark.nightly) for part in range(1, 21)]
    return pytest.mark.parametrize(("steps", "part"), [(steps, 0), *nightly])


@pytest.mark.slow
@parts(1_000, 50_000)
def test_no_random_step_breaks_a_law(steps: int, part: int, request: pytest.FixtureRequest) -> None:
    generator = np.random.default_rng([request.config.getoption("seed"), part])
    for _ in range(steps):
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


def special_step(generator: np.random.Generator) -> dict[str, Any]:
    """Arguments of a small random step with groups, long samples or several kinds of work."""
    count, budget = int(generator.integers(1, 60)), int(generator.integers(1, 50))
    ranks = int(generator.integers(1, 9))
    sizes = generator.integers(0, budget + 1, count)
    long = np.where(generator.random(count) < 0.1, generator.integers(0, budget * ranks + 1, count), sizes)
    options: dict[str, Any] = {}
    kind = int(generator.integers(5))
    if kind == 0:
        options = {"sizes": long, "contexts": [width for width in (1, 2, 4, 8) if width <= ranks]}
    if kind in (1, 2):
        options = {"sizes": long, "oversize": "split"}
    if kind in (2, 3):
        options["group_by"] = generator.integers(0, max(1, count // int(generator.integers(1, 6))), count)
        options["group_on"] = ("rank", "micro_step")[int(generator.integers(2))]
    if kind == 4 or generator.random() < 0.3:
        options["work"] = {"encoder": 10 * generator.random(count), "decoder": generator.integers(0, 50, count)}
    return {
        "sizes": sizes,
        "max_total_size": budget,
        "num_replicas": ranks,
        "multiple_of": int(generator.integers(1, 3)),
        "meet": ("micro_batch", "step")[int(generator.integers(2))],
        **options,
    }


def check_special_laws(plan: StepPlan, step: dict[str, Any]) -> None:
    """Every piece once and in its place, groups together, and no budget exceeded by those who share a micro-batch."""
    ranks, count, sizes = plan.num_replicas, plan.num_micro_batches, step["sizes"]
    assert ranks == step["num_replicas"]
    assert count % step["multiple_of"] == 0
    assert count >= plan.fewest
    covered, places = Counter[int](), dict[int, set[int]]()
    for rank, number in itertools.product(range(ranks), range(count)):
        batch, lengths = plan.micro_batches[rank][number], plan.lengths[rank][number]
        width = int(plan.contexts[rank, number])
        assert len(batch) > 0
        assert lengths.sum() <= step["max_total_size"] * width
        first = rank // width * width
        assert (plan.contexts[first : first + width, number] == width).all()
        assert np.array_equal(plan.micro_batches[first][number], batch)
        for sample, length in zip(batch.tolist(), lengths.tolist(), strict=True) if rank == first else ():
            covered[sample] += length
            if "group_by" in step:
                place = rank if step["group_on"] == "rank" else number
                places.setdefault(int(step["group_by"][sample]), set()).add(place)
    assert [covered[sample] for sample in range(len(sizes))] == sizes.tolist()
    if plan.meet == "step":
        assert (np.diff(plan.contexts, axis=1) <= 0).all()
    assert all(len(found) == 1 for found in places.values())
    joined = np.concatenate(batches_of(plan))[plan.restore]
    starts = np.concatenate([start for rank in plan.starts for start in rank])[plan.restore]
    assert (np.diff(joined) >= 0).all()
    assert (np.diff(starts)[np.diff(joined) == 0] > 0).all()
    assert set(joined.tolist()) == set(range(len(sizes)))
    assert all(plan.imbalances[name] >= plan.bounds[name] >= 0 for name in plan.works)


@pytest.mark.slow
@parts(150, 2_500)
def test_no_random_step_with_groups_or_long_samples_breaks_a_law(
    steps: int, part: int, request: pytest.FixtureRequest
) -> None:
    generator = np.random.default_rng([request.config.getoption("seed"), part])
    kept = 0
    for _ in range(steps):
        step = special_step(generator)
        try:
            plan = plan_step(**step)
        except ValueError as error:
            if not any(reason in str(error) for reason in ("a sample for each", "must leave samples", "every sample")):
                raise
            continue
        kept += 1
        check_special_laws(plan, step)
    assert kept > steps // 2


@pytest.mark.slow
@examples(75)
@given(cases(), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["micro_batch", "step"]), st.booleans())
def test_each_sample_once_and_within_the_budget(case: Case, ranks: int, multiple: int, meet: Any, padded: bool) -> None:
    sizes, budget = case
    cost: Any = "padded" if padded else "sum"
    if len(sizes):
        plan = plan_step(sizes, budget, num_replicas=ranks, multiple_of=multiple, meet=meet, cost=cost, pad=True)
        check_laws(plan, sizes, budget, ranks, multiple, cost)
        if not padded:
            assert plan.num_micro_batches >= fewest_possible(sizes, budget) / ranks


@examples(50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(50, 120))
def test_the_lower_bound_is_that_of_martello_and_toth(sizes: list[int], budget: int) -> None:
    assert martello_toth(np.array(sizes), budget) >= fewest_possible(np.array(sizes), budget)


def lengths(count: int, seed: int = 0, middle: float = 3000, longest: int = 32768) -> Sizes:
    drawn = np.random.default_rng(seed).lognormal(np.log(middle), 0.8, count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def attention(sizes: Sizes, turning: int = 8192) -> Sizes:
    """Work of samples in which both parts, linear and square, are equal at this length."""
    return sizes * turning + sizes**2


def rollouts(count: int, seed: int) -> Sizes:
    generator = np.random.default_rng(seed)
    long = generator.random(count) < 0.3
    return np.where(long, generator.integers(20_000, 32_000, count), lengths(count, seed, 2000, 20_000))


DISTRIBUTIONS: dict[str, Any] = {
    "lognormal": lambda count, seed: (lengths(count, seed), 32768, 8192),
    "rollouts": lambda count, seed: (rollouts(count, seed), 32768, 8192),
    "short": lambda count, seed: (lengths(count, seed, 360, 2048), 16384, 2048),
    "cap = longest": lambda count, seed: (lengths(count, seed), int(lengths(count, seed).max()), 8192),
    "quadratic": lambda count, seed: (lengths(count, seed), 32768, 1000),
}


@pytest.mark.parametrize(("meet", "most"), [("micro_batch", 1.005), ("step", 1.005)])
def test_the_work_is_within_half_a_percent_of_the_bound(meet: Any, most: float) -> None:
    # Of the mean over the distributions, where a micro-batch has four samples or more. A bound may be loose.
    found, worst = [], 0.0
    for distribution in DISTRIBUTIONS.values():
        for seed in range(4):
            sizes, budget, turning = distribution(512, seed)
            plan = plan_step(sizes, budget, num_replicas=8, work=attention(sizes, turning), meet=meet)
            check_laws(plan, sizes, budget, 8)
            assert plan.num_micro_batches == plan.fewest
            if len(sizes) >= 4 * 8 * plan.num_micro_batches:
                found.append(plan.imbalance / plan.bound)
            worst = max(worst, plan.imbalance / plan.bound)
    assert np.mean(found) <= most
    assert worst <= 1.025


@pytest.mark.slow
@pytest.mark.parametrize("meet", ["micro_batch", "step"])
def test_small_steps_are_within_a_few_percent_of_the_best(meet: Any) -> None:
    generator = np.random.default_rng(0)
    ratios: list[float] = []
    while len(ratios) < 100:
        count = int(generator.integers(8, 11))
        ranks, steps = [(2, 2), (2, 3), (3, 2)][int(generator.integers(3))]
        sizes = np.clip(generator.lognormal(3, 0.8, count), 1, 200).astype(np.int64)
        budget = max(int(sizes.max()), int(sizes.sum() / ranks / steps * generator.uniform(1.05, 1.6)))
        related = generator.random() < 0.7
        work = sizes + sizes**2 // int(generator.integers(10, 300)) if related else generator.integers(1, 100, count)
        plan = plan_step(sizes, budget, num_replicas=ranks, work=work, meet=meet, pad=True)
        if len(plan.repeated):
            continue
        possible = (best(sizes, budget, work, ranks, steps, meet) for steps in range(1, plan.num_micro_batches + 1))
        optima = [None if ranks * steps == 1 else value for steps, value in enumerate(possible, 1)]
        assert all(value is None for value in optima[:-1])  # there is no plan of fewer micro-batches
        assert optima[-1] is not None
        ratios.append(plan.imbalance * work.sum() / ranks / optima[-1])
    assert max(ratios) <= 1.015
    assert np.mean(ratios) <= 1.001


def test_the_fewest_micro_batches_are_reached() -> None:
    for seed in range(6):
        sizes = lengths(512, seed)
        plan = plan_step(sizes, 32768, num_replicas=8)
        assert plan.num_micro_batches == plan.fewest == -(-int(sizes.sum()) // (32768 * 8))


def test_the_number_of_micro_batches_is_a_multiple() -> None:
    sizes = lengths(512)
    plan = plan_step(sizes, 32768, num_replicas=8, multiple_of=6)
    check_laws(plan, sizes, 32768, 8, 6)
    assert plan.num_micro_batches == 12


def test_too_few_samples_are_named_or_repeated() -> None:
    with pytest.raises(
        ValueError, match=r"got 3 samples for 1 micro-batch on each of 4 ranks: give at least 4 samples.*pad=True"
    ):
        plan_step([5, 2, 9], 10, num_replicas=4)
    plan = plan_step([5, 2, 9], 10, num_replicas=4, pad=True)
    check_laws(plan, [5, 2, 9], 10, 4)
    assert plan.repeated.tolist() == [1]
    assert "1 repeated" in repr(plan)
    plan = plan_step([5, 2, 9], 10, num_replicas=2, multiple_of=3, pad=True)
    assert plan.repeated.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="at least one sample"):
        plan_step([], 10, num_replicas=4, pad=True)


def test_oversize_samples_are_refused_or_have_a_micro_batch_of_their_own() -> None:
    sizes = [5, 30, 4, 0, 6, 12]
    with pytest.raises(ValueError, match=r"sample 1 has size 30.*oversize='own_batch' or 'split'"):
        plan_step(sizes, 10, num_replicas=2)
    plan = plan_step(sizes, 10, num_replicas=2, oversize="own_batch", work=sizes)
    check_laws(plan, sizes, 10, 2)
    assert plan.oversize.tolist() == [1, 5]
    assert plan.work.max() == 30


def test_oversize_samples_are_split_and_nothing_is_lost() -> None:
    sizes = np.array([5, 30, 4, 0, 6, 12, 1_000])
    plan = plan_step(sizes, 10, num_replicas=2, oversize="split", work=2 * sizes)
    flat = [
        (int(index), int(start), int(length))
        for rank, number in itertools.product(range(2), range(plan.num_micro_batches))
        for index, start, length in zip(
            plan.micro_batches[rank][number], plan.starts[rank][number], plan.lengths[rank][number], strict=True
        )
    ]
    pieces = sorted(flat)
    covered = dict.fromkeys(range(len(sizes)), 0)
    for index, start, length in pieces:
        assert start == covered[index]
        assert 0 <= length <= 10
        covered[index] += length
    assert list(covered.values()) == sizes.tolist()
    assert [flat[place] for place in plan.restore] == pieces
    assert plan.cost.max() <= 10
    assert plan.work.sum() == pytest.approx(2 * sizes.sum())
    with pytest.raises(ValueError, match="needs cost='sum'"):
        plan_step(sizes, 10, num_replicas=2, oversize="split", cost="padded")
    with pytest.raises(ValueError, match=r"shape \[n\]"):
        plan_step(sizes[:, None], [10], num_replicas=2, oversize="split")


@pytest.mark.parametrize("group_on", ["rank", "micro_step"])
@pytest.mark.parametrize("meet", ["micro_batch", "step"])
def test_groups_stay_together(group_on: Any, meet: Any) -> None:
    for seed in range(3):
        sizes = lengths(480, seed)
        groups = np.random.default_rng(seed).permutation(np.arange(480) // 4)
        plan = plan_step(sizes, 32768, num_replicas=8, group_by=groups, group_on=group_on, meet=meet)
        check_laws(plan, sizes, 32768, 8)
        places: dict[int, set[int]] = {}
        for rank, number in itertools.product(range(8), range(plan.num_micro_batches)):
            for group in groups[plan.micro_batches[rank][number]].tolist():
                places.setdefault(group, set()).add(rank if group_on == "rank" else number)
    assert all(len(found) == 1 for found in places.values())


@pytest.mark.parametrize(("meet", "most"), [("micro_batch", 1.03), ("step", 1.005)])
def test_small_groups_on_one_rank_cost_little(meet: Any, most: float) -> None:
    found = []
    for seed in range(4):
        sizes = lengths(512, seed)
        work = attention(sizes)
        plan = plan_step(sizes, 32768, num_replicas=8, work=work, group_by=np.arange(512) // 4, meet=meet)
        found.append(plan.imbalance / plan.bound)
    assert np.mean(found) <= most


def test_large_groups_on_many_ranks_spread_the_longest_samples() -> None:
    sizes = lengths(4096)
    work = attention(sizes, 24_576)
    free = plan_step(sizes, 32768, num_replicas=64, work=work)
    plan = plan_step(sizes, 32768, num_replicas=64, work=work, group_by=np.arange(4096) // 16)
    check_laws(plan, sizes, 32768, 64)
    assert plan.imbalance < 1.07 * free.imbalance


def test_groups_are_named_by_ints_and_strings_in_any_form() -> None:
    names = ["b", "a", "a", "c", "b", "c"]

    def together(group_by: Any) -> list[set[int]]:
        plan = plan_step([5] * 6, 10, num_replicas=3, group_by=group_by)
        return [{*np.concatenate(rank).tolist()} for rank in plan.micro_batches]

    expected = together(np.array([1, 0, 0, 2, 1, 2]))
    forms = (names, tuple(names), np.array(names), np.array(names, object), torch.tensor([1, 0, 0, 2, 1, 2]))
    assert all(together(form) == expected for form in forms)
    assert sorted(map(sorted, together([0, "0", 0, "0", 1, 1]))) == [[0, 2], [1, 3], [4, 5]]
    assert plan_step([5, 5], 10, num_replicas=1, group_by=("a", "b")).num_micro_batches == 1  # no file and its column


def test_groups_that_cannot_be_kept_are_named() -> None:
    with pytest.raises(ValueError, match="got 3 groups of 12 samples"):
        plan_step([5] * 12, 10, num_replicas=4, group_by=np.arange(12) // 4)
    with pytest.raises(ValueError, match="group_by must hold an int or a string for each of 2 samples, got 1"):
        plan_step([5, 5], 10, num_replicas=1, group_by=[1])
    for wrong in ([1, None], np.array(["a", 0.5], object), torch.tensor([0.0, 1.0]), [1, True], np.eye(2)):
        with pytest.raises(TypeError, match=r"group_by must hold .* each of 2 samples, got .* at index [01]"):
            plan_step([5, 5], 10, num_replicas=1, group_by=wrong)
    for unordered in ("ab", {"a", "b"}, {"a": 1, "b": 2}, 5):
        with pytest.raises(TypeError, match=r"group_by must hold .* each of 2 samples, got .* of type"):
            plan_step([5, 5], 10, num_replicas=1, group_by=unordered)
    with pytest.raises(ValueError, match="needs cost='sum'"):
        plan_step([5, 5], 10, num_replicas=1, group_by=[1, 2], cost="padded")


@pytest.mark.parametrize("meet", ["micro_batch", "step"])
def test_two_kinds_of_work_are_balanced_at_once(meet: Any) -> None:
    found = []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        images = np.where(generator.random(512) < 0.6, generator.integers(200, 4000, 512), 0)
        sizes = images + lengths(512, seed, 600, 8000)
        work = {"encoder": attention(images, 4096), "decoder": attention(sizes)}
        plan = plan_step(sizes, 32768, num_replicas=8, work=work, meet=meet)
        check_laws(plan, sizes, 32768, 8)
        assert set(plan.imbalances) == {"encoder", "decoder"}
        assert "encoder" in repr(plan)
        assert "decoder" in str(plan.report())
        for name, values in plan.works.items():
            assert values.sum() == pytest.approx(work[name].sum())
            found.append(plan.imbalances[name] / plan.bounds[name])
    assert np.mean(found) <= 1.01
    assert max(found) <= 1.03


@pytest.mark.parametrize(("meet", "most"), [("micro_batch", (1.3, 1.01)), ("step", (1.01, 1.01))])
def test_a_kind_of_work_that_few_samples_have_is_spread_over_many_ranks(meet: Any, most: tuple[float, float]) -> None:
    generator = np.random.default_rng(0)
    text = np.clip(generator.lognormal(np.log(360), 0.8, 4096), 8, 2048).astype(np.int64)
    images = np.where(generator.random(4096) < 0.3, text * generator.uniform(0.1, 0.9, 4096), 0)
    work = {"encoder": images, "decoder": 24_576 * text + text**2}
    plan = plan_step(text, 4096, num_replicas=64, work=work, meet=meet)
    check_laws(plan, text, 4096, 64)
    assert plan.imbalances["encoder"] < most[0]
    assert plan.imbalances["decoder"] < most[1]
    assert plan.works["encoder"].std() < 0.45 * plan.works["encoder"].mean()


def test_a_sample_longer_than_the_cap_gets_as_many_ranks_as_it_needs() -> None:
    sizes = [*lengths(256).tolist(), 40_000, 100_000, 200_000, 33_000, 33_000]
    plan = plan_step(sizes, 32768, num_replicas=8, contexts=(1, 2, 4, 8), work=sizes)
    table, seen = np.array(sizes), Counter[int]()
    for number in range(plan.num_micro_batches):
        rank = 0
        while rank < 8:
            width = int(plan.contexts[rank, number])
            batch = plan.micro_batches[rank][number]
            assert rank % width == 0
            assert (plan.contexts[rank : rank + width, number] == width).all()
            assert all(np.array_equal(batch, plan.micro_batches[rank + more][number]) for more in range(width))
            assert table[batch].sum() <= width * 32768
            assert plan.cost[rank, number] == pytest.approx(table[batch].sum() / width)
            for sample in batch.tolist():
                assert width == 1 or width / 2 * 32768 < table[sample]
            seen.update(batch.tolist())
            rank += width
    assert seen == Counter(range(len(sizes)))
    assert set(np.unique(plan.contexts)) == {1, 2, 4, 8}
    joined = np.concatenate(batches_of(plan))
    assert np.array_equal(joined[plan.restore], np.arange(len(sizes)))
    assert plan.work.sum() == pytest.approx(table.sum())
    with pytest.raises(ValueError, match="sample 256 has size 300000"):
        plan_step([5] * 256 + [300_000], 32768, num_replicas=8, contexts=(1, 2, 4, 8))
    with pytest.raises(ValueError, match="powers of two up to num_replicas=8"):
        plan_step(sizes, 32768, num_replicas=8, contexts=(1, 3))


@pytest.mark.parametrize("cap", [16_384, 32_768])
def test_ranks_that_share_long_samples_wait_only_at_the_end_of_the_step(cap: int) -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(np.log(4000), 1.2, 2048), 16, 8 * cap).astype(np.int64)
    work = attention(sizes)
    plan = plan_step(sizes, cap, num_replicas=32, contexts=(1, 2, 4, 8), work=work, meet="step")
    assert plan.contexts.max() == 8
    assert (np.diff(plan.contexts, axis=1) <= 0).all()  # so a group is ready when its first rank is
    assert plan.imbalance < 1.005


def test_several_ranks_run_no_more_samples_together_than_a_micro_batch_may_hold() -> None:
    plan = plan_step([11] * 6 + [1] * 30, 10, num_replicas=4, contexts=(1, 4), max_items=2)
    assert max(len(batch) for batch in batches_of(plan)) == 2
    assert (plan.contexts == 4).any(axis=0).sum() == 3  # three of 11 would fit into four budgets


def test_padded_micro_batches_have_samples_of_like_length() -> None:
    sizes = lengths(512)
    for meet in ("micro_batch", "step"):
        plan = plan_step(sizes, 65536, num_replicas=8, cost="padded", meet=meet)
        check_laws(plan, sizes, 65536, 8, cost="padded")
        padded = sum(len(batch) * int(sizes[batch].max()) for batch in batches_of(plan))
        assert padded < 1.25 * sizes.sum()
        assert plan.imbalance < 1.15


def test_a_cost_function_of_several_sizes() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 30, (64, 2))

    def cost(count: int, largest: Any) -> float:
        return float(count * largest[0] + count * largest[1] ** 2)

    plan = plan_step(sizes, 3000, num_replicas=4, cost=cost, length_multiple=4)
    for batch in batches_of(plan):
        assert cost(len(batch), -(-sizes[batch].max(axis=0) // 4) * 4) <= 3000
    assert sorted(np.concatenate(batches_of(plan)).tolist()) == list(range(64))


def test_several_budgets_and_a_limit_of_samples_at_once() -> None:
    generator = np.random.default_rng(0)
    sizes = np.stack([generator.integers(1, 100, 400), generator.integers(1, 900, 400)], axis=1)
    plan = plan_step(sizes, [1000, 8000], num_replicas=4, max_items=16)
    check_laws(plan, sizes, [1000, 8000], 4, max_items=16)
    assert plan.num_micro_batches == plan.fewest


@pytest.mark.parametrize("meet", ["micro_batch", "step"])
def test_a_second_budget_that_says_the_same_changes_nothing(meet: Any) -> None:
    for seed in range(30):
        generator = np.random.default_rng(seed)
        sizes = generator.integers(0, 60, int(generator.integers(40, 400)))
        budget, ranks = int(generator.integers(60, 200)), int(generator.integers(1, 5))
        options: dict[str, Any] = {"num_replicas": ranks, "work": sizes**2, "meet": meet}
        plan = plan_step(sizes, budget, **options)
        other = plan_step(np.stack([sizes, sizes], axis=1), (budget, budget), **options)
        batches = zip(batches_of(plan), batches_of(other), strict=True)
        assert all(np.array_equal(batch, same) for batch, same in batches)


def test_real_sizes_and_unlimited_budgets() -> None:
    sizes = np.random.default_rng(0).random(100)
    plan = plan_step(sizes, 4.0, num_replicas=4)
    assert plan.cost.max() <= 4.0
    plan = plan_step(sizes, float("inf"), num_replicas=4)
    assert plan.num_micro_batches == 1
    huge = plan_step([2**50, 2**50 + 1, 2**49, 3], 2**51, num_replicas=2)
    check_laws(huge, [2**50, 2**50 + 1, 2**49, 3], 2**51, 2)


PINNED = 3646465040  # another one for every change of the planner


def test_the_same_plan_everywhere() -> None:
    # Integers alone decide.
    sizes = np.random.default_rng(7).integers(16, 8000, 300)
    plan = plan_step(sizes, 16384, num_replicas=4, work=attention(sizes))
    again = plan_step(sizes.tolist(), 16384.0, num_replicas=4, work=attention(sizes).astype(float))
    assert [batch.tolist() for batch in batches_of(again)] == [batch.tolist() for batch in batches_of(plan)]
    assert zlib.crc32(np.concatenate(batches_of(plan)).astype("<i8").tobytes()) == PINNED


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert plan_step([5] * 16, 10).num_replicas == 4


def test_the_report_reads_well() -> None:
    sizes = lengths(512)
    report = plan_step(sizes, 32768, num_replicas=8, work=attention(sizes)).report()
    assert report.samples == 512
    text = str(report)
    assert "micro-batches a rank" in text
    assert "at least" in text
    assert f"{report.fill:.2%}" in text
