"""Where samples of a dataset lie: their keys, sources and shards, as far as the dataset knows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_METHODS = {"source": "source_of", "key": "key", "shard": "shard_of", "offset": "offset_of"}


def sample_place(dataset: Any, index: int) -> dict[str, Any]:
    """What a dataset knows of a sample: its "key", and of shards its "source", "shard" and "offset" in bytes."""
    methods = {name: getattr(dataset, method, None) for name, method in _METHODS.items()}
    known = {name: method(index) for name, method in methods.items() if callable(method)}
    return {name: value for name, value in known.items() if value is not None or name != "source"}


def describe_sample(dataset: Any, index: int) -> str:
    """A sample in words: by its key, source and shard where the dataset knows its shards, else by its index."""
    if not callable(getattr(dataset, "shard_of", None)):
        return f"sample {index}"
    place = sample_place(dataset, index)
    source = f" of source {place['source']!r}" if "source" in place else ""
    return f"sample {place['key']!r}{source} in shard {place['shard']!r}"


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
