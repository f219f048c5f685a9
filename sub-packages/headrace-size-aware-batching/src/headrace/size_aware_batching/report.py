"""Figures about the batches of an epoch, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._validation import UNLIMITED
from headrace.size_aware_batching.planning.costs import CountedCost, SumCost, as_cost, reduced
from headrace.size_aware_batching.planning.distribution import autocorrelation, n_steps
from headrace.size_aware_batching.planning.pieces import shares_of
from headrace.size_aware_batching.planning.shapes import Shapes
from headrace.size_aware_batching.planning.units import round_up
from headrace.size_aware_batching.sizes.read import effective_sizes

if TYPE_CHECKING:
    from headrace.size_aware_batching.plan import BatchPlan


@dataclass(frozen=True)
class OptimizerStepsReport:
    """Figures about the optimizer steps of an epoch, all ranks and micro-batches of a step together.

    Args:
        steps: Number of optimizer steps.
        tokens_asked: ``tokens_per_step``, one number for each stage of the epoch.
        tokens_min: Tokens of the smallest step. With ``tail="split"`` this and the next two leave out the
            last step, which holds the remainder.
        tokens_mean: Tokens of the mean step.
        tokens_max: Tokens of the largest step.
        tokens_last: Tokens of the last step.
        largest_deviation: Largest difference between the tokens of a step and those asked for; it leaves out the same
            step.
        micro_batches_min: Micro-batches on each rank of the step that has fewest.
        micro_batches_max: Micro-batches on each rank of the step that has most.
    """

    steps: int
    tokens_asked: tuple[float, ...]
    tokens_min: float
    tokens_mean: float
    tokens_max: float
    tokens_last: float
    micro_batches_min: int
    micro_batches_max: int
    largest_deviation: float

    @classmethod
    def from_plan(cls, plan: BatchPlan) -> OptimizerStepsReport | None:
        """Return the figures of a plan; None without optimizer steps."""
        if plan.steps is None or not len(plan):
            return None
        starts, asked = plan.steps.starts, plan.steps.asked
        held = reduced(np.add, samples_of_plan(plan)[:, 0], starts)
        whole = held if plan.tail == "drop" or len(held) == 1 else held[:-1]
        micro_batches = -(-np.diff(np.searchsorted(plan.offsets, starts)) // plan.num_replicas)
        return cls(
            steps=len(held),
            tokens_asked=tuple(dict.fromkeys(asked)),
            tokens_min=float(whole.min()),
            tokens_mean=float(whole.mean()),
            tokens_max=float(whole.max()),
            tokens_last=float(held[-1]),
            micro_batches_min=int(micro_batches.min()),
            micro_batches_max=int(micro_batches.max()),
            largest_deviation=float(np.abs(whole - np.array(asked)[: len(whole)]).max()),
        )

    def cells(self) -> dict[str, str]:
        """Return the figures as they are printed, by name."""
        held = (self.tokens_min, self.tokens_mean, self.tokens_max)
        counts = dict.fromkeys((self.micro_batches_min, self.micro_batches_max))
        return {
            "optimizer_steps": _shown("", self.steps),
            "tokens_asked": " ".join(_shown("", tokens) for tokens in self.tokens_asked),
            "tokens_off_at_most": _shown("", round(self.largest_deviation)),
            "tokens_min_mean_max": " ".join(_shown("", round(tokens)) for tokens in held),
            "tokens_of_the_last": _shown("", self.tokens_last),
            "micro_batches": " ".join(map(str, counts)),
        }


@dataclass(frozen=True)
class CurriculumReport:
    """Where a curriculum stands in an epoch.

    Args:
        steps: Its steps.
        share_at_start: Share of the samples, the shortest ones, that may come at the beginning of the epoch.
        share_at_end: The same at its end; 1 where the curriculum is over.
    """

    steps: int
    share_at_start: float
    share_at_end: float

    def cells(self) -> dict[str, str]:
        """Return the figures as they are printed, by name."""
        shares = (self.share_at_start, self.share_at_end)
        return {
            "curriculum": counted(self.steps, "step"),
            "shortest_that_may_come": " ".join(f"{share:.1%}" for share in shares),
        }


@dataclass(frozen=True)
class LabelReport:
    """Figures about the batches of one label.

    Args:
        label: The label.
        batches: Number of its batches.
        samples: Number of samples in them; pieces of a sample count as samples.
        fill: Mean cost of these batches as a share of the budget, of the column that all batches fill most.
    """

    label: int | str
    batches: int
    samples: int
    fill: float

    @classmethod
    def of_plan(cls, plan: BatchPlan, fills: NDArray[np.float64]) -> tuple[LabelReport, ...]:
        """Return the figures of each label of a plan, by the fill of each batch; none without labels."""
        if plan.labels is None:
            return ()
        names, numbers = plan.labels.names, labels_of_batches(plan)
        batches, samples, filled = (
            np.bincount(numbers, weights, len(names)) for weights in (None, np.diff(plan.offsets), fills)
        )
        return tuple(
            cls(names[label], int(batches[label]), int(samples[label]), float(filled[label] / batches[label]))
            for label in np.flatnonzero(batches).tolist()
        )


@dataclass(frozen=True, repr=False)
class PlanReport:
    """Figures about the batches of an epoch.

    With several budgets, ``size``, ``padded``, ``padding``, ``budget``, ``largest`` and ``fill`` are those of the
    column that fills its budget most; ``sizes``, ``budgets``, ``largests``, ``fills`` and ``over_budget`` are about all
    columns. The table shows those of all columns.

    Args:
        batches: Number of batches.
        fewest: Lower bound of this number: no plan of these samples within the budgets and ``max_items`` has fewer, in
            any order.
        samples: Number of samples in them; pieces of a sample count as samples.
        items_min: Samples in the smallest batch.
        items_max: Samples in the largest batch.
        size: Sum of all sizes.
        padded: Sum over the batches of count times largest size, or of count times length of their ``shapes``, rows
            that are filled up included.
        padding: Share of ``padded`` that is padding. Both are printed as ``-`` where the cost is a sum: samples that
            are concatenated have no padding. So are ``shapes`` and ``shapes_cost``.
        cost: ``"sum"``, ``"padded"`` or ``"function"``.
        budget: Budget of a batch, in the unit of the cost.
        largest: Largest cost of a batch.
        fill: Mean cost of a batch as a share of the budget.
        sizes: Sum of all sizes in each column.
        budgets: All budgets.
        largests: Largest cost of a batch against each budget.
        fills: Fill of each budget.
        over_budget: Batches over one of their budgets: those of samples that exceed it by themselves.
        num_replicas: World size that the following figures are for.
        steps: Steps of the epoch.
        imbalance: Mean over whole steps of the largest rank's work over the mean rank's; 1 is perfect. The work of a
            batch is what the planner balances by: the sum of ``work=`` where that is given. Else it is the sum of
            ``size + 8 size**2 / budget`` over its samples, each counted as the largest if the cost is padded; with a
            cost function ``size + size**2 / (largest of all)`` likewise; with several budgets the sum of its shares
            of them.
        oversize: Samples that exceed a budget by themselves; with ``oversize="split"`` those that are cut.
        skipped: Number of these that are left out.
        co_occurrence: How often, relative to chance, two samples that share a batch also share one in another epoch; 1
            is fully random. NaN if the plan was not compared with that of another epoch.
        shapes: Number of distinct (count, length) shapes of the padded batches.
        shapes_cost: ``padded`` relative to its value without the limit ``shapes=``; 1 if there is no limit, NaN if the
            plan was not compared with one without it.
        optimizer_steps: Of an `OptimizerStepBatchSampler`: what the optimizer steps hold, else None.
        curriculum: With ``curriculum``: which samples may come in the epoch, else None.
        autocorrelation: Correlation between the mean sizes of successive whole steps: near 1, successive steps hold
            samples of similar size; 0 is random. NaN with fewer than three steps, or if all have the same mean.
        balanced_ranks: Number of ranks for which the order of the batches balances the steps: the argument, or that
            with which the run began, or would begin now. None with ``"sequential"`` and ``tokens_per_step``.
        labels: With ``by``: figures of each label that has batches. The table shows their number, and the label whose
            batches are least full.
    """

    batches: int
    fewest: int
    samples: int
    items_min: int
    items_max: int
    size: float
    padded: float
    padding: float
    cost: str
    budget: float
    largest: float
    fill: float
    sizes: tuple[float, ...]
    budgets: tuple[float, ...]
    largests: tuple[float, ...]
    fills: tuple[float, ...]
    over_budget: int
    num_replicas: int
    steps: int
    imbalance: float
    oversize: int
    skipped: int
    co_occurrence: float = math.nan
    shapes: int = 0
    shapes_cost: float = 1.0
    optimizer_steps: OptimizerStepsReport | None = None
    curriculum: CurriculumReport | None = None
    autocorrelation: float = math.nan
    balanced_ranks: int | None = None
    labels: tuple[LabelReport, ...] = ()

    @classmethod
    def from_plan(
        cls,
        plan: BatchPlan,
        num_replicas: int,
        other: BatchPlan | None = None,
        without_shapes: BatchPlan | None = None,
    ) -> PlanReport:
        """Return the report of a plan for a world size."""
        counts = np.diff(plan.offsets)
        costs = batch_costs(plan)
        shares = costs / np.array(plan.budget)
        fills = shares.mean(axis=0) if len(plan) else np.zeros(len(plan.budget))
        column = int(fills.argmax())
        column_of_sizes = min(column, plan.sizes.shape[-1] - 1) if plan.sizes.ndim == 2 else 0
        sizes = samples_of_plan(plan).sum(axis=0)
        size = float(sizes[column_of_sizes])
        shapes = padded_shapes(plan)
        padded = elements(shapes, column_of_sizes)
        unlimited = padded if plan.shapes is None else math.nan
        if without_shapes is not None:
            unlimited = elements(padded_shapes(without_shapes), column_of_sizes)
        steps = relative_work(plan, num_replicas)
        oversize = 0 if plan.oversize is None else len(plan.oversize)
        return cls(
            batches=len(plan),
            fewest=fewest_batches(plan),
            samples=int(counts.sum()),
            items_min=int(counts.min(initial=UNLIMITED)) if len(plan) else 0,
            items_max=int(counts.max(initial=0)),
            size=size,
            padded=padded,
            padding=1 - size / padded if padded else 0.0,
            cost=as_cost(plan.cost).name,
            budget=float(plan.budget[column]),
            largest=float(costs[:, column].max(initial=0)),
            fill=float(fills[column]),
            sizes=tuple(sizes.tolist()),
            budgets=tuple(map(float, plan.budget)),
            largests=tuple(costs.max(axis=0, initial=0).tolist()),
            fills=tuple(fills.tolist()),
            over_budget=int((costs > np.array(plan.budget)).any(axis=1).sum()),
            num_replicas=num_replicas,
            steps=sum(n_steps(count, num_replicas, plan.tail) for count in np.diff(runs_of_steps(plan)).tolist()),
            imbalance=float(steps.max(axis=1).mean()) if len(steps) else 1.0,
            oversize=oversize,
            skipped=oversize if plan.skipped else 0,
            co_occurrence=math.nan if other is None else co_occurrence(plan, other),
            shapes=len(np.unique(shapes, axis=0)),
            shapes_cost=padded / unlimited if unlimited else 1.0,
            optimizer_steps=OptimizerStepsReport.from_plan(plan),
            curriculum=plan.curriculum,
            autocorrelation=likeness_of_steps(plan, num_replicas, column_of_sizes),
            balanced_ranks=plan.balanced_ranks,
            labels=LabelReport.of_plan(plan, shares[:, column]),
        )

    def __str__(self) -> str:
        return table({"": self})

    @never_raises
    def __repr__(self) -> str:
        padding = "" if self.cost == SumCost.name else f", padding {self.padding:.2%}"
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        fills = " and ".join(f"{fill:.2%}" for fill in self.fills)
        budgets = " and ".join(f"{budget:,.10g}" for budget in self.budgets)
        return (
            f"{type(self).__name__}({counted(self.batches, 'batch')} of {counted(self.samples, 'sample')}, fill "
            f"{fills} of {budgets}{padding}, {counted(self.num_replicas, 'rank')} x {counted(self.steps, 'step')}, "
            f"imbalance {self.imbalance:.4f}{skipped})"
        )

    def cells(self) -> dict[str, str]:
        """Return the figures as they are printed, by name."""
        names = [field.name for field in fields(self) if field.name != "labels"]
        cells = {name: _shown(name, getattr(self, name)) for name in names}
        for name in ("size", "budget", "largest", "fill"):
            cells[name] = cells.pop(f"{name}s")
        if self.labels:
            least = min(self.labels, key=lambda each: each.fill)
            cells["labels"] = _shown("", len(self.labels))
            cells["least_full_label"] = f"{_shown('fill', least.fill)} {least.label!r}"
        of_padding = ("padded", "padding", "shapes", "shapes_cost") if self.cost == SumCost.name else ()
        cells |= dict.fromkeys(of_padding, "-")
        for part in (self.optimizer_steps, self.curriculum):
            if part is not None:
                own = part.cells()
                cells = {name: text for name, text in cells.items() if name not in own} | own
        return cells


def planned_sizes(plan: BatchPlan) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the sizes that were planned, those of pieces where samples are cut, and the place of each entry there."""
    if plan.lengths is None:
        return plan.sizes, plan.indices
    return effective_sizes(plan.lengths, (plan.extra,), (None,)), np.arange(len(plan.lengths))


