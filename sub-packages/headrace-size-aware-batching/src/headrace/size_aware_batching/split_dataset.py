"""A dataset that reads pieces of long samples beside whole samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.display import described, kind_of, never_raises
from headrace.size_aware_batching._validation import shortlist
from headrace.size_aware_batching.collate.fields import Name, Path, checked_names, like, place
from headrace.size_aware_batching.planning.pieces import PIECE_START, Piece

__all__ = ["SplitDataset"]

_NUMBERS = (torch.Tensor, np.ndarray, list)
_CUT = (*_NUMBERS, str, bytes)


class SplitDataset(Dataset[Any]):
    """Reads whole samples and pieces of them: the dataset of a loader whose sampler has ``oversize="split"``.

    It is indexed by ints and `Piece` objects. For a piece, the sample is read and cut. A sample may be a tensor, array,
    list, string or bytes whose length is the sample's size, or a (nested) dict or tuple, in which every such field is
    cut. Strings and bytes are cut only if no other field is, since otherwise they are likely to be names; all other
    fields stay as they are. In a dict, the key ``"piece_start"`` holds the start of the piece, 0 for whole samples;
    `PackedCollate` counts positions from there. If nothing has the sample's size, an error lists the lengths that were
    found: the sampler's size must equal the length that is read.

    A batch reads a sample once, even if it holds several of its pieces; the pieces are views of the sample. Other
    batches read the sample again. Long samples cost least if the dataset can read a part: give ``cut``, or replace this
    class by a ``__getitem__`` of the dataset that takes a `Piece`.

    All other public attributes are those of the dataset, such as ``sizes``, ``fingerprint`` and ``key``.

    Args:
        dataset: Any dataset with ``len()`` and integer indices; ``__getitems__`` is used if it has one.
        fields: Names of the fields to cut (dict keys, or positions in a tuple). None: all fields whose length is the
            sample's size, except those whose names begin with ``"__"``.
        start: Key for the start of a piece; None: no such key.
        cut: ``cut(sample, piece)`` returns the piece of a sample of your own type, such as a graph. It is called for
            pieces only; ``fields`` and ``start`` then have no effect.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: When a sample is read that cannot be cut or already has the key ``start``.

    Example:
        >>> data = SplitDataset([{"ids": [1, 2, 3, 4, 5, 6, 7], "name": "a"}, {"ids": [8], "name": "b"}])
        >>> data[Piece(0, 5, 7, 7)]
        {'ids': [6, 7], 'name': 'a', 'piece_start': 5}
        >>> data[1]
        {'ids': [8], 'name': 'b', 'piece_start': 0}
    """

    def __init__(
        self,
        dataset: Any,
        *,
        fields: Sequence[Name] | None = None,
        start: str | None = PIECE_START,
        cut: Callable[[Any, Piece], Any] | None = None,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"dataset must have len() and integer indices, got {type(dataset).__name__}")
        if start is not None and not isinstance(start, str):
            raise TypeError(f"start must be a key of a dict, or None, got {shown(start)}")
        if cut is not None and not callable(cut):
            raise TypeError(f"cut must be a function of a sample and a Piece, or None, got {type(cut).__name__}")
        self.dataset = dataset
        self.fields = None if fields is None else checked_names(fields, "fields")
        self.start, self.cut = start, cut

    @never_raises
    def __repr__(self) -> str:
        options = [f"{name}={described(value)}" for name in ("fields", "cut") if (value := getattr(self, name))]
        return f"{type(self).__name__}({', '.join([kind_of(self.dataset), *options])})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int | Piece) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int | Piece]) -> list[Any]:
        """Return the samples and pieces of a batch; torch's ``DataLoader`` calls this."""
        indices: list[int] = []  # to read: each whole sample, and each sample with pieces once
        places: list[int] = []
        of_pieces: dict[int, int] = {}
        for key in keys:
            index = key.index if isinstance(key, Piece) else key
            places.append(of_pieces.get(index, len(indices)) if isinstance(key, Piece) else len(indices))
            if places[-1] == len(indices):
                indices.append(index)
                if isinstance(key, Piece):
                    of_pieces[index] = places[-1]
        read = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if read is None else read(indices)
        return [self._of(key, samples[at]) for key, at in zip(keys, places, strict=True)]

    def _of(self, key: int | Piece, sample: Any) -> Any:
        if self.cut is not None:
            return self.cut(sample, key) if isinstance(key, Piece) else sample
        found = sample
        if isinstance(key, Piece):
            done: set[Name] = set()
            found = self._cut(sample, key, (), done, _NUMBERS if self.fields is None else _CUT)
            if not done:
                found = self._cut(sample, key, (), done, _CUT)
            if missing := [name for name in self.fields or () if name not in done] or not done:
                raise ValueError(self._message(sample, key, missing))
        if self.start is None or not isinstance(sample, Mapping):
            return found
        if self.start in sample:
            raise ValueError(
                f"sample {key.index if isinstance(key, Piece) else key} has a field {self.start!r} already: name "
                "another key with start=, or give start=None"
            )
        return {**found, self.start: key.start if isinstance(key, Piece) else 0}

    def _cut(self, value: Any, piece: Piece, path: Path, done: set[Name], kinds: Any) -> Any:
        """Return a value, cut if it is to be and of these kinds; ``done`` receives the names of what was cut."""
        name = path[-1] if path else ""
        wanted = not str(name).startswith("__") if self.fields is None else name in self.fields
        if wanted and isinstance(value, kinds) and length_of(value) == piece.size:
            done.add(name)
            return value[piece.start : piece.stop]
        if isinstance(value, Mapping):
            return {key: self._cut(each, piece, (*path, key), done, kinds) for key, each in value.items()}
        if isinstance(value, tuple):
            return like(value, [self._cut(each, piece, (*path, at), done, kinds) for at, each in enumerate(value)])
        return value

    def _message(self, sample: Any, piece: Piece, missing: Any) -> str:
        lengths = list(lengths_of(sample))
        there = shortlist([f"{name} of {length}" for name, length in lengths[:10]], len(lengths))
        what = f"fields {missing} of" if self.fields else "something of"
        return (
            f"sample {piece.index} must have {what} length {piece.size}, its size, to be cut, got a "
            f"{type(sample).__name__} with {there if lengths else 'nothing that has a length'}: give the sampler the "
            "lengths that are read here, or cut= a function of a sample and a Piece"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "dataset" not in self.__dict__:  # not yet, while it is unpickled
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.dataset, name)


def length_of(value: Any) -> int | None:
    """Return the number of elements along dimension 0 of what can be cut; None of all else."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, _CUT) else None


def lengths_of(sample: Any, path: Path = ()) -> Any:
    """Yield the names and lengths of the fields of a sample."""
    if (length := length_of(sample)) is not None:
        yield place(path).removeprefix("samples[i]") or "a length", length
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from lengths_of(value, (*path, key))
    elif isinstance(sample, tuple):
        for at, value in enumerate(sample):
            yield from lengths_of(value, (*path, at))
