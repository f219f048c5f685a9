"""What the quickstart found: a table to read and a picture to show."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from resuming import Outcome

BLUE, ORANGE, GREY, DARK, RED = "#1f6fb4", "#e8833a", "#c9ced6", "#7d8590", "#b3261e"


@dataclass(frozen=True)
class Run:
    """One epoch of training with one way of batching.

    Args:
        name: What the way of batching is called.
        rule: How many samples it puts into a batch, in words.
        counts: Samples in each step.
        real: Tokens of the samples in each step.
        padded: Tokens that the model processed in each step, padding included.
        budget: Tokens a step may hold at most.
        seconds: Wall time of the epoch; where a part of its steps was trained, of so many times more tokens.
        busy: Processor time likewise, in seconds; what else runs on the machine adds less to it.
    """

    name: str
    rule: str
    counts: Sequence[int]
    real: Sequence[int]
    padded: Sequence[int]
    budget: int
    seconds: float
    busy: float

    @property
    def padding(self) -> float:
        """Share of the tokens that are padding."""
        return 1 - sum(self.real) / sum(self.padded)

    @property
    def over(self) -> int:
        """Steps that break the budget."""
        return sum(tokens > self.budget for tokens in self.padded)


@dataclass(frozen=True)
class Share:
    """One source: its samples, how many were drawn, and the tokens that were asked for and drawn."""

    name: str
    size: int
    drawn: int
    asked_tokens: float
    tokens: int


def padding_of(sizes: NDArray[np.int64], batches: Sequence[Sequence[int]]) -> float:
    """Return the share of the tokens in padded batches that are padding."""
    parts = [sizes[list(batch)] for batch in batches]
    return 1 - sum(int(part.sum()) for part in parts) / sum(len(part) * int(part.max()) for part in parts)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the header first, as aligned text: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run_table(runs: Sequence[Run], rest: float) -> str:
    """Return the comparison of the runs; ``rest`` is the padding that ten times as many samples would have."""
    ours = runs[-1]
    rows = [["", *(run.name for run in runs)]]
    rows.append(["samples", *(f"{sum(run.counts):,}" for run in runs)])
    rows.append(["steps", *(f"{len(run.counts):,}" for run in runs)])
    rows.append(["steps over the budget", *(f"{run.over:,}" for run in runs)])
    rows.append(["largest batch, tokens", *(f"{max(run.padded):,}" for run in runs)])
    rows.append(["real tokens", *(f"{sum(run.real):,}" for run in runs)])
    rows.append(["padded tokens (real and padding)", *(f"{sum(run.padded):,}" for run in runs)])
    rows.append(["  times headrace's", *(f"{sum(run.padded) / sum(ours.padded):.1f}" for run in runs)])
    rows.append(["  of them padding", *(f"{run.padding:.1%}" for run in runs)])
    rows.append(["wall time on this machine, s", *(f"{run.seconds:.1f}" for run in runs)])
    rows.append(["  times headrace's", *(f"{run.seconds / ours.seconds:.1f}" for run in runs)])
    rows.append(["processor time, s", *(f"{run.busy:.1f}" for run in runs)])
    rows.append(["  times headrace's", *(f"{run.busy / ours.busy:.1f}" for run in runs)])
    return (
        f"{table(rows)}\nMore samples to choose from leave less padding: ten times as many draws {rest:.1%}.\n"
        "Every fourth of the fixed batches was trained on; their times are scaled up to the epoch. Other work on the\n"
        "machine adds to wall time, little to processor time.\n"
        "Fewer, larger steps may want another learning rate: docs/how-to/loss.md"
    )


def share_table(shares: Sequence[Share]) -> str:
    """Return the tokens asked for and drawn of each source."""
    rows = [["source", "samples", "drawn", "tokens asked for", "tokens drawn", "share"]]
    return (
        f"{table(rows + [share_row(share, shares) for share in shares])}\n"
        "The mixture counts tokens: each source is never further from its share than its longest samples."
    )


def share_row(share: Share, shares: Sequence[Share]) -> list[str]:
    """Return one line of the mixture's table."""
    part = share.tokens / sum(each.tokens for each in shares)
    return [
        share.name,
        f"{share.size:,}",
        f"{share.drawn:,}",
        f"{share.asked_tokens:,.0f}",
        f"{share.tokens:,}",
        f"{part:.2%}",
    ]


