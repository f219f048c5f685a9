"""Several named sources of shards as one dataset, and samples described by their source, shard and key."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset

from headrace.webdatamodule._shared.display import never_raises
from headrace.webdatamodule.shards import IndexedShards
from headrace.webdatamodule.shards.indexed_shards import Begin
from headrace.webdatamodule.shards.set_fingerprint import sources_fingerprint

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.reading.local_shards import Upcoming
    from headrace.webdatamodule.shards.stores.store import Traffic

_THREADS = 16


class ConcatShards(ConcatDataset[Any]):
    """The samples of named sources, `{name: indexed shards}`, one source after another."""

    names: tuple[str, ...]

    def __init__(self, sources: Mapping[str, IndexedShards]) -> None:
        if not sources:
            raise ValueError("shards has no source: name at least one, such as {'proteins': directory}")
        super().__init__(list(sources.values()))  # type: ignore[arg-type]  # datasets without torch
        self.names = tuple(sources)

    @never_raises
    def __repr__(self) -> str:
        counts = f"{len(self):,} samples of {', '.join(self.names)}"
        return f"<{type(self).__name__}: {counts}, fingerprint {self.fingerprint}>"

    @property
    def parts(self) -> Sequence[IndexedShards]:
        """The sources."""
        return self.datasets  # type: ignore[return-value]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read a batch, source by source; the samples are in the order of the indices."""
        return self._read_each(indices, None)

    def _read_each(self, indices: Sequence[int], begin: Begin | None) -> list[Any]:
        """The same; `begin(place)` is called before the sample at a place of the batch is decoded and transformed."""
        if len(self.parts) == 1:
            return self.parts[0]._read_each(indices, begin)
        places: list[list[int]] = [[] for _ in self.parts]
        own: list[list[int]] = [[] for _ in self.parts]
        for place, index in enumerate(indices):
            number, local = self.locate(index)
            places[number].append(place)
            own[number].append(local)
        samples: list[Any] = [None] * len(indices)
        for part, to, wanted in zip(self.parts, places, own, strict=True):
            if wanted:
                inner = None if begin is None else partial(_begin_at, begin, to)
                for place, sample in zip(to, part._read_each(wanted, inner), strict=True):
                    samples[place] = sample
        return samples

    @property
    def _looks_ahead(self) -> bool:
        """Whether any source fetches announced batches."""
        return any(part._looks_ahead for part in self.parts)

    @property
    def _keeps_samples(self) -> bool:
        """Whether any source keeps samples that were read."""
        return any(part._keeps_samples for part in self.parts)

    def _cached_share(self, sample_bytes: float) -> float | None:
        """The share of the samples that a cache has room for; None for several sources, which may share one."""
        return self.parts[0]._cached_share(sample_bytes) if len(self.parts) == 1 else None

    def _share_with_workers(self) -> None:
        """Read what each worker would read for itself, of all sources at the same time: they may be far away."""
        with ThreadPoolExecutor(min(_THREADS, len(self.parts))) as pool:
            list(pool.map(IndexedShards._share_with_workers, self.parts))

    def _flush(self) -> None:
        """Write what is kept of the samples that were read in this process."""
        for part in self.parts:
            part._flush()

    def _expect(self, upcoming: Upcoming | None) -> None:
        """Say when the samples of the next batch are needed again."""
        own: list[dict[int, int]] = [{} for _ in self.parts]
        for index, window in () if upcoming is None else upcoming.windows.items():
            number, local = self.locate(index)
            own[number][local] = window
        for part, windows in zip(self.parts, own, strict=True):
            part._expect(None if upcoming is None else upcoming._replace(windows=windows))

    def _take_traffic(self) -> Traffic | None:
        """Return what reading took since the last call, over all sources."""
        found = [traffic for part in self.parts if (traffic := part._take_traffic()) is not None]
        return reduce(operator.add, found) if found else None

    def _look_ahead(self, batches: Iterable[Sequence[int]], *, anew: bool) -> None:
        """Announce batches, as `IndexedShards` does; each source gets its own samples of each batch."""
        own: list[list[list[int]]] = [[] for _ in self.parts]
        for batch in batches:
            shares: dict[int, list[int]] = {}
            with suppress(IndexError, TypeError):  # which the read of the batch finds, too
                for number, local in map(self.locate, batch):
                    shares.setdefault(number, []).append(local)
                for number, share in shares.items():
                    own[number].append(share)
        for part, shares_of in zip(self.parts, own, strict=True):
            part._look_ahead(shares_of, anew=anew)

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the source of a sample, and the sample's index there."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"indices must be {-count} to {count - 1}, got {index}")
        index = int(index) % count
        number = bisect_right(self.cumulative_sizes, index)
        return number, index - (self.cumulative_sizes[number - 1] if number else 0)

    def key(self, index: int) -> str:
        """The key of a sample."""
        number, local = self.locate(index)
        return self.parts[number].key(local)

    def find(self, key: str) -> int:
        """The position of the sample with a key, in the one source that has it.

        Raises:
            KeyError: No source has it.
            ValueError: Several samples have it.
        """
        found = []
        for number, part in enumerate(self.parts):
            with suppress(KeyError):
                found.append((self.cumulative_sizes[number] - len(part) + part.find(key), self.names[number]))
        if len(found) > 1:
            raise ValueError(
                f"{key!r} is in {len(found)} sources, {', '.join(name for _, name in found)}: give its index"
            )
        if not found:
            raise KeyError(key)
        return found[0][0]

    @property
    def fingerprint(self) -> str:
        """Changes with the names and with any byte of any shard; columns may come and go."""
        return sources_fingerprint(zip(self.names, [part.fingerprint for part in self.parts], strict=True))

    def prefix_fingerprint(self, n_samples: int) -> str | None:
        """The fingerprint of the first samples: whole sources, and the first shards of one; None if that is none."""
        number = bisect_left(self.cumulative_sizes, n_samples)
        if number == len(self.parts):
            return None
        last = self.parts[number].prefix_fingerprint(
            n_samples - self.cumulative_sizes[number] + len(self.parts[number])
        )
        prints = [part.fingerprint for part in self.parts[:number]]
        return (
            None if last is None else sources_fingerprint(zip(self.names[: number + 1], [*prints, last], strict=True))
        )

    def close(self) -> None:
        """Close all shards; they are opened again when they are read."""
        for part in self.parts:
            part.close()


