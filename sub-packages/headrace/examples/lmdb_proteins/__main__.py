"""An epoch over proteins in an LMDB file, in batches of fixed size or in batches by tokens."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from dataset import PAD, ProteinLMDBDataset, padded
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler


@dataclass
class Epoch:
    """What an epoch was made of."""

    batches: int = 0
    proteins: int = 0
    tokens: int = 0
    padded: int = 0
    largest: int = 0
    seconds: float = 0.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="lmdb_proteins", description=__doc__)
    parser.add_argument("lmdb", type=Path, help="file that convert.py made")
    parser.add_argument("--dynamic-loader", "--dynamic_loader", action="store_true", help="also batch by tokens")
    parser.add_argument("--max-tokens", "--max_tokens", type=int, default=16384, help="of a batch, padding included")
    parser.add_argument("--max-length", "--max_length", type=int, default=2048, help="proteins are cut here")
    parser.add_argument("--workers", type=int, default=2, help="processes that read")
    options = parser.parse_args(argv)
    if not 1 <= options.max_length <= options.max_tokens:
        parser.error(f"--max-length: got {options.max_length}, allowed are 1 to --max-tokens ({options.max_tokens})")
    if options.workers < 0:
        parser.error(f"--workers: got {options.workers}, expected 0 or more")
    return options


def fixed(dataset: ProteinLMDBDataset, max_tokens: int, max_length: int) -> BatchSampler:
    """Return the largest fixed batch that stays inside the budget whatever the order: the baseline."""
    longest = min(max_length, max(map(dataset.num_tokens, range(len(dataset)))))
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
    return BatchSampler(order, max_tokens // longest, drop_last=False)


def dynamic(dataset: ProteinLMDBDataset, max_tokens: int, max_length: int) -> DistributedSizeAwareBatchSampler:
    """Return random batches of neighbours in size, each filled to the budget."""
    return DistributedSizeAwareBatchSampler(dataset, max_tokens, cost="padded", max_length=max_length)


def run(dataset: ProteinLMDBDataset, batches: Iterable[list[int]], workers: int) -> Epoch:
    """Read an epoch and count."""
    epoch, begin = Epoch(), time.perf_counter()
    for batch in DataLoader(dataset, batch_sampler=batches, collate_fn=padded, num_workers=workers):
        epoch.batches += 1
        epoch.proteins += len(batch)
        epoch.tokens += int((batch != PAD).sum())
        epoch.padded += batch.numel()
        epoch.largest = max(epoch.largest, batch.numel())
    epoch.seconds = time.perf_counter() - begin
    return epoch


def table(epochs: dict[str, Epoch], max_tokens: int) -> str:
    """Return the epochs side by side."""
    rows = {
        "batches": [f"{epoch.batches:,}" for epoch in epochs.values()],
        "proteins": [f"{epoch.proteins:,}" for epoch in epochs.values()],
        "tokens": [f"{epoch.tokens:,}" for epoch in epochs.values()],
        "padded tokens": [f"{epoch.padded:,}" for epoch in epochs.values()],
        "largest batch": [f"{epoch.largest:,}" for epoch in epochs.values()],
        "fill, padded": [f"{epoch.padded / (epoch.batches * max_tokens):.1%}" for epoch in epochs.values()],
        "fill, real": [f"{epoch.tokens / (epoch.batches * max_tokens):.1%}" for epoch in epochs.values()],
        "seconds": [f"{epoch.seconds:.2f}" for epoch in epochs.values()],
    }
    lines = [f"{'':16}" + "".join(f"{name:>16}" for name in epochs)]
    return "\n".join(lines + [f"{name:16}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows.items()])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the epochs and return the exit status."""
    options = arguments(argv)
    dataset = ProteinLMDBDataset(options.lmdb, options.max_length)
    budget = options.max_tokens, options.max_length
    try:
        epochs = {"fixed": run(dataset, fixed(dataset, *budget), options.workers)}
        if options.dynamic_loader:
            epochs["dynamic"] = run(dataset, dynamic(dataset, *budget), options.workers)
    except (OSError, ValueError) as error:
        print(f"lmdb_proteins: error: {error}", file=sys.stderr)
        return 2
    print(table(epochs, options.max_tokens))
    if options.dynamic_loader:
        fewer = epochs["fixed"].padded / epochs["dynamic"].padded
        print(f"\n{fewer:.2f} times fewer padded tokens for the same {epochs['dynamic'].tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