def samples_of_plan(plan: BatchPlan) -> NDArray[np.float64]:
    """Return the sizes of the plan's samples in its order, shape ``[samples, k]``."""
    table, places = planned_sizes(plan)
    sizes: NDArray[np.float64] = table[places].astype(np.float64)
    return sizes if sizes.ndim == 2 else sizes[:, None]


def padded_shapes(plan: BatchPlan) -> NDArray[np.float64]:
    """Return what each batch is padded to: count and length, or lengths, shape ``[batches, 1 + k]``."""
    counts = np.diff(plan.offsets)
    longest = round_up(reduced(np.maximum, samples_of_plan(plan), plan.offsets), plan.length_multiple)
    if plan.shapes:
        shapes = Shapes.from_pairs(plan.shapes)
        places = shapes.places(longest[:, 0])
        counts, longest = shapes.counts[places], shapes.lengths[places][:, None]
    return np.concatenate([counts[:, None], longest], axis=1).astype(np.float64)


def elements(shapes: NDArray[np.float64], column: int = 0) -> float:
    """Return the sum of count times length."""
    return float((shapes[:, 0] * shapes[:, 1 + column]).sum())


def batch_costs(plan: BatchPlan) -> NDArray[np.float64]:
    """Return the cost of each batch against each budget, shape ``[batches, budgets]``."""
    cost = as_cost(plan.cost, plan.length_multiple)
    if plan.shapes and isinstance(cost, CountedCost):
        counts, longest = padded_shapes(plan).astype(np.int64).T
        return cost.counted(counts, longest)[:, None]
    table, places = planned_sizes(plan)
    return cost.of(table[places].astype(np.float64), plan.offsets)


