"""Plots of a mixture: its report, and its shares over a run. They need matplotlib, the ``plot`` extra."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from headrace.weighted_sampler._mixture_arguments import MixtureSpec
from headrace.weighted_sampler._shared.display import counted
from headrace.weighted_sampler.report import MAX_SHOWN, MixtureReport, SourceReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE, ORANGE = "#c9ced6", "#1f6fb4", "#e8833a"


def plot_mixture(report: MixtureReport) -> "Figure":
    """Plot the requested and delivered share and the coverage of each source.

    Args:
        report: Result of ``WeightedDistributedSampler.report()``. The plot shows the 40 sources with the most
            deliveries.

    Returns:
        A matplotlib figure, for ``figure.savefig(path)``.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If ``report`` is not a `MixtureReport`, for example if it is the sampler.
    """
    figure_of = _matplotlib("plot_mixture")
    if not isinstance(report, MixtureReport):
        raise TypeError(f"report must be a MixtureReport from sampler.report(), got {type(report).__name__}")
    shown = _most_drawn(report.sources)
    figure = figure_of(figsize=(11, 2 + 0.35 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _shares(left, shown)
    _seen(right, shown)
    left.set_yticks(range(len(shown)), [line.name for line in shown])
    left.set_ylim(len(shown) - 0.4, -0.6)
    suffix = f" ({MAX_SHOWN} most drawn of {len(report.sources)} sources)" if len(report.sources) > MAX_SHOWN else ""
    total = sum(line.delivered for line in report.sources)
    figure.suptitle(
        f"Epoch {report.epoch}: {counted(total, 'sample')} over {counted(report.num_replicas, 'rank')}{suffix}"
    )
    return figure


def plot_run(spec: MixtureSpec, epochs: int | None, samples: int | None = None) -> "Figure":
    """Plot each source's share by position, over ``epochs`` or over ``samples``."""
    figure_of = _matplotlib("plot")
    last = spec.stages[-1].start
    shown = epochs if epochs is not None else 1 if spec.drops else last // spec.epoch_length + 2
    end = shown * spec.epoch_length if samples is None else samples
    length = spec.epoch_length if samples is None else 1  # of a unit of the axis
    periods = range(0, end, spec.epoch_length) if spec.drops else [0]
    changes = [
        (begin + stage.start, row)
        for begin in periods
        for stage, row in zip(spec.stages, _shares_of(spec), strict=True)
    ]
    inside = [(position, row) for position, row in changes if position < end]
    positions = [*(position / length for position, _ in inside), end / length]
    rows = [*(row for _, row in inside), inside[-1][1]]
    order = sorted(range(len(rows[0])), key=lambda source: -sum(row[source] for row in rows))
    names, first = [part.name for part in spec.sources.parts], sorted(order[:MAX_SHOWN])
    figure = figure_of(figsize=(11, max(5, 1 + 0.22 * len(first))), layout="constrained")  # room for all names
    axes = figure.subplots()
    axes.stackplot(
        positions,
        [[row[source] for row in rows] for source in first],
        labels=[names[source] for source in first],
        step="post",
    )
    free = 0.0  # where the next name is clear of the one before
    for leaving in spec.leaving:
        if leaving.position < end:
            at = leaving.position / length
            axes.axvline(at, color="black", linewidth=0.8, linestyle=":")
            axes.text(max(at, free), 1.01, f"{leaving.name} leaves", rotation=30, fontsize=8)
            free = max(at, free) + 0.025 * end / length
    axes.set(
        xlabel="epoch" if samples is None else "samples",
        ylabel="share of the " + ("samples" if spec.tokens is None else "tokens"),
        xlim=(0, end / length),
        ylim=(0, 1),
    )
    if samples is not None:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _shares_of(spec: MixtureSpec) -> list[list[float]]:
    """The share of each source in each stage: of the tokens if weights refer to tokens."""
    means: Sequence[Fraction] = spec.means or [Fraction(1)] * len(spec.sources.parts)
    amounts = [[float(share * mean) for share, mean in zip(row, means, strict=True)] for row in spec.requested]
    return [[amount / sum(row) for amount in row] for row in amounts]


def _matplotlib(name: str) -> "type[Figure]":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"{name} needs matplotlib, which is not installed: pip install 'headrace-weighted-sampler[plot]'"
        ) from error
    return Figure


def _most_drawn(sources: Sequence[SourceReport]) -> Sequence[SourceReport]:
    most = sorted(range(len(sources)), key=lambda place: -sources[place].delivered)[:MAX_SHOWN]
    return [sources[place] for place in sorted(most)]


def _percent(share: float) -> str:
    return f" {share:.1%}" if share >= 0.001 or not share else f" {share:.1e}"


def _shares(axes: "Axes", shown: Sequence[SourceReport]) -> None:
    places = range(len(shown))
    axes.barh([place - 0.2 for place in places], [line.asked for line in shown], 0.4, color=GREY, label="asked for")
    bars = axes.barh(
        [place + 0.2 for place in places], [line.share for line in shown], 0.4, color=BLUE, label="delivered"
    )
    axes.bar_label(bars, labels=[_percent(line.share) for line in shown])
    axes.set(title="Share of the epoch", xlabel="share")
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-3, 3))
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.6 / len(shown) - 0.05))
    _finish(axes)


def _seen(axes: "Axes", shown: Sequence[SourceReport]) -> None:
    epochs = [(line.seen + line.repeats) / line.size if line.size else 0.0 for line in shown]
    bars = axes.barh(range(len(shown)), epochs, 0.6, color=ORANGE)
    axes.bar_label(bars, labels=[f" {line.coverage:.0%} seen, {line.repeats:,} repeats" for line in shown])
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(title="Times each source was drawn since epoch 0", xlabel="draws / samples")
    axes.margins(x=0.9)  # room for the labels
    _finish(axes)


def _finish(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_xmargin() < 0.2:
        axes.margins(x=0.2)
