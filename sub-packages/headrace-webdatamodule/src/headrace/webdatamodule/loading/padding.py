"""Batches that are padded beyond a budget which counts the sum of the sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

_SLACK = 8  # by which a batch may be longer than its longest sample: special tokens, or a multiple
_DEEP, _WIDE = 3, 16  # levels of containers, and how many of their parts are looked at


def padded_beyond(batch: Any, count: int, longest: Callable[[], float], budget: float) -> tuple[int, int] | None:
    """The shape (samples, length) of a tensor that has all samples padded to one length, if it exceeds a budget.

    Args:
        batch: What `collate_fn` returned.
        count: Number of its samples.
        longest: Returns the largest size among them; asked only where a tensor may be such a one.
        budget: Of a batch, for the sum of the sizes.

    >>> [padded_beyond(batch, 4, lambda: 10.0, 30.0) for batch in ({"ids": torch.zeros(4, 10)}, [torch.zeros(25)])]
    [(4, 10), None]
    """
    for rows, columns in _shapes(batch, _DEEP):
        length = columns if rows == count else rows if columns == count else 0
        if count * length > budget and 0 <= length - (size := longest()) < _SLACK and count * size > budget:
            return count, length
    return None


def _shapes(thing: Any, depth: int) -> Iterator[tuple[int, int]]:
    """The first two dimensions of each tensor in a batch."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        if not getattr(thing, "is_nested", False) and thing.ndim > 1:
            yield thing.shape[0], thing.shape[1]
    elif depth and isinstance(thing, Mapping | tuple | list):
        inside: Iterable[Any] = thing.values() if isinstance(thing, Mapping) else thing
        for part in islice(inside, _WIDE):
            yield from _shapes(part, depth - 1)