def batch_work(plan: BatchPlan) -> NDArray[np.float64]:
    """Return the work of each batch, by which the planner balances the ranks, shape ``[batches]``."""
    if not len(plan):
        return np.zeros(0)
    if plan.work is not None:
        own = plan.work[plan.indices]
        if plan.lengths is not None:
            own = own * shares_of(plan.lengths, plan.sizes[plan.indices])
        return reduced(np.add, own, plan.offsets)
    cost = as_cost(plan.cost, plan.length_multiple)
    table, entries = planned_sizes(plan)
    sizes, limits, _ = cost.prepare(table, [*plan.budget], plan.max_items)
    sizes = Shapes.from_pairs(plan.shapes).lengthened(sizes) if plan.shapes else sizes
    work, places = cost.work(sizes[entries], limits), np.arange(len(plan.indices))
    each: NDArray[np.float64] = work(places[None], plan.offsets)[0]
    return each


def fewest_batches(plan: BatchPlan) -> int:
    """Return a number of batches that no plan of the same samples goes below, by sizes, budgets and count alone."""
    if not len(plan):
        return 0
    cost, (table, places) = as_cost(plan.cost, plan.length_multiple), planned_sizes(plan)
    sizes, limits, _ = cost.prepare(table[places], [*plan.budget], plan.max_items)
    return replace(limits, most_items=plan.max_items or UNLIMITED).fewest(sizes)


