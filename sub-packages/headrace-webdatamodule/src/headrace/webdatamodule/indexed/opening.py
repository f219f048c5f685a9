"""One split's shards: opened as samples, or asked for sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.webdatamodule.indexed.delivering import Damaged
from headrace.webdatamodule.indexed.sizes import SizeOf, Sizes, sizes_of
from headrace.webdatamodule.indexed.sources import Sources
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.reading.dataset import Check, IndexedShards


@dataclass(frozen=True)
class Opening:
    """How to open a split's sources.

    Args:
        places: {source: what `IndexedShards` opens}.
        keys: As of `IndexedShards`, and so are the next five.
        decode: See there.
        transform: See there.
        check: See there.
        allowed_classes: See there.
        max_bytes: See there.
        damaged: What to do with a damaged sample whose size is asked for.
        num_workers: Processes that evaluate sizes.
    """

    places: Mapping[str, Any]
    keys: Sequence[str] | None
    decode: Any
    transform: Callable[[Any], Any] | None
    check: Check
    allowed_classes: tuple[AllowedClass, ...]
    max_bytes: int
    damaged: Damaged
    num_workers: int

    def sources(self) -> Sources:
        """The samples."""
        return Sources({name: self._open(place, self.transform) for name, place in self.places.items()})

    def sizes(self, wanted: SizeOf) -> Sizes:
        """The sizes of all samples, in the order of the sources.

        Args:
            wanted: As of `IndexedWebDataModule`.
        """
        reading = () if self.decode is decode_member and self.keys is None else (self.decode, self.keys)
        parts = [
            sizes_of(
                self._open(place, None),
                place,
                wanted,
                num_workers=self.num_workers,
                name=name,
                reading=reading,
                damaged=self.damaged,
            )
            for name, place in self.places.items()
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _open(self, place: Any, transform: Callable[[Any], Any] | None) -> IndexedShards:
        return IndexedShards(
            place,
            self.keys,
            self.decode,
            transform,
            self.check,
            self.allowed_classes,
            max_bytes=self.max_bytes,
        )
