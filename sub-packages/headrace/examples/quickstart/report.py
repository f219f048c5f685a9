"""What the quickstart found: a table to read and a picture to show."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from resuming import Outcome

BLUE, ORANGE, GREY, RED = "#1f6fb4", "#e8833a", "#c9ced6", "#b3261e"


@dataclass(frozen=True)
class Run:
    """One epoch of training with one way of batching.

    Args:
        name: What the way of batching is called.
        counts: Samples in each step.
        real: Tokens of the samples in each step.
        padded: Tokens that the model processed in each step, padding included.
        budget: Tokens a step may hold at most.
        seconds: Wall time of the epoch.
        busy: Processor time of the epoch, in seconds; what else runs on the machine adds less to it.
        loss: Mean loss over the last tenth of the steps.
    """

    name: str
    counts: Sequence[int]
    real: Sequence[int]
    padded: Sequence[int]
    budget: int
    seconds: float
    busy: float
    loss: float

    @property
    def fill(self) -> float:
        """Share of the budget that real tokens fill, over all steps."""
        return sum(self.real) / (len(self.real) * self.budget)


@dataclass(frozen=True)
class Share:
    """Draws of one source: how many exist, were asked for and were trained on, and the same for shares of tokens."""

    name: str
    size: int
    asked: float
    drawn: int
    asked_tokens: float
    drawn_tokens: float


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the header first, as aligned text: the first column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run_table(runs: Sequence[Run]) -> str:
    """Return the comparison of the runs; the speed-up is against the first."""
    rows = [["", *(run.name for run in runs)]]
    rows.append(["samples", *(f"{sum(run.counts):,}" for run in runs)])
    rows.append(["steps", *(f"{len(run.counts):,}" for run in runs)])
    rows.append(["real tokens", *(f"{sum(run.real):,}" for run in runs)])
    rows.append(["padded tokens", *(f"{sum(run.padded):,}" for run in runs)])
    rows.append(["fill of the budget", *(f"{run.fill:.1%}" for run in runs)])
    rows.append(["largest batch, tokens", *(f"{max(run.padded):,}" for run in runs)])
    rows.append(["budget, tokens", *(f"{run.budget:,}" for run in runs)])
    rows.append(["last loss", *(f"{run.loss:.2f}" for run in runs)])
    rows.append(["wall time, s", *(f"{run.seconds:.1f}" for run in runs)])
    rows.append(["processor time, s", *(f"{run.busy:.1f}" for run in runs)])
    rows.append(["fewer padded tokens", *(f"{sum(runs[0].padded) / sum(run.padded):.2f} x" for run in runs)])
    rows.append(["speed-up, wall", *(f"{runs[0].seconds / run.seconds:.2f} x" for run in runs)])
    rows.append(["speed-up, processor", *(f"{runs[0].busy / run.busy:.2f} x" for run in runs)])
    return table(rows)


def share_table(shares: Sequence[Share]) -> str:
    """Return asked-for and realised draws for each source."""
    rows = [["source", "samples", "draws asked for", "drawn", "tokens asked for", "tokens drawn"]]
    return table(rows + [share_row(share) for share in shares])


def share_row(share: Share) -> list[str]:
    """Return one line of the mixture's table."""
    parts = [f"{share.asked_tokens:.1%}", f"{share.drawn_tokens:.1%}"]
    return [share.name, f"{share.size:,}", f"{share.asked:,.1f}", f"{share.drawn:,}", *parts]