def relative_work(plan: BatchPlan, num_replicas: int) -> NDArray[np.float64]:
    """Return the work of each rank in each whole step, the mean rank's being 1, shape ``[steps, num_replicas]``."""
    runs = pairwise(runs_of_steps(plan).tolist())
    whole = [np.arange(first, stop - num_replicas + 1, num_replicas) for first, stop in runs]
    starts = np.concatenate([np.zeros(0, np.int64), *whole])
    work = batch_work(plan)[starts[:, None] + np.arange(num_replicas)]
    mean = work.mean(axis=1, keepdims=True)
    relative: NDArray[np.float64] = np.divide(work, mean, out=np.ones_like(work), where=mean > 0)
    return relative


def labels_of_batches(plan: BatchPlan) -> NDArray[Any]:
    """Return the label of each batch by number; 0 without labels."""
    if plan.labels is None:
        return np.zeros(len(plan), np.int64)
    labels: NDArray[Any] = plan.labels.numbers[plan.indices[plan.offsets[:-1]]]
    return labels


def runs_of_steps(plan: BatchPlan) -> NDArray[np.int64]:
    """Return where the runs of batches begin, and the last one ends, that share no step with others."""
    if plan.labels is None or not plan.labels.per_step:
        return np.array([0, len(plan)])
    labels = labels_of_batches(plan)
    return np.concatenate([[0], np.flatnonzero(labels[1:] != labels[:-1]) + 1, [len(plan)]])


