"""Shards grouped into blocks, which are planned one at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching.planning.options import Options
from headrace.size_aware_batching.planning.plan_cache import SizeRuns
from headrace.size_aware_batching.planning.prepared import PreparedSizes
from headrace.size_aware_batching.planning.shuffles import random_words
from headrace.size_aware_batching.planning.strata import COUNTED, counted_sizes
from headrace.size_aware_batching.planning.strategies import BatchLists
from headrace.size_aware_batching.sizes.read import read_sizes


@dataclass(frozen=True)
class Blocks:
    """Consecutive ranges of samples, the shards, in groups of about so many samples.

    The shards come in an order of their own, and so do the blocks; a sample's *place* counts in that order. The groups
    are the same in every epoch: so is the number of batches of each, where it does not depend on the samples' order.

    Args:
        lengths: Samples of each shard, shape ``[shards]``.
        n_blocks: How many blocks there are at most; none is empty.
        key: Of the order of the shards; None for 0, 1, 2, ...
    """

    lengths: NDArray[np.int64]
    n_blocks: int
    key: int | None

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The shards, block by block."""
        return shuffled(self.key, len(self.lengths))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place where each shard of `order` begins and, last, the number of samples."""
        return before_each(self.lengths[self.order])

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """Where each block begins in `order` and, last, the number of shards."""
        total = int(self.places[-1])
        bounds = np.array([block * total // self.n_blocks for block in range(self.n_blocks)], np.int64)
        group = np.searchsorted(bounds, self.places[:-1], side="right")
        found = np.unique(group, return_index=True)[1]
        lengths = np.add.reduceat(self.lengths[self.order], found) if len(found) else found
        return np.append(found[lengths > 0], len(self.lengths))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The place where each block begins and, last, the number of samples."""
        return self.places[self.firsts]

    @cached_property
    def first_samples(self) -> NDArray[np.int64]:
        """The first sample of each shard in the dataset."""
        return before_each(self.lengths)[:-1]

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def shards(self, block: int) -> NDArray[np.int64]:
        """Return the shards of a block, in the order of their places."""
        return self.order[self.firsts[block] : self.firsts[block + 1]]

    def samples(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples of the dataset at some places.

        >>> Blocks(np.array([2, 3]), 1, None).samples(np.array([1, 2, 4])).tolist()
        [1, 2, 4]
        """
        found = np.searchsorted(self.places, places, side="right") - 1
        samples: NDArray[np.int64] = self.first_samples[self.order[found]] + places - self.places[found]
        return samples


def before_each(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum before each number and, last, of all.

    >>> before_each(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def shuffled(key: int | None, count: int) -> NDArray[np.int64]:
    """Return a keyed shuffle of ``0 .. count - 1``; without a key the numbers in their order."""
    if key is None:
        return np.arange(count, dtype=np.int64)
    return np.argsort(random_words(key, count), kind="stable")


def read_block(blocks: Blocks, block: int, sizes_of: Callable[[int], Any]) -> tuple[NDArray[Any], str]:
    """Return the sizes of a block's samples by their places, and a checksum of them, the same for all number types."""
    parts: list[NDArray[Any]] = []
    checksum = 0
    for shard in blocks.shards(block).tolist():
        part = narrow(read_sizes(sizes_of(shard)))
        if len(part) != (length := int(blocks.lengths[shard])):
            raise ValueError(f"sizes of shard {shard} must be {length:,} numbers, as lengths has it, got {len(part):,}")
        if not length:
            continue
        if parts and part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"sizes of all shards must have the same columns, got shape {part.shape} for shard {shard} and "
                f"{parts[0].shape} for another"
            )
        parts.append(part)
        checksum = sizes_checksum(part, checksum)
    return np.concatenate(parts), f"{checksum:08x}"


def sizes_checksum(sizes: NDArray[Any], before: int = 0) -> int:
    """Return a checksum of narrowed sizes, and of those before."""
    return zlib.crc32(np.ascontiguousarray(sizes).data, before)


def narrow(sizes: NDArray[Any]) -> NDArray[Any]:
    """Return sizes in the fewest of 2, 4 and 8 bytes that hold them; whole ones as integers.

    >>> narrow(np.array([3.0, 70.0])).dtype, narrow(np.array([3, 70_000])).dtype, narrow(np.array([0.5])).dtype
    (dtype('uint16'), dtype('uint32'), dtype('float64'))
    """
    if sizes.dtype.kind == "f":
        if not (sizes == np.floor(sizes)).all():
            return sizes
        sizes = sizes.astype(np.int64)
    bits = int(sizes.max(initial=0)).bit_length()
    return sizes.astype(np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.int64, copy=False)


def counting_lists(sized: PreparedSizes, options: Options) -> BatchLists:
    """Return lists that know the number of batches, and nothing else: small whole sizes are only counted.

    The batches of strata follow from how many samples there are of each size, whichever they are.
    """
    sizes = sized.sizes
    if (
        not options.sorts
        or not sized.n_samples
        or sizes.ndim > 1
        or sizes.dtype.kind not in "iu"
        or sizes.max() >= COUNTED
    ):
        return BatchLists(sized, options)
    counts = counted_sizes(sizes if sized.kept is None else sizes[sized.kept], int(sizes.max()))
    values = np.flatnonzero(counts)[::-1]
    total = float((values * counts[values]).sum())
    runs = SizeRuns(values.astype(np.uint16), before_each(counts[values])[:-1], sized.n_samples, total)
    return BatchLists(sized, options, presorted=lambda: (range(sized.n_samples), runs))
