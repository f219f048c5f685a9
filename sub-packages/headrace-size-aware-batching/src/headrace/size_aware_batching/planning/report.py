"""What a plan is worth, as numbers, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import round_up

if TYPE_CHECKING:
    from headrace.size_aware_batching.plan import BatchPlan

QUADRATIC = 0.0005  # what the square of a size weighs in the work of a sample: attention at usual widths


@dataclass(frozen=True)
class PlanReport:
    """Numbers about the batches of an epoch.

    Args:
        batches: Number of batches.
        samples: Number of samples in them.
        items_min: Samples in the smallest batch.
        items_max: Samples in the largest batch.
        size: Sum of all sizes (of the first column, where there are several).
        padded: Sum over the batches of count times largest size.
        padding: Share of ``padded`` that is no sample's.
        budget: Of a batch, in the unit of the cost.
        largest: Largest cost of a batch by ``cost``; with a cost function, largest sum of sizes.
        fill: Mean cost of a batch as a share of the budget; NaN with a cost function.
        over_budget: Batches over the budget: those of samples that exceed it by themselves.
        ranks: World size that the following hold for.
        steps: Steps of the epoch.
        imbalance: Mean over whole steps of the largest rank's work over the mean rank's, where a sample's work is
            ``size + 0.0005 size**2``; 1 is perfect.
        oversize: Samples that exceed the budget by themselves.
        skipped: How many of them are left out.
    """

    batches: int
    samples: int
    items_min: int
    items_max: int
    size: float
    padded: float
    padding: float
    budget: float
    largest: float
    fill: float
    over_budget: int
    ranks: int
    steps: int
    imbalance: float
    oversize: int
    skipped: int

    @classmethod
    def of(cls, plan: BatchPlan, n_ranks: int) -> PlanReport:
        """Return the report of a plan for a world size."""
        counts, sums, largest = per_batch(plan)
        padded = counts * round_up(largest, plan.length_multiple)
        costs = padded if plan.cost == "padded" else sums
        known = plan.cost in ("sum", "padded")
        some = len(plan) > 0
        oversize = 0 if plan.oversize is None else len(plan.oversize)
        return cls(
            batches=len(plan),
            samples=int(counts.sum()),
            items_min=int(counts.min()) if some else 0,
            items_max=int(counts.max()) if some else 0,
            size=float(sums.sum()),
            padded=float(padded.sum()),
            padding=float(1 - sums.sum() / padded.sum()) if some and padded.sum() else 0.0,
            budget=float(plan.budget[0]),
            largest=float(costs.max()) if some else 0.0,
            fill=float(costs.mean() / plan.budget[0]) if some and known else float("nan"),
            over_budget=int((costs > plan.budget[0]).sum()) if known else 0,
            ranks=n_ranks,
            steps=len(plan) // n_ranks if plan.tail == "drop" else -(-len(plan) // n_ranks),
            imbalance=imbalance(plan, n_ranks),
            oversize=oversize,
            skipped=oversize if plan.skipped else 0,
        )

    def __str__(self) -> str:
        return table({"": self})

    def cells(self) -> dict[str, str]:
        """Return the numbers as they are printed, by name."""
        return {field.name: shown(field.name, getattr(self, field.name)) for field in fields(self)}


def per_batch(plan: BatchPlan) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return each batch's count, sum of sizes and largest size (of the first column)."""
    sizes = first_column(plan)
    if not len(plan):
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    begins = plan.offsets[:-1]
    return np.diff(plan.offsets), np.add.reduceat(sizes, begins), np.maximum.reduceat(sizes, begins)


def first_column(plan: BatchPlan) -> NDArray[np.float64]:
    """Return the sizes of the plan's samples, in its order."""
    sizes = plan.sizes if plan.sizes.ndim == 1 else plan.sizes[:, 0]
    chosen: NDArray[np.float64] = sizes[plan.indices].astype(np.float64)
    return chosen


def work_per_batch(plan: BatchPlan) -> NDArray[np.float64]:
    """Return the work of each batch: of its samples, or of the padded batch where padding is what costs."""
    sizes = first_column(plan)
    if plan.cost != "sum":
        counts, _, largest = per_batch(plan)
        return counts * (largest + QUADRATIC * largest**2)
    work: NDArray[np.float64] = np.add.reduceat(sizes + QUADRATIC * sizes**2, plan.offsets[:-1])
    return work


def imbalance(plan: BatchPlan, n_ranks: int) -> float:
    """Return the mean over whole steps of largest over mean work; 1 where there is no whole step."""
    whole = len(plan) // n_ranks * n_ranks
    if not whole:
        return 1.0
    work = work_per_batch(plan)[:whole].reshape(-1, n_ranks)
    means = np.maximum(work.mean(axis=1), np.finfo(float).tiny)
    return float((work.max(axis=1) / means).mean()) if work.any() else 1.0


def shown(name: str, value: float) -> str:
    """Return a number as text."""
    if name in ("fill", "padding"):
        return f"{value:.2%}"
    if name == "imbalance":
        return f"{value:.4f}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"


def table(reports: dict[str, PlanReport]) -> str:
    """Return reports side by side, a column each."""
    columns = {name: report.cells() for name, report in reports.items()}
    names = [field.name for field in fields(PlanReport)]
    left = max(map(len, names))
    widths = {name: max(len(name), *map(len, cells.values())) for name, cells in columns.items()}
    head = "  ".join(["".ljust(left), *(name.rjust(widths[name]) for name in columns)]).rstrip()
    lines = [
        "  ".join(
            [field.replace("_", " ").ljust(left), *(cells[field].rjust(widths[n]) for n, cells in columns.items())]
        )
        for field in names
    ]
    return "\n".join([head, *lines] if head else lines)


def draw(plans: dict[str, BatchPlan], path: str | Path, n_ranks: int = 8) -> None:
    """Draw plans side by side into a PNG, PDF or SVG file: fill, sizes against batches, cost by rank.

    Needs matplotlib: ``pip install headrace-size-aware-batching[plot]``.

    Args:
        plans: By the names to show.
        path: File to write; its ending says which kind.
        n_ranks: World size of the last row.

    Raises:
        ImportError: If matplotlib is missing or broken.
    """
    try:
        from headrace.size_aware_batching.planning.drawing import draw_plans
    except ImportError as error:
        raise ImportError(
            f"drawing plans needs matplotlib ({error}): pip install headrace-size-aware-batching[plot]"
        ) from error

    draw_plans(plans, Path(path), n_ranks)


__all__: Sequence[str] = ["PlanReport", "draw", "imbalance", "per_batch", "table", "work_per_batch"]
