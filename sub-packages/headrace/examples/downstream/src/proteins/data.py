"""The data of a run: sources of shards, mixed by weight, in batches of at most `max_tokens`."""

from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedWebDataModule
from headrace.weighted_sampler import WeightedDistributedSampler


def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[str]]:
    """Pad sequences to the longest one, ``[n, length]``; the keys of the samples."""
    tokens = [torch.frombuffer(bytearray(sample["seq.txt"], "ascii"), dtype=torch.uint8).long() for sample in samples]
    return pad_sequence(tokens, batch_first=True), [sample["__key__"] for sample in samples]


class Proteins(IndexedWebDataModule):
    """Shards of sequences; training mixes its sources.

    Args:
        train: Folder of shards for each source.
        val: Folder of shards to validate on, all of them once.
        weights: Share of each source in training, in any unit.
        epoch_length: Samples of a training epoch, on all ranks together.
        max_tokens: Budget of a batch, padding included.
        num_workers: Processes that read.
        seed: Of the mixture and the batches.
    """

    def __init__(
        self,
        train: dict[str, str],
        val: str,
        weights: dict[str, float],
        epoch_length: int,
        max_tokens: int = 16_384,
        num_workers: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(
            {"train": train, "val": val},
            sampler=partial(WeightedDistributedSampler, weights=weights, epoch_length=epoch_length),
            batch_sampler=partial(DistributedSizeAwareBatchSampler, max_total_size=max_tokens, cost="padded"),
            sizes="seq.txt",  # the bytes of that member, from the index
            collate_fn=collate,
            num_workers=num_workers,
            seed=seed,
        )
