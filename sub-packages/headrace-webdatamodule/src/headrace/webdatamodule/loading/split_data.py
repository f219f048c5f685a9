"""The shards of each split, opened once, and the sizes of their samples."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np

from headrace.webdatamodule.loading.dataset import ConcatShards
from headrace.webdatamodule.loading.distributed import on_one_rank
from headrace.webdatamodule.loading.options import PerSplit, named_sources
from headrace.webdatamodule.loading.sizes import Sizes, sizes_of
from headrace.webdatamodule.shards import IndexedShards, decode_member
from headrace.webdatamodule.splits import Split


class SplitData:
    """Opens the shards of a split when they are needed, and finds the sizes of its samples.

    All options are those of `IndexedWebDataModule`.
    """

    def __init__(
        self,
        shards: PerSplit,
        sizes: PerSplit,
        *,
        decode: PerSplit,
        transform: PerSplit,
        keys: PerSplit,
        num_workers: PerSplit,
        on_error: PerSplit,
        verify: Any,
        max_bytes: int | None,
        allowed_classes: Collection[Any],
    ) -> None:
        self._shards, self._sizes, self._decode, self._transform = shards, sizes, decode, transform
        self._keys, self._num_workers, self._on_error = keys, num_workers, on_error
        self._verify, self._max_bytes, self._allowed = verify, max_bytes, tuple(allowed_classes)
        self._data: dict[Split, ConcatShards] = {}
        self._found_sizes: dict[Split, Sizes] = {}

    def reopen(self, split: Split) -> None:
        """Open a split as it is now; the shards may have been replaced since a former stage."""
        before = self._data.pop(split, None)
        if before is not None and before.fingerprint != self.opened(split).fingerprint:
            self._found_sizes.pop(split, None)
        self.opened(split)

    def opened(self, split: Split) -> ConcatShards:
        """The samples of a split, which stays open."""
        if split not in self._data:
            places = named_sources(f"shards[{split}]", self._shards[split], split.name)
            self._data[split] = ConcatShards(
                {name: self._open(split, place, self._transform[split]) for name, place in places.items()}
            )
        return self._data[split]

    def fingerprint(self, split: Split) -> str:
        """Changes with any byte of any shard of a split."""
        return self.opened(split).fingerprint

    def _open(self, split: Split, place: Any, transform: Any) -> IndexedShards:
        options: dict[str, Any] = {} if self._max_bytes is None else {"max_bytes": self._max_bytes}
        return IndexedShards(
            place,
            self._keys[split],
            self._decode[split],
            transform,
            verify=self._verify,
            allowed_classes=self._allowed,
            **options,
        )

    def sizes(self, split: Split) -> Sizes | None:
        """Of each sample; all ranks have to call this."""
        if self._sizes[split] is None:
            return None
        if callable(self._sizes[split]):  # evaluated by one rank; the others wait
            return on_one_rank(partial(self.evaluate_sizes, split))
        return self.evaluate_sizes(split)

    def evaluate_sizes(self, split: Split) -> Sizes:
        """The same, by this process alone."""
        if split in self._found_sizes:
            return self._found_sizes[split]
        decode, keys, workers = self._decode[split], self._keys[split], self._num_workers[split]
        reading = () if decode is decode_member and keys is None else (decode, keys)
        parts = [
            sizes_of(
                self._open(split, place, None),
                place,
                self._sizes[split],
                num_workers=workers,
                name=name,
                reading=reading,
                on_error=self._on_error[split],
            )
            for name, place in named_sources(f"shards[{split}]", self._shards[split], split.name).items()
        ]
        found = self._found_sizes[split] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found