def picture(runs: Sequence[Run], shares: Sequence[Share], outcome: Outcome, path: Path, stacked: bool = False) -> None:
    """Draw the comparison, and what became of the run that was killed, into a PNG file; ``stacked`` for a telephone."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(6, 17) if stacked else (13, 10.5), layout="constrained")
        if stacked:
            parts = figure.subfigures(5, 1, squeeze=False, height_ratios=[1, 1, 1, 1, 0.6])
            axes = [part.subplots() for part in parts.flat]
        else:
            grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 0.35])
            places = [grid[0, 0], grid[0, 1], grid[1, 0], grid[1, 1], grid[2, :]]
            axes = [figure.add_subplot(place) for place in places]
        draw_tokens(axes[0], runs)
        draw_time(axes[1], runs)
        draw_steps(axes[2], runs)
        draw_shares(axes[3], shares)
        draw_outcome(axes[4], outcome, 20 if stacked else 60)
        figure.suptitle(headline(runs), fontsize=11 if stacked else 15)
        figure.savefig(path, dpi=110)


def headline(runs: Sequence[Run]) -> str:
    """Return what is the same on every machine: no time."""
    safe, ours = runs[0], runs[-1]
    less = sum(safe.padded) / sum(ours.padded)
    steps = f"headrace takes {len(ours.counts):,} steps instead of {len(safe.counts):,}"
    samples = f"The same {sum(ours.counts):,} samples, the same budget of {ours.budget:,} tokens"
    return f"{samples}:\n{steps}, with {less:.1f} times fewer padded tokens"


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs with their rules below them."""
    return [f"{run.name}\n{textwrap.fill(run.rule, 22)}" for run in runs]


def draw_tokens(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw real tokens and padding, a bar a run."""
    real = [sum(run.real) / 1e6 for run in runs]
    padding = [(sum(run.padded) - sum(run.real)) / 1e6 for run in runs]
    axes.barh(labels(runs), real, color=BLUE, label="real")
    bars = axes.barh(labels(runs), padding, left=real, color=GREY, label="padding")
    axes.bar_label(bars, labels=[f" {run.padding:.0%} padding" for run in runs])
    axes.margins(x=0.2)
    axes.set(title="Tokens that the model processes", xlabel="million tokens")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")


def draw_time(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the time of the epoch, a bar a run: what else runs on a machine adds little to processor time."""
    name, times = "Processor", [run.busy for run in runs]
    if torch.accelerator.is_available():  # of whose time the processor knows nothing
        name, times = "Wall", [run.seconds for run in runs]
    bars = axes.barh([run.name for run in runs], times, color=ORANGE)
    axes.bar_label(bars, labels=[f" {seconds:.1f} s" for seconds in times])
    axes.margins(x=0.15)
    axes.set(title=f"{name} time of the epoch, on this machine", xlabel="seconds")
    axes.invert_yaxis()


def draw_steps(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the tokens of every step, padding included, against the budget: a column a run, a dot a step."""
    budget = runs[0].budget
    for column, (run, color) in enumerate(zip(runs, (DARK, ORANGE, BLUE), strict=True)):
        places = np.linspace(column - 0.35, column + 0.35, len(run.padded))
        axes.plot(places, run.padded, ".", markersize=6, color=color)
    axes.axhline(budget, color=RED, linewidth=1, zorder=1)
    axes.set_xticks(
        range(len(runs)), [f"{run.name}\n{run.over} of {len(run.padded)} steps\nover the budget" for run in runs]
    )
    axes.set_yscale("log")
    axes.set_ylim(top=2 * max(max(run.padded) for run in runs))
    axes.axhspan(budget, axes.get_ylim()[1], color=RED, alpha=0.07, linewidth=0)
    axes.annotate(f"over the budget of {budget:,}", (-0.35, budget), (0, 5), textcoords="offset points", color=RED)
    axes.set(title="Tokens of each step, with the padding", ylabel="tokens", xlim=(-0.5, len(runs) - 0.5))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def draw_shares(axes: Axes, shares: Sequence[Share]) -> None:
    """Draw the tokens asked for and drawn of each source; its samples stand below."""
    places = range(len(shares))
    left = axes.bar([p - 0.2 for p in places], [s.asked_tokens for s in shares], 0.4, color=GREY, label="asked for")
    right = axes.bar([p + 0.2 for p in places], [s.tokens for s in shares], 0.4, color=BLUE, label="drawn")
    axes.bar_label(left, labels=[f"{s.asked_tokens:,.0f}" for s in shares])
    axes.bar_label(right, labels=[f"{s.tokens:,}" for s in shares])
    axes.set_xticks(places, [f"{s.name}\n{s.drawn:,} of {s.size:,} samples" for s in shares])
    axes.set(title="The mixture: exact in tokens, to a sample", ylabel="tokens")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.3)  # room for the legend
    axes.legend(frameon=False)


def draw_outcome(axes: Axes, outcome: Outcome, width: int) -> None:
    """Draw which steps the process that was killed trained, and which the one that resumed; ``width`` in letters."""
    saved, killed, steps = outcome.resumed_from, outcome.killed_at, outcome.steps
    rows = {"first process": (0, saved, BLUE), "second process": (saved, steps, ORANGE)}
    for row, (begin, end, color) in enumerate(rows.values()):
        axes.broken_barh([(begin, end - begin)], (row - 0.35, 0.7), color=color)
    axes.broken_barh([(saved, killed - saved)], (-0.35, 0.7), color=GREY)
    axes.plot(killed, 0, "X", color=RED, markersize=11)
    text = textwrap.fill(f"killed at step {killed}; its last checkpoint is of step {saved}", width)
    axes.annotate(text, (killed, 0), (13, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    title = f"Killed and resumed: {outcome.lost} samples lost, {outcome.repeated} repeated"
    axes.set(title=title, xlabel="step of the epoch", xlim=(0, steps))