def picture(runs: Sequence[Run], shares: Sequence[Share], outcome: Outcome, path: Path) -> None:
    """Draw the comparison, and what became of the run that was killed, into a PNG file."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(13, 10.5), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 0.35])
        axes = grid[:2, :].subgridspec(2, 2).subplots(squeeze=False)
        draw_outcome(figure.add_subplot(grid[2, :]), outcome)
        draw_tokens(axes[0, 0], runs)
        draw_time(axes[0, 1], runs)
        draw_steps(axes[1, 0], runs)
        draw_shares(axes[1, 1], shares)
        tokens = sum(runs[0].padded) / sum(runs[-1].padded)
        gain = runs[0].seconds / runs[-1].seconds
        samples = f"{sum(runs[-1].counts):,}"
        title = f"The same {samples} samples: {tokens:.1f} times fewer padded tokens, {gain:.1f} times faster"
        figure.suptitle(title, fontsize=15)
        figure.savefig(path, dpi=110)


def draw_tokens(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw real tokens and padding, a bar a run."""
    names = [run.name for run in runs]
    real = [sum(run.real) / 1e6 for run in runs]
    padding = [(sum(run.padded) - sum(run.real)) / 1e6 for run in runs]
    axes.barh(names, real, color=BLUE, label="real")
    axes.barh(names, padding, left=real, color=GREY, label="padding")
    axes.set(title="Tokens that the model processes", xlabel="million tokens")
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")


def draw_time(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the wall time of the epoch, a bar a run."""
    bars = axes.barh([run.name for run in runs], [run.seconds for run in runs], color=ORANGE)
    labels = [f" {run.seconds:.1f} s ({runs[0].seconds / run.seconds:.2f} x)" for run in runs]
    axes.bar_label(bars, labels=labels)
    axes.margins(x=0.25)
    axes.set(title="Wall time of the epoch", xlabel="seconds")
    axes.invert_yaxis()


def draw_steps(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the real tokens of every step against the budget."""
    palette = [GREY, ORANGE, BLUE] if len(runs) > 2 else [GREY, BLUE]
    for run, color in zip(runs, palette, strict=False):
        place = [(step + 0.5) / len(run.real) for step in range(len(run.real))]
        axes.plot(place, run.real, ".", markersize=4, color=color, label=run.name)
    axes.axhline(runs[0].budget, color=RED, linewidth=1, label="budget")
    axes.set(title="Real tokens in each step", xlabel="share of the epoch", ylabel="tokens", xlim=(0, 1))
    axes.set_ylim(0, runs[0].budget * 1.3)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(runs) + 1)


def draw_shares(axes: Axes, shares: Sequence[Share]) -> None:
    """Draw asked-for and realised shares of the tokens for each source."""
    places = range(len(shares))
    axes.bar([p - 0.2 for p in places], [s.asked_tokens for s in shares], 0.4, color=GREY, label="asked for")
    bars = axes.bar([p + 0.2 for p in places], [s.drawn_tokens for s in shares], 0.4, color=BLUE, label="drawn")
    axes.bar_label(bars, labels=[f"{s.drawn_tokens:.1%}\n{s.drawn:,} samples" for s in shares])
    axes.set_xticks(places, [s.name for s in shares])
    axes.set(title="The mixture", ylabel="share of the tokens")
    axes.margins(y=0.3)  # room for the legend
    axes.legend(frameon=False)


def draw_outcome(axes: Axes, outcome: Outcome) -> None:
    """Draw which steps the process that was killed trained, and which the one that resumed."""
    saved, killed, steps = outcome.resumed_from, outcome.killed_at, outcome.steps
    rows = {"first process": (0, saved, BLUE), "second process": (saved, steps, ORANGE)}
    for row, (begin, end, color) in enumerate(rows.values()):
        axes.broken_barh([(begin, end - begin)], (row - 0.35, 0.7), color=color)
    axes.broken_barh([(saved, killed - saved)], (-0.35, 0.7), color=GREY)
    axes.plot(killed, 0, "X", color=RED, markersize=11)
    axes.annotate(f" killed at step {killed}; its last checkpoint is of step {saved}", (killed, 0), (10, 0),
                  textcoords="offset points", va="center")  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    title = f"Killed and resumed: {outcome.lost} samples lost, {outcome.repeated} repeated"
    axes.set(title=title, xlabel="step of the epoch", xlim=(0, steps))
