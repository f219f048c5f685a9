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
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from corpus import fasta, standard_library
from data import Batches, batch_sampler, data_module, fixed_batches, lengths, mixture, padded, shards
from model import PAD, ByteTransformer
from numpy.typing import NDArray
from report import Run, Share, padding_of, picture, run_table, share_table
from resuming import killed_and_resumed
from torch.utils.data import DataLoader

from headrace.weighted_sampler import WeightedDistributedSampler

HERE = Path(__file__).resolve().parents[4]
PART = 4  # the ways that lose train on every fourth of their steps


class Way(NamedTuple):
    """A way of batching: its name, how many samples a batch holds, in words, and the batches."""

    name: str
    rule: str
    batches: Batches


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


def folders_of(options: argparse.Namespace) -> dict[str, Path]:
    """Write the shards, once; return their folders by source."""
    if options.fasta:
        stamp = [(str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size) for path in options.fasta]
        name = "fasta-" + hashlib.sha256(repr(stamp).encode()).hexdigest()[:12]
    else:
        name = "stdlib-" + hashlib.sha256((sys.version + sysconfig.get_paths()["stdlib"]).encode()).hexdigest()[:12]
    return shards(lambda: fasta(options.fasta) if options.fasta else standard_library(), options.out / name)


def shares(sizes: dict[str, NDArray[np.int64]], sampler: WeightedDistributedSampler) -> list[Share]:
    """Return what was asked of each source, and what an epoch draws."""
    order, every = sampler.take(0, sampler.epoch_length), np.concatenate(list(sizes.values()))
    source_of = np.repeat(np.arange(len(sizes)), [len(part) for part in sizes.values()])
    tokens = np.bincount(source_of[order], every[order], minlength=len(sizes)).astype(np.int64)
    weights = [0.75, *[0.25 / (len(sizes) - 1)] * (len(sizes) - 1)] if len(sizes) > 1 else [1.0]
    return [
        Share(source.name, source.size, source.delivered, weight * int(tokens.sum()), int(part))
        for source, weight, part in zip(sampler.report().sources, weights, tokens, strict=True)
    ]


def ways_of_batching(order: NDArray[np.int64], ours: Batches, sizes: NDArray[np.int64], budget: int) -> list[Way]:
    """Return the same draws in batches of our own, and in those of two careful users.

    One takes the largest fixed size whose worst case, that many times the longest sample, stays inside the budget.
    The other takes as many samples as our batches hold on average, and hopes.
    """
    safe, mean = budget // int(sizes.max()), round(len(order) / len(ours))
    ways = [
        Way(f"fixed, safe ({safe})", f"{safe} of the longest keep the budget", fixed_batches(order, safe)),
        Way(f"fixed, mean ({mean})", "as many as headrace has on average", fixed_batches(order, mean)),
        Way("headrace", "as many as the budget holds", ours),
    ]
    for way in ways:
        if not np.array_equal(np.sort(np.concatenate([np.asarray(batch) for batch in way.batches])), np.sort(order)):
            raise RuntimeError(f"{way.name}: the batches do not hold the samples that were drawn")
    return ways


def train(way: Way, data: Any, sizes: NDArray[np.int64], budget: int, part: int) -> Run:
    """Train a fresh model on one of ``part`` steps of an epoch, or on all of them; return what the epoch takes."""
    torch.manual_seed(0)
    model = ByteTransformer(int(sizes.max()))
    warm_up(model, int(sizes.max()))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=sys.stderr.isatty(),
    )  # fmt: skip
    padded = [len(batch) * int(sizes[batch].max()) for batch in way.batches]
    share = sum(padded) / sum(padded[::part])
    what = f"{len(padded[::part]):,} of {len(padded):,} steps" if part > 1 else f"{len(padded):,} steps"
    print(f"training on batches of {way.name}: {what}", flush=True)
    begin, busy = time.perf_counter(), time.process_time()
    trainer.fit(model, data)
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    return Run(
        name=way.name,
        rule=way.rule,
        counts=[len(batch) for batch in way.batches],
        real=[int(sizes[batch].sum()) for batch in way.batches],
        padded=padded,
        budget=budget,
        seconds=seconds * share,
        busy=busy * share,
    )


def warm_up(model: ByteTransformer, longest: int) -> float:
    """Run a step of two long samples, as the first step also sets things up; return the seconds of a second one."""
    for _ in range(2):
        begin = time.perf_counter()
        torch.autograd.backward(model.training_step({"tokens": torch.full((2, longest), PAD - 1)}))
    return time.perf_counter() - begin


