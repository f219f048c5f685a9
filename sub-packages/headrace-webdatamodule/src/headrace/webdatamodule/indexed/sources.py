"""Several sets of shards as one dataset that knows their names."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset

from headrace.webdatamodule.shards.reading.dataset import IndexedShards, by_shard


class Sources(ConcatDataset[Any]):
    """The samples of named sources, one source after another.

    Args:
        sources: {name: indexed shards}.

    Raises:
        ValueError: There is no source.
    """

    names: tuple[str, ...]

    def __init__(self, sources: Mapping[str, IndexedShards]) -> None:
        if not sources:
            raise ValueError("shards has no source: name at least one, such as {'proteins': directory}")
        super().__init__(list(sources.values()))  # type: ignore[arg-type]  # datasets without torch
        self.names = tuple(sources)

    @staticmethod
    def cumsum(sequence: Any) -> list[int]:
        """Where each source ends."""
        return list(accumulate(map(len, sequence)))

    @property
    def parts(self) -> Sequence[IndexedShards]:
        """The sources."""
        return self.datasets  # type: ignore[return-value]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch, source by source.

        Args:
            indices: Positions, in any order.

        Returns:
            The samples, in the order of the indices.
        """
        if len(self.parts) == 1:
            return self.parts[0].__getitems__(indices)
        groups, order = by_shard(indices, self.cumulative_sizes)
        samples: list[Any] = [None] * len(order)
        read = [sample for number, own in groups for sample in self.parts[number].__getitems__(own)]
        for position, sample in zip(order, read, strict=True):
            samples[position] = sample
        return samples

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the source of a sample, and its position there."""
        number = bisect_right(self.cumulative_sizes, index)
        return number, index - (self.cumulative_sizes[number - 1] if number else 0)

    def key(self, index: int) -> str:
        """The key of a sample."""
        number, position = self.locate(index)
        return self.parts[number].key(position)

    def place(self, index: int) -> str:
        """A sample's key, source and shard, in words."""
        number, position = self.locate(index)
        part = self.parts[number]
        named = f" of source {self.names[number]!r}" if len(self.parts) > 1 else ""
        return f"sample {part.key(position)!r}{named} in shard {part.shard_of(position)!r}"

    def counts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many of some samples belong to each source, shape [n_sources]."""
        numbers = np.searchsorted(self.cumulative_sizes, indices, "right")
        return np.bincount(numbers, minlength=len(self.parts))

    @property
    def fingerprint(self) -> str:
        """Changes with the names and with any byte of any shard; columns may come and go."""
        parts = zip(self.names, self.parts, strict=True)
        text = "\n".join(f"{name}\t{part.fingerprint}" for name, part in parts)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def close(self) -> None:
        """Let go of all maps."""
        for part in self.parts:
            part.close()
