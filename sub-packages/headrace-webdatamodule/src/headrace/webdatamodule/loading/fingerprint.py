"""What stands for a map-style dataset in a checkpoint, so that one of other data is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from headrace.webdatamodule.loading.digest import digest

_ROWS = 64  # that are looked at; all of them would take as long as an epoch
_DEEP = 8  # levels of containers


def fingerprint_of(dataset: Any) -> str:
    """Stand for a dataset: its own `fingerprint`, else its length and what can be said of its samples.

    Of a list, an array, a tensor, a `TensorDataset` or a Hugging Face dataset these are samples at even distances, 64
    or a few more; of a `Subset` or `ConcatDataset` the indices and the datasets inside. Of any other dataset it is its
    class: to read samples could be slow, and a random transform would give others each time.

    >>> fingerprint_of([1, 2, 3]) == fingerprint_of([1, 2, 3]) != fingerprint_of([1, 2, 4])
    True
    """
    if (own := own_fingerprint(dataset)) is not None:
        return own
    text = f"{len(dataset)} {digest(_described(dataset))}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def own_fingerprint(thing: Any) -> str | None:
    """The `fingerprint` of a dataset, sampler or batch sampler; None where it has none, or a method of that name."""
    own = getattr(thing, "fingerprint", None)
    return None if own is None or callable(own) else str(own)


def _described(dataset: Any) -> Any:
    if isinstance(dataset, Subset):
        return "subset", fingerprint_of(dataset.dataset), np.asarray(dataset.indices)
    if isinstance(dataset, ConcatDataset):
        return ["concatenated", *map(fingerprint_of, dataset.datasets)]
    rows = range(0, len(dataset), max(1, len(dataset) // _ROWS))
    chosen = [*rows, len(dataset) - 1] if len(dataset) else []
    if isinstance(dataset, TensorDataset):
        return [tensor[chosen] for tensor in dataset.tensors]
    if isinstance(dataset, np.ndarray | torch.Tensor):
        return dataset[chosen]
    if isinstance(dataset, list | tuple):
        return [_plain(dataset[row]) for row in chosen]
    if hasattr(dataset, "with_format") and hasattr(dataset, "features"):  # of Hugging Face, without its transform
        return str(dataset.features), _plain(dataset.with_format("arrow")[chosen].to_pylist())
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def _plain(thing: Any, depth: int = 0) -> Any:
    """Values, containers and arrays as they are; of other objects their class and attributes, but no code."""
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, str | bytes | int | float | complex | np.ndarray | torch.Tensor | None):
        return thing
    if depth < _DEEP and isinstance(thing, Mapping):
        return {str(key): _plain(value, depth + 1) for key, value in thing.items()}
    if depth < _DEEP and isinstance(thing, list | tuple):
        return [_plain(value, depth + 1) for value in thing]
    name = type(thing).__qualname__
    held = getattr(thing, "__dict__", None)
    return [name, _plain(held, depth + 1)] if held and depth < _DEEP else name
