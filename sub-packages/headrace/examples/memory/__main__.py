"""Measure a training step, fit its memory, plan an epoch at 95 % of it, and train: ``python examples/memory``.

It takes the first CUDA device, or else simulates a small one. The same samples in the same memory three times: fixed
batches that are safe, fixed batches of the mean size of ours, and batches planned by the fitted model.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching import (
    BatchMemoryModel,
    DistributedSizeAwareBatchSampler,
    Peaks,
    SimulatedMemory,
    fit_budget,
    measure_peaks,
    run_worst_batches,
)

BLUE, ORANGE, GREY, RED = "#1f6fb4", "#e8833a", "#9a9a9a", "#b3261e"
LETTERS = 20


class Encoder(torch.nn.Module):
    """A Transformer that predicts each letter of a padded batch from the others."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout=0.0, batch_first=True)
        self.letters = torch.nn.Embedding(LETTERS + 1, width)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, LETTERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, shape ``[n, longest]``, padded with ``LETTERS``."""
        logits = self.head(self.encoder(self.letters(tokens)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=LETTERS)


@dataclass(frozen=True)
class Run:
    """One way through all samples: its peaks, and the time that it took."""

    name: str
    peaks: Peaks
    seconds: float

    @property
    def row(self) -> list[str]:
        """Its line of the table."""
        p, fits = self.peaks, self.peaks.fits
        real, padded = p.sums[fits, 0].sum(), (p.counts * p.largest[:, 0])[fits].sum()
        padding = f"{1 - real / padded:.0%}" if padded else "-"
        peak = f"{p.reserved.mean() / p.reserved.max():.0%}"
        return [self.name, f"{len(p)}", f"{(~fits).sum()}", padding, f"{real / self.seconds:,.0f}", peak]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="memory", description=__doc__.split(":")[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=3000, help="how many there are")
    parser.add_argument("--limit", type=int, default=64, help="MiB of the simulated memory, without a GPU")
    parser.add_argument("--out", type=Path, default=Path("memory.png"), help="the picture")
    options = parser.parse_args(words)
    for name, least in (("samples", 100), ("limit", 16)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, expected {least} or more")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Measure, fit, plan, train, and draw."""
    options = arguments(words)
    real = torch.cuda.is_available()
    where = torch.device("cuda:0" if real else "cpu")
    device: Any = "cuda:0" if real else SimulatedMemory(options.limit * 2**20)
    generator = np.random.default_rng(0)
    # As proteins are: most of a few hundred letters, some of thousands.
    lengths = np.clip(generator.lognormal(np.log(360 if real else 60), 0.6, options.samples), 8, 2048 if real else 400)
    lengths = lengths.astype(np.int64)
    samples = [generator.integers(LETTERS, size=length) for length in lengths]

    torch.manual_seed(0)
    model = Encoder(512 if real else 32, 8 if real else 2).to(where)
    optimizer = torch.optim.AdamW(model.parameters())

    def batches_of(indices: NDArray[np.int64]) -> torch.Tensor:
        tokens = np.full((len(indices), lengths[indices].max()), LETTERS)
        for row, index in zip(tokens, indices, strict=True):
            row[: lengths[index]] = samples[index]
        return torch.from_numpy(tokens).to(where)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(batch))
        optimizer.step()

    def epoch(name: str, batches: Sequence[NDArray[np.int64]]) -> Run:
        start = time.perf_counter()
        bar = tqdm(batches, desc=name, leave=False)
        peaks = measure_peaks(
            lambda indices: step(batches_of(indices)), bar, device, sizes_of=lambda indices: lengths[indices], warm_up=0
        )
        return Run(name, peaks, time.perf_counter() - start)

    with nullcontext() if real else device:
        memory = fit_budget(step, batches_of, lengths, device, target=0.95, model=model, optimizer=optimizer)
        print(memory.report(), end="\n\n")
        sampler = DistributedSizeAwareBatchSampler(lengths, memory.budget(), cost=memory.cost())
        run_worst_batches(sampler, batches_of, step, model=model, optimizer=optimizer)
        planned = [np.array(batch) for batch in sampler]
        safe = memory.max_items(int(lengths.max()), memory.budget())
        usual = round(len(lengths) / len(planned))
        runs = [
            epoch(f"fixed, {safe} samples", cut(lengths, safe)),
            epoch(f"fixed, {usual} samples", cut(lengths, usual)),
            epoch("planned", planned),
        ]
    rows = [
        ["", "steps", "out of memory", "padding", "tokens a second", "mean over largest"],
        *(run.row for run in runs),
    ]
    for row in rows:
        print(row[0].ljust(24), *(cell.rjust(16) for cell in row[1:]))
    picture(memory, runs, options.out)
    print(f"\n{options.out}")


def cut(lengths: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return random batches of a fixed number of samples."""
    order = np.random.default_rng(1).permutation(len(lengths))
    return [order[start : start + size] for start in range(0, len(order), size)]


def picture(memory: BatchMemoryModel, runs: Sequence[Run], path: Path) -> None:
    """Draw what was measured against what was predicted, and every step of the three runs."""
    unit, name = (2**30, "GiB") if memory.budget() > 2**31 else (2**20, "MiB")
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10}):
        figure = Figure(figsize=(12, 4.8), layout="constrained")
        fit, steps = figure.subplots(1, 2)
        draw_fit(fit, memory, unit)
        for run, color in zip(runs, (GREY, ORANGE, BLUE), strict=True):
            place = (np.arange(len(run.peaks)) + 0.5) / len(run.peaks)
            fits, bytes_used = run.peaks.fits, run.peaks.reserved / unit
            steps.plot(place[fits], bytes_used[fits], ".", markersize=4, color=color, label=run.name)
            steps.plot(place[~fits], bytes_used[~fits], "x", markersize=6, color=color)
        steps.axhline(memory.budget() / unit, color=RED, linewidth=1, label="budget")
        steps.set(title="Peak of every step (x: out of memory)", xlabel="share of the epoch", xlim=(0, 1))
        top = (memory.capacity or memory.budget()) / unit * 1.05
        for axes in (fit, steps):
            axes.set(ylabel=name, ylim=(0, top))
        fit.set(xlabel=f"predicted, {name}", xlim=(0, top))
        fit.legend(frameon=False, loc="upper left")
        steps.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
        figure.savefig(path, dpi=110)


def draw_fit(axes: Any, memory: BatchMemoryModel, unit: int) -> None:
    """Draw measured against predicted peaks with the margin."""
    upper: Callable[..., float] = memory.cost(extrapolate=True)
    for peaks, color, label in ((memory.points, BLUE, "fitted"), (memory.calibration, ORANGE, "drawn from an epoch")):
        if peaks is not None:
            most = [upper(int(n), float(longest[0])) for n, longest in zip(peaks.counts, peaks.largest, strict=True)]
            predicted = np.array(most) / (1 + memory.margin) / unit
            axes.plot(predicted, peaks.reserved / unit, "o", markersize=4, color=color, label=label)
    ends = np.array([0, (memory.capacity or memory.budget()) / unit])
    axes.plot(ends, ends, color=GREY, linewidth=1, label="predicted")
    axes.fill_between(ends, ends, ends * (1 + memory.margin), color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(ends, ends * (1 + memory.margin), color=BLUE, linewidth=1, label=f"upper, margin {memory.margin:.1%}")
    axes.set(title="Measured against predicted peaks")


if __name__ == "__main__":
    main()
