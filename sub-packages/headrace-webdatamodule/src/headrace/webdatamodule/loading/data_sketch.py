"""A few samples of a dataset in a state, as short digests: a resume with other data says by them what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from headrace.webdatamodule.loading.fingerprint import digest, plain_value
from headrace.webdatamodule.shards import IndexedShards

_SAMPLES = 8  # in a state
_SEARCHED = 100_000  # samples among which those of a state are looked for: two seconds


def data_sketch(dataset: Any) -> str:
    """The number of samples, and digests of some at even distances: of shards their keys; none of other datasets."""
    return " ".join([str(len(dataset)), *_digests(dataset, _places(len(dataset)))])


def what_differs(sketch: Any, dataset: Any) -> str | None:
    """Say in words how data differ from those of a sketch; None where it cannot be said."""
    number, *then = sketch.split(" ") if isinstance(sketch, str) else [""]
    if not number.isdecimal():
        return None
    if int(number) != len(dataset):
        return f"its length differs: {int(number):,} samples, here {len(dataset):,}"
    places = _places(len(dataset))
    now = _digests(dataset, places)
    if len(then) != len(now) or not now:
        return None
    moved = {place: old for place, old, new in zip(places, then, now, strict=True) if old != new}
    if not moved:
        return None
    searched = range(min(len(dataset), _SEARCHED))
    found = dict(zip(_digests(dataset, searched), searched, strict=True))
    place, old = next(((place, old) for place, old in moved.items() if old not in found), (None, ""))
    if place is None:
        place, old = next(iter(moved.items()))
        return f"its order differs: sample {place:,} is sample {found[old]:,} here"
    others = sum(old not in found for old in moved.values())
    where = "" if len(searched) == len(dataset) else f" among the first {_SEARCHED:,}"
    compared = f"of {len(places)} that were compared {others} are not here{where}"
    return f"its rows differ: {compared}, the first is sample {place:,}"


def _places(count: int) -> Sequence[int]:
    return [place * (count - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)] if count >= _SAMPLES else range(count)


def _digests(dataset: Any, places: Sequence[int]) -> list[str]:
    return [digest(row) for row in _rows(dataset, places)]


def _rows(dataset: Any, places: Sequence[int]) -> Sequence[Any]:
    """Samples that can be read fast, and without code of others; of shards their keys."""
    if isinstance(dataset, IndexedShards):
        return [dataset.key(place) for place in places]
    if isinstance(dataset, TensorDataset):
        return [tuple(tensor[place] for tensor in dataset.tensors) for place in places]
    if isinstance(dataset, np.ndarray | torch.Tensor):
        return [dataset[place] for place in places]
    if isinstance(dataset, list | tuple):
        return [plain_value(dataset[place]) for place in places]
    if hasattr(dataset, "with_format") and hasattr(dataset, "features"):  # of Hugging Face, without its transform
        rows: list[Any] = dataset.with_format("arrow")[list(places)].to_pylist()
        return [plain_value(row) for row in rows]
    return []
