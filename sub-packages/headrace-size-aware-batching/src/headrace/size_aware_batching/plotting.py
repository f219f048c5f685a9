"""Pictures of plans and of memory. Needs matplotlib, and is imported only when something is drawn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching.plan import BatchPlan
from headrace.size_aware_batching.report import batch_costs, relative_work, samples_of_plan

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        f"drawing plans needs matplotlib ({error}): pip install headrace-size-aware-batching[plot]"
    ) from error

BLUE, ORANGE, RED, GREY = "#1f6fb4", "#e8833a", "#b3261e", "#666666"
POINTS = 20_000  # samples drawn, about
Y_LABELS = ("share of the batches", "size of the samples", "work, mean rank = 1")


def draw(plans: dict[str, BatchPlan], path: str | Path, num_replicas: int = 8) -> None:
    """Draw plans, by name, side by side into a PNG, PDF or SVG file: fill, sizes against batches, cost by rank."""
    if not plans:
        raise ValueError("plans: got none, expected at least one to draw")
    with mpl.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "font.size": 9}
    ):
        figure = Figure(figsize=(4.2 * len(plans) + 0.6, 9), layout="constrained")
        axes = figure.subplots(3, len(plans), squeeze=False, sharey="row")
        for column, (name, plan) in enumerate(plans.items()):
            draw_fill(axes[0, column], plan, name)
            draw_sizes(axes[1, column], plan)
            draw_ranks(axes[2, column], plan, num_replicas)
        for row, label in enumerate(Y_LABELS):
            axes[row, 0].set_ylabel(label)
        handles, labels = axes[2, 0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
        figure.savefig(path, dpi=110)


def draw_fill(axes: Axes, plan: BatchPlan, name: str) -> None:
    """Draw the fill of the batches, by the fullest of their budgets; the red line is the budget."""
    share = (batch_costs(plan) / np.array(plan.budget)).max(axis=1)
    most = max(1.0, float(share.max(initial=1.0)))
    bins = np.linspace(0, most + 1e-9, 61).tolist()
    axes.hist(share, bins=bins, weights=np.full(len(share), 1 / max(1, len(share))), color=BLUE)
    axes.axvline(1, color=RED, linewidth=1)
    axes.set_title(f"{name or 'plan'}: {counted(len(plan), 'batch')}", fontweight="bold", fontsize=10)
    mean = f", mean {share.mean():.2%}" if len(share) else ""
    axes.set(xlabel=f"cost as a share of the budget{mean}", xlim=(0, 1.02 * most))


def draw_sizes(axes: Axes, plan: BatchPlan) -> None:
    """Draw all samples of as many batches, evenly chosen, as the picture can show."""
    sizes = samples_of_plan(plan)
    batch = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))
    every = max(1, round(len(sizes) / POINTS))
    chosen = batch % every == 0
    area = float(np.clip(4 * (2000 / max(1, int(chosen.sum()))), 0.4, 8))
    for column, color in zip(sizes.T, (BLUE, ORANGE, GREY) * len(sizes.T), strict=False):
        axes.scatter(batch[chosen], column[chosen], s=area, color=color, linewidths=0, rasterized=True)
    axes.set(xlabel="batch" if every == 1 else f"batch (one in {every:,} is drawn)")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def draw_ranks(axes: Axes, plan: BatchPlan, num_replicas: int) -> None:
    """Draw the work of the heaviest and the lightest rank in each whole step, against their mean."""
    high, low = spread(plan, num_replicas)
    marker = "." if len(high) < 60 else ""
    axes.plot(high, color=ORANGE, linewidth=0.8, marker=marker, label="heaviest rank of the step")
    axes.plot(low, color=BLUE, linewidth=0.8, marker=marker, label="lightest rank of the step")
    if not len(high):
        axes.text(0.5, 0.5, "no whole step", transform=axes.transAxes, ha="center", color=GREY)
    heaviest = f", heaviest on average {high.mean():.3f}" if len(high) else ""
    axes.set(xlabel=f"step of {num_replicas} ranks{heaviest}")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def spread(plan: BatchPlan, num_replicas: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest and the smallest work of each whole step, the mean rank's being 1."""
    relative = relative_work(plan, num_replicas)
    return relative.max(axis=1), relative.min(axis=1)


def draw_memory(
    path: str | Path,
    predicted: Sequence[NDArray[np.float64]],
    measured: Sequence[NDArray[np.float64]],
    fits: NDArray[np.bool_],
    factor: float,
    budget: float | None = None,
) -> None:
    """Draw measured against predicted bytes, of the fitted batches and of those for calibration, into a file.

    ``predicted`` is without the margin, ``factor`` one plus it; ``fits``: which fitted batches had enough memory.
    """
    gib = 2.0**30 if max(float(each.max(initial=0)) for each in measured) > 2**30 else 2.0**20
    unit = "GiB" if gib > 2**20 else "MiB"
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(6.4, 4.8), layout="constrained")
        axes = figure.subplots()
        most = max(budget or 0.0, *(float(each.max(initial=0)) for each in predicted)) / gib * 1.05
        axes.plot([0, most], [0, most], color=GREY, linewidth=1, label="predicted")
        axes.plot([0, most], [0, factor * most], color=BLUE, linewidth=1, label=f"upper, margin {factor - 1:.1%}")
        axes.fill_between([0, most], [0, most], [0, factor * most], color=BLUE, alpha=0.12, linewidth=0)
        axes.plot(predicted[0][fits] / gib, measured[0][fits] / gib, "o", color=BLUE, markersize=4, label="fitted")
        axes.plot(predicted[1] / gib, measured[1] / gib, "o", color=ORANGE, markersize=4, label="calibration")
        if not fits.all():
            axes.plot(predicted[0][~fits] / gib, measured[0][~fits] / gib, "x", color=RED, label="out of memory")
        if budget is not None:
            axes.axhline(budget / gib, color=RED, linewidth=1, label="budget")
        axes.set(xlabel=f"predicted, {unit}", ylabel=f"measured, {unit}", xlim=(0, None), ylim=(0, None))
        axes.set_title("Peak memory of a step, a point a batch", loc="left", fontweight="bold", fontsize=10)
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=110)
