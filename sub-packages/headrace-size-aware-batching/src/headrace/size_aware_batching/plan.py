"""The batches of an epoch as two arrays, and what there is to say about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._budget import round_up

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


@dataclass(frozen=True)
class BatchPlan:
    """All batches of an epoch.

    Args:
        indices: Samples, batch by batch; int32 where that holds them, shape ``[samples]``.
        offsets: Where each batch begins in ``indices`` and where the last one ends, shape ``[batches + 1]``.
        sizes: Size of every sample of the dataset, shape ``[n]`` or ``[n, k]``, in the user's unit.
        budget: What a batch may cost, in the unit of the cost; one entry a column of sizes.
        cost: ``"sum"``, ``"padded"``, or the name of a cost function.
        oversize: Samples that exceed the budget by themselves.
        skipped: Whether these are left out (or else have batches of their own).
        n_ranks: World size for what the report says of steps.
        tail: What happens to batches beyond a multiple of the world size.
        length_multiple: What the length of a padded batch is rounded up to.

    ``len(plan)`` is the number of batches, ``plan[k]`` the samples of batch k, and a slice is a plan again.
    """

    indices: NDArray[Any]
    offsets: NDArray[np.int64]
    sizes: NDArray[Any]
    budget: tuple[float, ...]
    cost: str = "sum"
    oversize: NDArray[np.int64] | None = None
    skipped: bool = False
    n_ranks: int = 1
    tail: str = "split"
    length_multiple: int = 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, batch: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, batch: slice) -> BatchPlan: ...
    def __getitem__(self, batch: int | slice) -> NDArray[Any] | BatchPlan:
        if isinstance(batch, slice):
            return self._part(range(len(self))[batch])
        number = range(len(self))[batch]
        return self.indices[self.offsets[number] : self.offsets[number + 1]]

    def _part(self, numbers: range) -> BatchPlan:
        parts = [self[number] for number in numbers]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]).astype(np.int64)
        indices = np.concatenate(parts) if parts else self.indices[:0]
        fields = {**self.__dict__, "indices": indices, "offsets": offsets}
        return BatchPlan(**fields)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[number] for number in range(len(self)))

    def report(self, n_ranks: int | None = None) -> PlanReport:
        """Return what the plan is worth: fill, padding, largest batch, balance of the steps, what is left out.

        Args:
            n_ranks: World size; the sampler's by default.
        """
        return PlanReport.of(self, self.n_ranks if n_ranks is None else n_ranks)
