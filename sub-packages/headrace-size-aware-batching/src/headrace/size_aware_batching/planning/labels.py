"""Labels of samples, such as their source, task, modality or language: each batch holds samples of one label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.columns import array_of_column
from headrace.size_aware_batching._shared.display import counted
from headrace.size_aware_batching.sizes.read import plain_index

Name = int | str
MOST_VALUES = 2**20  # ints of a smaller range are not sorted: 10,000,000 take 0.3 s in place of 3


@dataclass(frozen=True, eq=False)
class Labels:
    """The label of each sample.

    Args:
        names: The labels, in the order of their first samples: samples that are appended change no number.
        numbers: The label of each sample by its place in ``names``, shape ``[n]``.
        per_step: Whether all batches of a step have one label, too.
    """

    names: tuple[Name, ...]
    numbers: NDArray[Any]
    per_step: bool

    @classmethod
    def from_argument(cls, by: Any, n_samples: int, per_step: bool) -> Labels:
        """Read the labels that users give.

        >>> labels = Labels.from_argument(["text", "code", "text"], 3, per_step=False)
        >>> labels.names, labels.numbers.tolist()
        (('text', 'code'), [0, 1, 0])
        """
        names, numbers = numbers_of_names(by, n_samples, "by")
        # Few distinct ones are sorted faster as numbers of 16 bits.
        return cls(names, numbers.astype(np.uint16 if len(names) <= 2**16 else np.int32), per_step)

    def first(self, n: int) -> Labels:
        """Return the labels of the first n samples."""
        numbers = self.numbers[:n]
        return replace(self, names=self.names[: int(numbers.max(initial=0)) + 1] if n else (), numbers=numbers)


def numbers_of_names(values: Any, n_samples: int, argument: str) -> tuple[tuple[Name, ...], NDArray[np.int64]]:
    """Return the distinct names that users give samples, in the order of their first samples, and the place of each's.

    >>> numbers_of_names(["b", "a", "b"], 3, "by")[0]
    ('b', 'a')
    """
    column = _column(values, n_samples, argument)
    column = column.detach().cpu().numpy() if isinstance(column, torch.Tensor) else column
    if isinstance(column, np.ndarray) and column.dtype.kind in "iuU" and column.shape == (n_samples,):
        distinct, firsts, places = distinct_values(column)
        order = np.argsort(firsts)
        return tuple(distinct[order].tolist()), np.argsort(order)[places]
    listed = names_of_samples(column, n_samples, argument)
    known = {name: number for number, name in enumerate(dict.fromkeys(listed))}
    return tuple(known), np.array([known[name] for name in listed], np.int64)


def distinct_values(column: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values, where each comes first, and which of them each element is; small ints unsorted.

    >>> [found.tolist() for found in distinct_values(np.array([7, 5, 7]))]
    [[5, 7], [1, 0], [1, 0, 1]]
    """
    count = len(column)
    low, high = (int(column.min()), int(column.max())) if count and column.dtype.kind in "iu" else (0, MOST_VALUES)
    if high - low >= MOST_VALUES or high >= 2**63:
        distinct, firsts, places = np.unique(column, return_index=True, return_inverse=True)
        return distinct, firsts, places.reshape(-1)
    above = column.astype(np.int64) - low
    firsts = np.full(high - low + 1, count)
    firsts[above[::-1]] = np.arange(count)[::-1]  # of several the last one stays
    present = np.flatnonzero(firsts < count)
    number = np.zeros(high - low + 1, np.int64)
    number[present] = np.arange(len(present))
    return present + low, firsts[present], number[above]


def names_of_samples(values: Any, n_samples: int, argument: str) -> list[Name]:
    """Return an int or a string for each sample, as users give them; ``0`` and ``"0"`` are two."""
    expected = f"{argument} must hold an int or a string for each of {counted(n_samples, 'sample')}"
    column = _column(values, n_samples, argument)
    if isinstance(column, str | bytes | Mapping | Set) or not isinstance(column, Iterable):
        raise TypeError(f"{expected}, got {shown(values)} of type {type(values).__name__}")
    listed = column.tolist() if isinstance(column, np.ndarray | torch.Tensor) else list(column)
    if len(listed) != n_samples:
        raise ValueError(f"{expected}, got {len(listed)}")
    names = [_plain_name(name) for name in listed]
    wrong = (place for place, name in enumerate(names) if isinstance(name, bool) or not isinstance(name, int | str))
    if (place := next(wrong, None)) is not None:
        raise TypeError(f"{expected}, got {shown(listed[place])} at index {place}")
    return names


def _plain_name(name: Any) -> Any:
    """Return a string or an int of Python; others, and bools, as they are."""
    if isinstance(name, str):
        return str(name)
    return name if isinstance(name, bool) else plain_index(name)


def _column(values: Any, n_samples: int, argument: str) -> Any:
    """Return a column of another library as an array; two names of two samples are no file and its column."""
    several = isinstance(values, tuple) and len(values) == n_samples
    return list(values) if several else array_of_column(values, argument)