def minutes(ways: Sequence[Way], sizes: NDArray[np.int64]) -> str:
    """Return about how long all of it takes here, in words."""
    longest = int(sizes.max())
    seconds = warm_up(ByteTransformer(longest), longest) / (2 * longest)
    padded = [sum(len(batch) * int(sizes[batch].max()) for batch in way.batches) for way in ways]
    *losing, ours = padded
    about = seconds * (sum(losing) / PART + 2 * ours) / 60  # ours once more, killed and resumed
    return "less than a minute" if about < 1 else f"about {round(about)} minute{'s' * (round(about) > 1)}"


def next_steps(budget: int) -> str:
    """Return what to do next, with data of one's own."""
    tools = Path(sysconfig.get_path("scripts"))
    return f"""Next, your own data: a FASTA file, an LMDB or a folder DATA, whose samples have a MEMBER such as seq.txt
  {tools / "headrace-shards"} pack DATA shards
  {tools / "headrace-shards"} sizes shards MEMBER > sizes.txt
  {tools / "headrace-batches"} sizes.txt --budget {budget} --cost padded
The last one shows how full your batches would be. Then train on them: {HERE / "docs" / "tutorial.md"}"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the job and return the exit status."""
    options = arguments(words)
    kind = "sequences of the FASTA files" if options.fasta else "functions and docstrings of Python's standard library"
    print(f"Data: {kind}, a token a byte, cut at {options.max_length:,}")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".isinstance.treespec, LeafSpec")  # lightning 2.6 under torch 2.13
    try:
        folders = folders_of(options)
    except ValueError as error:  # a file that is no FASTA file
        print(error, file=sys.stderr)
        return 2
    by_source = lengths(folders, options.max_length)
    sizes = np.concatenate(list(by_source.values()))
    module = data_module(folders, options.tokens, options.budget, options.max_length)
    module.setup("fit")
    samples, order = module.train_dataloader().dataset, mixture(by_source, options.tokens)
    sampler = order(samples, num_replicas=1, rank=0, seed=0)
    draws = sampler.take(0, sampler.epoch_length)
    make = batch_sampler(options.budget, options.max_length)
    ways = ways_of_batching(
        draws, list(make(sizes, sampler=sampler, num_replicas=1, rank=0, seed=0)), sizes, options.budget
    )
    *_, ours = ways
    if len(ours.batches) < 2:
        told = f"{len(draws):,} samples of {sizes[draws].sum():,} tokens make one batch of {options.budget:,} tokens"
        print(f"{told}: pass more --tokens or less --budget, to train in steps", file=sys.stderr)
        return 2
    print(f"{len(draws):,} samples in batches of three kinds, budget: {options.budget:,} padded tokens a batch:")
    print("\n".join(f"  {way.name:<18}{way.rule}" for way in ways))
    if not torch.accelerator.is_available():
        print(f"Without a GPU this takes {minutes(ways, sizes)}.")
    runs = []
    for way in ways:
        fixed = DataLoader(samples, batch_sampler=way.batches[::PART], collate_fn=padded)
        mine = way is ours
        runs.append(train(way, module if mine else fixed, sizes, options.budget, 1 if mine else PART))
    rows = shares(by_source, sampler)
    more = mixture(by_source, 10 * options.tokens)(samples, num_replicas=1, rank=0, seed=0)
    rest = padding_of(sizes, list(make(sizes, sampler=more, num_replicas=1, rank=0, seed=0)))
    print(f"\nThe mixture\n{share_table(rows)}\n\nThe same {len(draws):,} samples\n{run_table(runs, rest)}\n")
    print("The same training once more, killed half-way and resumed")
    job = {
        "folders": {name: str(folder) for name, folder in folders.items()},
        **{name: getattr(options, name) for name in ("tokens", "budget", "max_length")},
    }
    keys = [samples.key(index) for index in draws.tolist()]
    outcome = killed_and_resumed(keys, len(ours.batches), options.out / "checkpoints", job)
    picture(runs, rows, outcome, options.out / "report.png")
    picture(runs, rows, outcome, options.out / "report-stacked.png", stacked=True)
    print(f"{outcome}\n\npicture: {options.out / 'report.png'}\n\n{next_steps(options.budget)}")
    return int(bool(outcome.lost or outcome.repeated))


if __name__ == "__main__":
    sys.exit(main())
