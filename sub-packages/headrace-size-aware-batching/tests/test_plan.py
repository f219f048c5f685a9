"""Plans and the figures about them."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
from doors import sampler_with

from headrace.size_aware_batching import (
    BatchPlan,
    DistributedSizeAwareBatchSampler,
    OptimizerStepBatchSampler,
    PlanReport,
)
from headrace.size_aware_batching.report import table

SIZES = np.array([1 + (37 * number) % 211 for number in range(1003)])


def test_a_plan_is_a_sequence_of_batches() -> None:
    plan = DistributedSizeAwareBatchSampler(SIZES, 500).plan()
    batches = [batch.tolist() for batch in plan]
    assert len(plan) == len(batches)
    assert plan[-1].tolist() == batches[-1]
    part = plan[3:9:2]
    assert [batch.tolist() for batch in part] == batches[3:9:2]
    assert part.report().samples == sum(map(len, batches[3:9:2]))
    assert len(plan[:0]) == plan[:0].report().batches == 0
    with pytest.raises(IndexError):
        plan[len(plan)]
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(plan))] == batches


def test_a_report_counts_batches_samples_and_steps() -> None:
    sampler = DistributedSizeAwareBatchSampler([4, 1, 3, 2, 5], 5, strategy="sequential", shuffle=False)
    report = sampler.plan().report(2)
    assert (report.batches, report.samples, report.items_min, report.items_max) == (3, 5, 1, 2)
    assert (report.size, report.padded, report.padding) == (15, 19, 1 - 15 / 19)
    assert (report.fill, report.largest, report.over_budget) == (1, 5, 0)
    assert (report.num_replicas, report.steps) == (2, 2)


@pytest.mark.parametrize(
    ("sizes", "budget", "options", "fewest"),
    [
        ([60] * 4, 100, {}, 4),
        ([60] * 4 + [40] * 4 + [45], 100, {}, 5),
        ([60, 20, 20, 20, 20, 20, 20], 100, {}, 2),
        ([60, 20, 20, 20, 20, 20, 20], 100, {"max_items": 2}, 4),
        ([[60, 1]] * 3 + [[1, 60]] * 2, (100, 100), {}, 3),
        ([0.25, 0.25, 0.6], 0.75, {}, 2),
        ([200, 60], 100, {"oversize": "own_batch"}, 2),
        ([200, 60], 100, {"oversize": "skip"}, 1),
        ([250, 60], 100, {"oversize": "split"}, 4),
        ([50, 50, 20, 20, 20], 100, {"strategy": "bucketed", "cost": "padded"}, 2),
        ([50, 50, 20, 20, 20], 100, {"strategy": "bucketed", "cost": "padded", "max_items": 2}, 3),
        ([5, 5, 2, 2, 2], 100, {"strategy": "bucketed", "cost": lambda n, longest: 10 * n * longest}, 2),
        ([1], math.inf, {}, 1),
    ],
)
def test_a_report_says_how_few_batches_there_could_be(
    sizes: Any, budget: Any, options: dict[str, Any], fewest: int
) -> None:
    report = DistributedSizeAwareBatchSampler(sizes, budget, **options).report()
    assert report.fewest == fewest <= report.batches


def test_a_report_prints_as_a_table() -> None:
    reports = {name: DistributedSizeAwareBatchSampler(SIZES, 500).report() for name in ("one", "other")}
    lines = table(reports).splitlines()
    assert lines[0].split() == ["one", "other"]
    unseen = 5  # size and sizes are one line, and so on; and there are no labels
    assert len(lines) == 1 + len(PlanReport.__dataclass_fields__) - unseen
    assert str(reports["one"]).splitlines()[2].split() == ["samples", "1,003"]


def test_padding_is_printed_where_batches_are_padded() -> None:
    reports = {
        "sum": DistributedSizeAwareBatchSampler(SIZES, 500, strategy="bucketed", cost="sum").report(),
        "padded": DistributedSizeAwareBatchSampler(SIZES, 500, strategy="bucketed", cost="padded").report(),
    }
    lines = {line[:7].strip(): line.split()[-2:] for line in table(reports).splitlines()[1:]}
    assert lines["cost"] == ["sum", "padded"]
    assert lines["padding"] == ["-", f"{reports['padded'].padding:.2%}"]
    assert lines["padded"] == ["-", f"{reports['padded'].padded:,.0f}"]


@pytest.mark.parametrize(("world", "error"), [(0, ValueError), (2.5, TypeError)])
def test_a_report_for_no_whole_number_of_ranks_is_refused(world: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"num_replicas must be an int >= 1, got {world}"):
        DistributedSizeAwareBatchSampler(SIZES, 500).plan().report(world)


def test_reports_count_every_budget() -> None:
    graphs = np.array([[1, 10]] * 12)
    report = DistributedSizeAwareBatchSampler(graphs, (100, 30), strategy="sequential").plan().report()
    assert (report.budget, report.largest, report.size, report.fill) == (30, 30, 120, 1.0)
    assert report.fills == (0.03, 1.0)
    assert report.budgets == (100, 30)
    assert "fill 3.00% and 100.00% of 100 and 30" in repr(report)
    assert (report.sizes, report.largests) == ((12, 120), (3, 30))
    cells = report.cells()
    assert [cells[name] for name in ("size", "budget", "largest", "fill")] == [
        "12 120",
        "100 30",
        "3 30",
        "3.00% 100.00%",
    ]
    over = DistributedSizeAwareBatchSampler(
        [[1, 1], [1, 50], [1, 1]], (100, 30), strategy="sequential", oversize="own_batch"
    )
    assert over.plan().report().over_budget == 1


def test_imbalance_is_measured_by_the_work_that_steps_are_balanced_by() -> None:
    def imbalance(work: list[float]) -> float:
        steps = np.array(work[: len(work) // 4 * 4]).reshape(-1, 4)
        return float((steps.max(axis=1) / steps.mean(axis=1)).mean())

    work = SIZES + 8 * SIZES**2.0 / 500
    plan = DistributedSizeAwareBatchSampler(SIZES, 500, num_replicas=4, rank=0).plan()
    assert plan.report().imbalance == pytest.approx(imbalance([work[batch].sum() for batch in plan]))
    padded = DistributedSizeAwareBatchSampler(SIZES, 500, strategy="bucketed", cost="padded").plan()
    by_longest = imbalance([len(batch) * work[batch].max() for batch in padded])
    assert padded.report(4).imbalance == pytest.approx(by_longest)
    pairs = DistributedSizeAwareBatchSampler(np.stack([SIZES, SIZES], axis=1), (500, 900)).plan()
    assert pairs.report(4).imbalance == pytest.approx(imbalance([SIZES[batch].sum() for batch in pairs]), rel=1e-5)


def test_a_cost_function_has_a_fill_too() -> None:
    sampler = DistributedSizeAwareBatchSampler(
        SIZES, 60_000, strategy="bucketed", cost=lambda n, longest: 1000 + 8 * n * longest
    )
    report = sampler.plan().report()
    costs = [1000 + 8 * len(batch) * int(SIZES[batch].max()) for batch in sampler.plan()]
    assert report.largest == max(costs) <= 60_000
    assert report.fill == pytest.approx(np.mean(costs) / 60_000)
    assert report.over_budget == 0


def test_co_occurrence_is_one_for_random_batches_and_many_for_equal_ones() -> None:
    by_chance = np.random.default_rng(0).permutation(4000)
    offsets, sizes = np.arange(0, 4001, 8), np.ones(4000, int)
    first = BatchPlan(np.arange(4000), offsets, sizes, (8,))
    assert first.report(other=BatchPlan(by_chance, offsets, sizes, (8,))).co_occurrence == pytest.approx(1, abs=0.2)
    assert first.report(other=first).co_occurrence == pytest.approx(3999 / 7)
    assert np.isnan(first.report().co_occurrence)


def test_a_report_says_how_alike_successive_steps_are() -> None:
    sizes = np.array([1, 1, 3, 1, 5, 3, 7, 9, 2])
    plan = BatchPlan(np.arange(9), np.arange(0, 10), sizes, (9,))
    means = [1, 2, 4, 8]  # of steps of two; one batch is left over
    assert plan.report(2).autocorrelation == pytest.approx(np.corrcoef(means[:-1], means[1:])[0, 1])
    assert np.isnan(plan.report(4).autocorrelation)
    assert "autocorrelation" in str(plan.report(2))
    assert np.isnan(BatchPlan(np.arange(9), np.arange(0, 10), np.full(9, 0.1), (9,)).report(1).autocorrelation)


STEPS: dict[str, Any] = {"tokens_per_step": 1900, "num_replicas": 2, "rank": 0}


@pytest.mark.slow
def test_a_report_says_what_optimizer_steps_hold() -> None:
    sampler = OptimizerStepBatchSampler(SIZES, 500, **STEPS)
    steps = sampler.report().optimizer_steps
    assert steps is not None
    ranks = [OptimizerStepBatchSampler(SIZES, 500, **(STEPS | {"rank": rank})) for rank in range(2)]
    found = [[*one.optimizer_steps(one)] for one in ranks]
    tokens = [sum(SIZES[i] for rank in step for batch in rank for i in batch) for step in zip(*found, strict=True)]
    assert steps.steps == sampler.num_optimizer_steps() == len(tokens)
    assert steps.tokens_asked == (1900,)
    assert (steps.tokens_min, steps.tokens_max) == (min(tokens[:-1]), max(tokens[:-1]))
    assert steps.tokens_mean == np.mean(tokens[:-1])
    assert steps.tokens_last == tokens[-1]
    assert steps.largest_deviation == max(abs(held - 1900) for held in tokens[:-1])
    assert (steps.micro_batches_min, steps.micro_batches_max) == (
        min(len(step) for step in found[0]),
        max(len(step) for step in found[0]),
    )
    assert sampler.plan()[:3].report().optimizer_steps is None  # a part of the batches ends anywhere


def test_a_report_says_what_a_schedule_asks_for_in_an_epoch() -> None:
    schedule = [(0, 2000), (5, 3000)]
    sampler = OptimizerStepBatchSampler(SIZES, 500, **(STEPS | {"tokens_per_step": schedule, "tail": "drop"}))
    for epoch, asked in ((0, (2000, 3000)), (1, (3000,))):
        steps = sampler.report(epoch).optimizer_steps
        assert steps is not None
        assert steps.tokens_asked == asked
        assert steps.tokens_min <= steps.tokens_last <= steps.tokens_max
        assert steps.largest_deviation <= SIZES.max()


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, STEPS, {"strategy": "bucketed", "cost": "sum"}])
def test_a_report_says_where_a_curriculum_stands(more: dict[str, Any]) -> None:
    sampler = sampler_with(SIZES, 500, curriculum=80, **more)
    first, second = (sampler.report(epoch).curriculum for epoch in (0, 1))
    assert first is not None
    assert second is not None
    assert (first.steps, second.steps) == (80, 80)
    assert first.share_at_start == pytest.approx(0.01)
    assert first.share_at_start < first.share_at_end == second.share_at_start <= second.share_at_end <= 1
    behind = sampler.report(90).curriculum
    assert behind is not None
    assert (behind.share_at_start, behind.share_at_end) == (1, 1)


def test_steps_and_curriculum_are_printed() -> None:
    reports = {
        "with": OptimizerStepBatchSampler(SIZES, 500, curriculum=80, **STEPS).report(),
        "without": DistributedSizeAwareBatchSampler(SIZES, 500).report(),
    }
    lines = {line[:23].strip(): line[23:] for line in table(reports).splitlines()[1:]}
    steps = reports["with"].optimizer_steps
    assert steps is not None
    assert lines["optimizer steps"].split() == [str(steps.steps), "-"]
    assert lines["tokens asked"].split() == ["1,900", "-"]
    assert lines["tokens off at most"].split() == [f"{round(steps.largest_deviation):,}", "-"]
    assert lines["tokens min mean max"].split() == [
        *(f"{round(tokens):,}" for tokens in (steps.tokens_min, steps.tokens_mean, steps.tokens_max)),
        "-",
    ]
    assert lines["tokens of the last"].split() == [f"{steps.tokens_last:,.0f}", "-"]
    assert lines["micro batches"].split() == [str(steps.micro_batches_min), str(steps.micro_batches_max), "-"]
    assert lines["curriculum"].split() == ["80", "steps", "-"]
    assert lines["shortest that may come"].split()[::2] == ["1.0%", "-"]
