"""A report as a picture; needs the ``plot`` extra."""

from typing import TYPE_CHECKING

from headrace.weighted_sampler.report import MixtureReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE, ORANGE = "#c9ced6", "#1f6fb4", "#e8833a"
MOST = 40  # sources in one picture


def plot_mixture(report: MixtureReport) -> "Figure":
    """Draw asked-for and realised shares, and how much of each source has been seen.

    Args:
        report: Of ``WeightedDistributedSampler.report()``; its first 40 sources are drawn.

    Returns:
        A matplotlib figure, for ``figure.savefig(path)``.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_mixture needs matplotlib, which is not installed: pip install 'headrace-weighted-sampler[plot]'"
        ) from error
    shown = report.sources[:MOST]
    figure = Figure(figsize=(10, 1.6 + 0.35 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _shares(left, report)
    _seen(right, report)
    left.set_yticks(range(len(shown)), [line.name for line in shown])
    left.invert_yaxis()
    more = f" (first {MOST} of {len(report.sources)} sources)" if len(report.sources) > MOST else ""
    total = sum(line.delivered for line in report.sources)
    figure.suptitle(f"Epoch {report.epoch}: {total:,} samples over {report.num_replicas} ranks{more}")
    return figure


def _shares(axes: "Axes", report: MixtureReport) -> None:
    shown = report.sources[:MOST]
    places = range(len(shown))
    axes.barh([place - 0.2 for place in places], [line.asked for line in shown], 0.4, color=GREY, label="asked for")
    bars = axes.barh(
        [place + 0.2 for place in places], [line.share for line in shown], 0.4, color=BLUE, label="delivered"
    )
    axes.bar_label(bars, labels=[f" {line.share:.1%}" for line in shown])
    axes.set(title="Share of the epoch", xlabel="share")
    _finish(axes)


def _seen(axes: "Axes", report: MixtureReport) -> None:
    shown = report.sources[:MOST]
    passes = [(line.seen + line.repeats) / line.size if line.size else 0.0 for line in shown]
    bars = axes.barh(range(len(shown)), passes, 0.6, color=ORANGE)
    axes.bar_label(bars, labels=[f" {line.coverage:.0%} seen, {line.repeats:,} repeats" for line in shown])
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(title="Passes over each source since epoch 0", xlabel="draws / samples")
    axes.margins(x=0.6)  # room for the labels
    _finish(axes, legend=False)


def _finish(axes: "Axes", legend: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.margins(x=0.2)
        axes.legend(frameon=False, loc="lower right")
