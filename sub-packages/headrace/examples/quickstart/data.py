"""From sources to shards, and from shards to batches."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from corpus import Sources
from model import PAD
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headrace.size_aware_batching import DistributedSizeAwareBatchSampler
from headrace.webdatamodule import IndexedShards, IndexedWebDataModule, Split, write_shards
from headrace.weighted_sampler import WeightedDistributedSampler

SAMPLES_PER_SHARD = 8192
Batches = list[list[int]]


class Batch(TypedDict):
    """What a training step gets."""

    keys: list[str]
    tokens: Tensor


def shards(make: Callable[[], Sources], directory: Path) -> dict[str, Path]:
    """Write each source to a folder of indexed shards, unless an earlier run did; return the folders by name."""
    finished = directory / "finished"
    if not finished.exists():
        sources = make()
        for name, texts in sources.items():
            samples = [(f"{name}-{number:07d}", {"bytes": text}) for number, text in enumerate(texts)]
            write_shards(samples, directory / name, samples_per_shard=SAMPLES_PER_SHARD, workers=1)
        finished.write_text("\n".join(sources))
    return {name: directory / name for name in finished.read_text().splitlines()}


def lengths(folders: Mapping[str, Path], max_length: int) -> dict[str, NDArray[np.int64]]:
    """Return the tokens of each sample, read from the indexes alone."""
    return {name: IndexedShards(folder).sizes("bytes").clip(max=max_length) for name, folder in folders.items()}


def mixture(sizes: Mapping[str, NDArray[np.int64]], tokens: int) -> Any:
    """Return what makes the order: three quarters of the tokens from the first source, the rest from the others."""
    first, *others = sizes
    weights = {first: 0.75 if others else 1.0, **{name: 0.25 / len(others) for name in others}}
    draws = tokens * sum(weight / sizes[name].mean() for name, weight in weights.items())
    return partial(
        WeightedDistributedSampler,
        weights=weights,
        semantics="proportion",
        per="token",
        sizes=np.concatenate(list(sizes.values())),
        epoch_length=max(1, round(draws)),
    )


def batch_sampler(budget: int, max_length: int) -> Any:
    """Return what makes the batches: neighbours in size, at most ``budget`` tokens with the padding."""
    return partial(
        DistributedSizeAwareBatchSampler,
        max_total_size=budget,
        cost="padded",
        max_length=max_length,
    )


def data_module(folders: Mapping[str, Path], tokens: int, budget: int, max_length: int) -> IndexedWebDataModule:
    """Return all of it together: shards, mixture, batches of at most ``budget`` padded tokens."""
    return IndexedWebDataModule(
        {Split.train: dict(folders)},
        batch_sampler=batch_sampler(budget, max_length),
        sizes="bytes",
        sampler=mixture(lengths(folders, max_length), tokens),
        decode=None,
        transform=partial(cut, max_length=max_length),
        collate_fn=padded,
    )


def cut(sample: dict[str, Any], max_length: int) -> tuple[str, Tensor]:
    """Return a sample's key and its bytes as numbers, shape ``[bytes]``, at most ``max_length`` of them."""
    return sample["__key__"], torch.frombuffer(bytearray(sample["bytes"][:max_length]), dtype=torch.uint8).long()


def padded(samples: Sequence[tuple[str, Tensor]]) -> Batch:
    """Collate samples; the tokens have shape ``[batch, longest]``."""
    keys, texts = zip(*samples, strict=True)
    return {"keys": list(keys), "tokens": pad_sequence(list(texts), batch_first=True, padding_value=PAD)}


def fixed_batches(order: NDArray[np.int64], size: int) -> Batches:
    """Cut the order into batches of ``size`` samples."""
    return [order[start : start + size].tolist() for start in range(0, len(order), size)]