def _begin_at(begin: Begin, places: Sequence[int], number: int) -> None:
    begin(places[number])


def sample_place(dataset: Any, index: int) -> dict[str, Any]:
    """What a dataset knows of a sample: its "key", and of shards its "source", "shard" and "offset" in bytes."""
    found: dict[str, Any] = {}
    if isinstance(dataset, ConcatShards):
        number, index = dataset.locate(index)
        if len(dataset.parts) > 1:
            found["source"] = dataset.names[number]
        dataset = dataset.parts[number]
    if callable(key := getattr(dataset, "key", None)):
        found["key"] = key(index)
    if isinstance(dataset, IndexedShards):
        found.update(shard=dataset.shard_of(index), offset=dataset.offset_of(index))
    return found


def describe_sample(dataset: Any, index: int) -> str:
    """A sample in words: by its key, source and shard where the dataset knows them, else by its index."""
    source = ""
    if isinstance(dataset, ConcatShards):
        number, index = dataset.locate(index)
        source = f" of source {dataset.names[number]!r}" if len(dataset.parts) > 1 else ""
        dataset = dataset.parts[number]
    if not isinstance(dataset, IndexedShards):
        return f"sample {index}"
    return f"sample {dataset.key(index)!r}{source} in shard {dataset.shard_of(index)!r}"


def source_names(dataset: Any, default: str) -> tuple[str, ...]:
    """Names of a dataset's sources, where it has `names` and `cumulative_sizes`; else one name."""
    ends = getattr(dataset, "cumulative_sizes", None)
    names = getattr(dataset, "names", None)
    if ends is None or not names or callable(names):
        return (default,)
    return tuple(names) if len(names) == len(ends) else (default,)


def find_sources(dataset: Any, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of the source of each sample."""
    if len(source_names(dataset, "")) == 1:
        return np.zeros(len(indices), np.int64)
    return np.searchsorted(dataset.cumulative_sizes, indices, "right")
