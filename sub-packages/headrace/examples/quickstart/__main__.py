"""Shards, a mixture of two sources, size-aware batches and a small Transformer: the main job, end to end."""

import argparse
import hashlib
import logging
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning
import numpy as np
import torch
from corpus import fasta, standard_library
from data import (
    Batches,
    ByteDataset,
    concatenated_sizes,
    fixed_batches,
    padded,
    read,
    shards,
)
from model import PAD, ByteTransformer
from numpy.typing import NDArray
from report import Run, Share, picture, run_table, share_table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.weighted_sampler import NamedConcatDataset, WeightedDistributedSampler

HERE = Path(__file__).resolve().parents[4]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__)
    parser.add_argument("--fasta", nargs="+", type=Path, metavar="FILE", help="train on these proteins instead")
    parser.add_argument("--budget", type=int, default=16384, help="tokens in a batch, padding included")
    parser.add_argument("--max-length", type=int, default=2048, help="longer samples are cut here")
    parser.add_argument("--tokens", type=int, default=350_000, help="tokens to train on, about")
    parser.add_argument("--out", type=Path, default=HERE / ".quickstart", help="folder for shards and report.png")
    options = parser.parse_args(words)
    for name in ("max_length", "tokens"):
        if getattr(options, name) < 2:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, expected 2 or more")
    if options.budget < options.max_length:
        parser.error(f"--budget: got {options.budget}, expected at least --max-length ({options.max_length})")
    for path in options.fasta or ():
        if not path.is_file():
            parser.error(f"--fasta: there is no file {path}")
    return options


def sources(options: argparse.Namespace) -> dict[str, ByteDataset]:
    """Write the shards, once, and read the samples back from them."""
    if options.fasta:
        stamp = [(str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size) for path in options.fasta]
        name = "fasta-" + hashlib.sha256(repr(stamp).encode()).hexdigest()[:12]
    else:
        name = "stdlib-" + hashlib.sha256((sys.version + sysconfig.get_paths()["stdlib"]).encode()).hexdigest()[:12]
    folders = shards(lambda: fasta(options.fasta) if options.fasta else standard_library(), options.out / name)
    return {source: read(source, folder, options.max_length) for source, folder in folders.items()}


def mixture(
    dataset: NamedConcatDataset[Tensor], sizes: NDArray[np.int64], tokens: int
) -> tuple[WeightedDistributedSampler, list[Share]]:
    """Draw an epoch: three quarters of the tokens from the first source, the rest from the others."""
    first, *others = dataset.names
    weights = {first: 0.75 if others else 1.0, **{name: 0.25 / len(others) for name in others}}
    means = dict(zip(dataset.names, map(np.mean, np.split(sizes, dataset.cumulative_sizes[:-1])), strict=True))
    sampler = WeightedDistributedSampler(
        dataset,
        weights,
        num_replicas=1,
        rank=0,
        semantics="proportion",
        per="token",
        sizes=sizes,
        epoch_length=max(1, round(tokens * sum(weight / means[name] for name, weight in weights.items()))),
    )
    order = np.fromiter(sampler, np.int64)
    drawn = np.bincount(np.searchsorted(dataset.cumulative_sizes, order, side="right"), sizes[order])
    rows = [
        Share(source.name, source.size, source.asked * len(order), source.delivered, weights[source.name], part)
        for source, part in zip(sampler.report().sources, drawn / drawn.sum(), strict=True)
    ]
    return sampler, rows


def ways_of_batching(sampler: WeightedDistributedSampler, sizes: NDArray[np.int64], budget: int) -> dict[str, Batches]:
    """Return the same draws in batches of our own, and in those of two careful users.

    One takes the largest fixed size whose worst case, that many times the longest sample, stays inside the budget.
    The other takes as many samples as our batches hold on average, and hopes.
    """
    order = np.fromiter(sampler, np.int64)
    ours = DistributedSizeAwareBatchSampler(
        sizes, budget, strategy="bucketed", cost="padded", sampler=sampler, num_replicas=1, rank=0
    )
    batches = list(ours)
    safe, mean = budget // int(sizes.max()), round(len(order) / len(batches))
    ways = {
        f"fixed, safe ({safe})": fixed_batches(order, safe),
        f"fixed, mean ({mean})": fixed_batches(order, mean),
        "headrace": batches,
    }
    for name, way in ways.items():
        if not np.array_equal(np.sort(np.concatenate([np.asarray(batch) for batch in way])), np.sort(order)):
            raise RuntimeError(f"{name}: the batches do not hold the samples that were drawn")
    return ways


def train(name: str, dataset: Dataset[Tensor], sizes: NDArray[np.int64], batches: Batches, budget: int) -> Run:
    """Train a fresh model for one epoch over the batches and return what it took."""
    torch.manual_seed(0)
    model = ByteTransformer(int(sizes.max()))
    torch.autograd.backward(
        model.training_step(torch.full((2, int(sizes.max())), PAD - 1))
    )  # the first step also sets things up
    model.losses.clear()
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=padded)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    print(f"training on batches of {name}")
    begin, busy = time.perf_counter(), time.process_time()
    trainer.fit(model, loader)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    last = model.losses[-max(1, len(model.losses) // 10) :]
    return Run(
        name=name,
        counts=[len(batch) for batch in batches],
        real=[int(sizes[batch].sum()) for batch in batches],
        padded=[len(batch) * int(sizes[batch].max()) for batch in batches],
        budget=budget,
        seconds=seconds,
        busy=busy,
        loss=sum(last) / len(last),
    )


def main() -> int:
    """Run the job and return the exit status."""
    options = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    try:
        datasets = sources(options)
    except ValueError as error:  # a file that is no FASTA file
        print(error, file=sys.stderr)
        return 2
    dataset, sizes = concatenated_sizes(datasets)
    sampler, shares = mixture(dataset, sizes, options.tokens)
    ways = ways_of_batching(sampler, sizes, options.budget)
    runs = [train(name, dataset, sizes, batches, options.budget) for name, batches in ways.items()]
    picture(runs, shares, options.out / "report.png")
    print(f"\nThe mixture\n{share_table(shares)}\n\nThe same {sum(runs[0].counts):,} samples\n{run_table(runs)}\n")
    print(f"picture: {options.out / 'report.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
