"""Long samples cut into pieces: which piece of which sample, and how batches name it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._validation import Number
from headrace.size_aware_batching.planning.costs import Cost
from headrace.size_aware_batching.planning.limits import Budget
from headrace.size_aware_batching.planning.strata import index_type

PIECE_START = "piece_start"  # key of a dict that says where a piece begins in its sample
MOST_PIECES = 2**40  # more are a slip in a unit


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a long sample, in the batches of a sampler with ``oversize="split"``: elements ``start`` to ``stop``.

    Whole samples come as ints. A piece is not an index: a dataset that does not support pieces raises an error.
    `SplitDataset` wraps such a dataset, and supports them. ``int(piece)`` is the index of the sample.

    Args:
        index: The sample.
        start: Where the piece begins in the sample.
        stop: Where it ends, exclusive.
        size: Size of the whole sample.

    >>> piece = Piece(7, 4096, 5000, 5000)
    >>> int(piece), piece.length, piece.stop == piece.size
    (7, 904, True)
    """

    index: int
    start: int
    stop: int
    size: int

    @property
    def length(self) -> int:
        """Size of the piece."""
        return self.stop - self.start

    def __int__(self) -> int:
        return self.index


@dataclass(frozen=True)
class Pieces:
    """Samples as pieces, a sample that is not cut as a single one: all pieces in the order of the samples.

    Attributes:
        samples: The sample of each piece.
        starts: Where it begins there.
        lengths: Its size.
        sizes: Size of each sample.
        ends: How many pieces there are up to each sample, itself included.
    """

    samples: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[Any]
    sizes: NDArray[Any]
    ends: NDArray[np.int64]

    OTHERS: ClassVar[str] = (
        "oversize='split' allows what changes the pieces (max_total_size, max_length, extra_per_sample, cost) at the "
        "beginning of an epoch only: give max_length, the longest piece, so that another budget leaves the pieces as "
        "they are"
    )

    def __len__(self) -> int:
        return len(self.samples)

    def continues(self, before: Any) -> bool:
        """Return whether these are other pieces, as of fewer samples, and more."""
        return isinstance(before, Pieces) and np.array_equal(before.starts, self.starts[: len(before)])

    def samples_of(self, pieces: NDArray[Any]) -> NDArray[Any]:
        """Return the samples of some pieces."""
        found: NDArray[Any] = self.samples[pieces]
        return found

    @property
    def cut(self) -> NDArray[np.int64]:
        """The samples that have several pieces, ascending."""
        return np.flatnonzero(np.diff(self.ends, prepend=0) > 1)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Each piece as a share of its sample."""
        if self.lengths is self.sizes:  # nothing is cut, and sizes may have several columns
            return np.ones(len(self.sizes))
        return shares_of(self.lengths, self.sizes[self.samples])

    def counts(self, samples: NDArray[Any]) -> NDArray[np.int64]:
        """Return how many pieces each of some samples has."""
        found: NDArray[np.int64] = self.ends[samples] - np.append(0, self.ends)[samples]
        return found

    def of_samples(self, samples: NDArray[Any]) -> NDArray[Any]:
        """Return the pieces of some samples, one sample after another."""
        begins, counts = np.append(0, self.ends)[samples], self.counts(samples)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found: NDArray[Any] = np.repeat(begins, counts) + places
        return found

    def keys(self, pieces: NDArray[Any]) -> list[Any]:
        """Return pieces as batches name them: an int for a whole sample, else a `Piece`."""
        samples = self.samples[pieces]
        return keys_of(samples, self.starts[pieces], self.lengths[pieces], self.sizes[samples])


def pieces_of(sizes: NDArray[Any], longest: float) -> Pieces:
    """Cut samples into full pieces and a rest.

    >>> pieces = pieces_of(np.array([3, 10, 0]), 4)
    >>> pieces.samples.tolist(), pieces.starts.tolist(), pieces.lengths.tolist()
    ([0, 1, 1, 1, 2], [0, 0, 4, 8, 0], [3, 4, 4, 2, 0])
    """
    count = len(sizes)
    if math.isinf(longest) or not (sizes > longest).any():
        own = np.arange(count)
        return Pieces(own, np.zeros(count, np.int64), sizes, sizes, own + 1)
    length = int(longest)
    whole = sizes.astype(np.int64)
    counts = np.maximum(1, -(-whole // length))
    if (n_pieces := counts.sum(dtype=np.float64)) > MOST_PIECES:
        raise ValueError(f"oversize='split' would make {n_pieces:.3g} pieces of size {length}: raise the budget")
    ends = np.cumsum(counts)
    samples = np.repeat(np.arange(count, dtype=index_type(count)), counts)
    starts = (np.arange(len(samples)) - np.repeat(ends - counts, counts)) * length
    return Pieces(samples, starts, np.minimum(length, whole[samples] - starts), whole, ends)


def longest_piece(
    sizes: NDArray[Any], budget: Budget, cost: Cost, max_length: Number | None = None, extra: Number = 0
) -> float:
    """Return the largest whole size that, with the extra of each piece, fits a batch and is at most ``max_length``.

    Infinity where all sizes are within both.
    """
    if sizes.ndim > 1:
        raise ValueError(
            f"oversize='split' needs sizes of shape [n], got {sizes.shape}: where to cut has to be one number"
        )

    def fits(size: int) -> bool:
        return not len(cost.prepare(np.array([size + extra]), budget)[2])

    largest = math.ceil(sizes.max(initial=0))
    most = largest if max_length is None else min(largest, math.floor(max_length - extra))
    if most == largest and (not largest or fits(largest)):
        return math.inf
    if not bool((sizes == np.floor(sizes)).all()):
        raise ValueError(f"oversize='split' needs whole sizes, got {sizes.dtype} with fractions: give lengths")
    if most < 1 or not fits(1):
        limit = f"max_total_size={shown(budget)}" if most >= 1 else f"max_length={max_length}"
        beside = f" and extra_per_sample={extra}" if extra else ""
        raise ValueError(f"oversize='split' needs room for a piece of size 1, got {limit}{beside}")
    low, high = 1, most  # a batch of one sample costs no less when the sample grows
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def shares_of(lengths: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.float64]:
    """Return lengths as shares of the sizes; 1 of nothing."""
    shares: NDArray[np.float64] = np.divide(lengths, sizes, out=np.ones(len(lengths)), where=sizes > 0)
    return shares


def keys_of(samples: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[Any], sizes: NDArray[Any]) -> list[Any]:
    """Return pieces of samples of these sizes as batches name them."""
    keys: list[Any] = samples.tolist()
    for place in np.flatnonzero(lengths != sizes).tolist():
        start = int(starts[place])
        keys[place] = Piece(keys[place], start, start + int(lengths[place]), int(sizes[place]))
    return keys


def as_indices(keys: Sequence[Any]) -> Any:
    """Return a batch as an array of indices; one with pieces is left as it is."""
    return keys if any(isinstance(key, Piece) for key in keys) else np.array(keys, np.int64)


def sizes_of(keys: Sequence[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    """Return the sizes of the samples and pieces of a batch.

    >>> sizes_of([1, Piece(0, 8, 10, 10)], np.array([10, 4])).tolist()
    [4, 2]
    """
    if not any(isinstance(key, Piece) for key in keys):
        return sizes[keys]
    return np.array([key.length if isinstance(key, Piece) else sizes[key] for key in keys])