def likeness_of_steps(plan: BatchPlan, num_replicas: int, column: int = 0) -> float:
    """Return the correlation of the mean size in a step with that in the next one, over whole steps."""
    whole = len(plan) // num_replicas * num_replicas
    steps = plan.offsets[: whole + 1 : num_replicas]
    return autocorrelation(samples_of_plan(plan)[: steps[-1], column], steps)


def co_occurrence(plan: BatchPlan, other: BatchPlan) -> float:
    """Return how many times as often as by chance samples that share a batch share one in another plan, too.

    All pairs are counted: those that share a batch in both plans, over what two plans with these batch sizes have in
    common on average when samples are drawn at random. NaN where a plan has no batch of two samples.

    >>> from headrace.size_aware_batching import BatchPlan
    >>> sizes, offsets = np.ones(4, int), np.array([0, 2, 4])
    >>> one = BatchPlan(np.array([0, 1, 2, 3]), offsets, sizes, (2,))
    >>> co_occurrence(one, one), co_occurrence(one, BatchPlan(np.array([0, 2, 1, 3]), offsets, sizes, (2,)))
    (3.0, 0.0)
    """
    samples, n_samples = [plan.indices, other.indices], len(plan.sizes)
    if plan.starts is not None and other.starts is not None:  # by piece
        begins = np.append(0, np.cumsum(plan.sizes.astype(np.int64) + 1))  # of the samples, laid end to end
        places = np.concatenate([begins[plan.indices] + plan.starts, begins[other.indices] + other.starts])
        numbers = np.unique(places, return_inverse=True)[1]
        samples, n_samples = np.split(numbers, [len(plan.indices)]), len(numbers)
    batches = [np.full(n_samples, -1, np.int64) for _ in range(2)]
    for batch, own, each in zip(batches, samples, (plan, other), strict=True):
        batch[own] = np.repeat(np.arange(len(each)), np.diff(each.offsets))
    common = (batches[0] >= 0) & (batches[1] >= 0)
    first, second = (batch[common] for batch in batches)
    together = _pairs(np.unique(first * max(1, len(other)) + second, return_counts=True)[1])
    expected = _pairs(np.bincount(first)) * _pairs(np.bincount(second)) / max(1.0, _pairs(np.array([len(first)])))
    return together / expected if expected else math.nan


def table(reports: Mapping[str, PlanReport]) -> str:
    """Return reports side by side, a column each."""
    columns = {name: report.cells() for name, report in reports.items()}
    names = list(dict.fromkeys(name for cells in columns.values() for name in cells))
    left = max(map(len, names))
    widths = {name: max(len(name), *map(len, cells.values())) for name, cells in columns.items()}
    head = "  ".join(["".ljust(left), *(name.rjust(widths[name]) for name in columns)]).rstrip()
    lines = [
        "  ".join(
            [name.replace("_", " ").ljust(left), *(columns[one].get(name, "-").rjust(widths[one]) for one in columns)]
        )
        for name in names
    ]
    return "\n".join([head, *lines] if head else lines)


def _pairs(counts: NDArray[np.int64]) -> float:
    numbers = counts.astype(np.float64)
    return float((numbers * (numbers - 1)).sum() / 2)


def _shown(name: str, value: Any) -> str:
    """Return a figure as text."""
    if isinstance(value, tuple):
        return " ".join(_shown(name.removesuffix("s"), each) for each in value)
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, OptimizerStepsReport | CurriculumReport):  # which have cells of their own
        return ""
    if name in ("fill", "padding"):
        return f"{value:.2%}"
    if name in ("imbalance", "co_occurrence", "shapes_cost", "autocorrelation"):
        return "-" if math.isnan(value) else f"{value:.4f}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"
