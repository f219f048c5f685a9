"""The few shapes that padded batches have: chosen once for all epochs, for compilers and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching.planning.limits import CountLimits
from headrace.size_aware_batching.planning.strata import index_type
from headrace.size_aware_batching.planning.units import round_up

# Lengths that may be the longest of a shape. 128, 512, 1024, 4096: 32 shapes for 1,000,000 lognormal sizes (median 360,
# sigma 1.2, longest 16384), budget 32768, are padded by 8.17, 8.08, 8.04, 8.02 % in 0.1, 0.1, 0.4, 7 s.
CANDIDATES = 1024
COUNTED = 2**24  # sizes below this are counted, others sorted


@dataclass(frozen=True)
class Shapes:
    """Shapes that batches are padded to: ascending ``lengths``, and ``counts`` of rows that do not rise with them."""

    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[int, int]]) -> Shapes:
        """Return shapes by their pairs of count and length."""
        counts, lengths = np.array([*pairs], np.int64).reshape(-1, 2).T
        return cls(counts, lengths)

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of count and length."""
        return tuple(zip(self.counts.tolist(), self.lengths.tolist(), strict=True))

    def places(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return which shape is the shortest that holds each size; the longest for larger ones."""
        return np.minimum(np.searchsorted(self.lengths, sizes), len(self.lengths) - 1)

    def lengthened(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return the length that each sample is padded to."""
        if not len(self.lengths):
            return sizes
        return self.lengths.astype(index_type(int(self.lengths[-1])))[self.places(sizes)]

    def rows(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Return how many samples fit where each is the largest.

        >>> Shapes.from_pairs([(8, 10), (4, 20)]).rows(np.array([3, 11, 20, 21])).tolist()
        [8, 4, 4, 0]
        """
        return np.append(self.counts, 0)[np.searchsorted(self.lengths, sizes)]


def choose_shapes(sizes: NDArray[Any], limits: CountLimits, n_shapes: int, length_multiple: int) -> Shapes:
    """Choose at most so many shapes, those that waste least.

    Waste is counted twice, each as a share: the padded elements over those of samples padded by themselves, and the
    batches over those of samples that stand with others of their length. By padding alone, shapes would leave room in
    the budget: one more row would fit a length that is a little shorter. By batches alone, as many would be padded
    where there is room for no other row.

    Args:
        sizes: Those of the samples that are planned, whole numbers, shape ``[n]``.
        limits: What a batch may hold.
        n_shapes: How many at most.
        length_multiple: Lengths are multiples of it.
    """
    lengths, members = distinct_lengths(sizes, length_multiple)
    if not len(lengths):
        return Shapes(lengths, lengths)
    counts = np.minimum(limits.counts(lengths), len(sizes))
    if limits.multiple > 1:
        counts -= np.where(counts > limits.multiple, counts % limits.multiple, 0)
    counts = np.minimum.accumulate(counts)
    weights = lengths / (members * lengths).sum() + 1 / counts / (members / counts).sum()
    passed = np.cumsum(members * weights)
    kept = np.append(np.diff((passed * (CANDIDATES / passed[-1])).astype(np.int64)) > 0, True)
    ends = np.flatnonzero(kept)
    members = np.diff(np.append(0, np.cumsum(members)[ends]))
    chosen = ends[least_waste(members, weights[ends], n_shapes)]
    return Shapes(counts[chosen], lengths[chosen])


def given_shapes(
    pairs: Sequence[tuple[int, int]], sizes: NDArray[Any], limits: CountLimits, length_multiple: int
) -> Shapes:
    """Return shapes that were given; refuse some that are no shapes of these samples and limits.

    Args:
        pairs: Count and length of each, by length.
        sizes: Those of the samples that are planned, shape ``[n]``.
        limits: What a batch may hold.
        length_multiple: As for `choose_shapes`.
    """
    shapes = Shapes.from_pairs(pairs)
    counts, lengths = shapes.counts, shapes.lengths
    if not len(sizes) and not len(pairs):
        return shapes
    if not len(pairs) or (np.diff(lengths) <= 0).any() or (np.diff(counts) > 0).any():
        raise ValueError(
            "shapes must be pairs (count, length), each length once, and none with a larger count than a shorter one, "
            f"got {shown(list(pairs))}"
        )
    longest = int(round_up(sizes.max(initial=0), length_multiple))
    if longest > lengths[-1]:
        raise ValueError(
            f"shapes must hold every sample, got a longest one of {longest} and (count, length) {shown(pairs[-1])}: "
            "add a longer shape, or cut the samples and count them so with max_length="
        )
    most, fits = limits.most_items, limits.capacity.counts(lengths)
    fits = np.where(fits < limits.capacity.asked, fits, most)
    broken = (counts > np.minimum(fits, most)) | ((counts > limits.multiple) & (counts % limits.multiple > 0))
    if broken.any():
        place = int(broken.argmax())
        raise ValueError(
            "shapes must fit max_total_size and max_items, and hold multiples of batch_size_multiple, got "
            f"{shown(pairs[place])} where {limits.floor(min(int(fits[place]), most))} samples fit: lower its count"
        )
    return shapes


def checked_shapes(shapes: Any, length_multiple: int) -> tuple[tuple[int, int], ...]:
    """Return pairs of count and length, by length; refuse what are none."""
    if not isinstance(shapes, Sequence) or isinstance(shapes, str):
        raise TypeError(
            f"shapes must be a sequence of (count, length), such as the sampler's shapes, or None, got {shown(shapes)}"
        )
    pairs = []
    for shape in shapes:
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise TypeError(f"shapes must hold pairs (count, length), got {shown(shape)}")
        count, length = (checked_int("each number in shapes", number, 1) for number in shape)
        if length % length_multiple:
            raise ValueError(
                f"shapes must have lengths that are multiples of length_multiple={length_multiple}, got {length}: give "
                "the batch sampler and the collate function the same length_multiple"
            )
        pairs.append((count, length))
    return tuple(sorted(pairs, key=lambda shape: shape[::-1]))


def distinct_lengths(sizes: NDArray[Any], length_multiple: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the padded lengths of samples by themselves, ascending, and how many samples have each; none is 0.

    >>> [column.tolist() for column in distinct_lengths(np.array([3, 0, 7, 8, 9]), 4)]
    [[4, 8, 12], [2, 2, 1]]
    """
    largest = int(sizes.max(initial=0))
    if largest < COUNTED:
        members = np.bincount(sizes.astype(np.int64, copy=False))
        distinct = np.flatnonzero(members)
        members = members[distinct]
    else:
        distinct, members = np.unique(sizes.astype(np.int64), return_counts=True)
    lengths, owner = np.unique(np.maximum(round_up(distinct, length_multiple), length_multiple), return_inverse=True)
    return lengths, np.bincount(owner, members, len(lengths)).astype(np.int64)


def least_waste(members: NDArray[np.int64], weights: NDArray[np.float64], n_classes: int) -> NDArray[np.int64]:
    """Return the last place of each class of neighbours, for the least sum of members times the weight of the last.

    Exact, by dynamic programming over the last place of a class, one class more each time. Weights ascend, so that one
    more class never costs more.

    >>> least_waste(np.array([5, 1, 5]), np.array([1.0, 2.0, 9.0]), 2).tolist()
    [1, 2]
    """
    count = len(members)
    if n_classes >= count:
        return np.arange(count)
    passed = np.append(0, np.cumsum(members))
    waste = (passed[1:] - passed[:-1, None]) * weights  # [first, last]
    waste[np.tril_indices(count, -1)] = np.inf
    total, came_from = waste[0], []
    for _ in range(n_classes - 1):
        through = total[:-1, None] + waste[1:]
        before = through.argmin(axis=0)
        total = through[before, np.arange(count)]
        came_from.append(before)
    last = [count - 1]
    for before in reversed(came_from):
        last.append(int(before[last[-1]]))
    return np.array(last[::-1])


def refuse_other_sizes(sizes: NDArray[Any], asked: Any) -> None:
    """Refuse sizes that are no lengths of a padded batch."""
    if sizes.ndim > 1:
        raise ValueError(
            f"shapes={shown(asked)} needs one size a sample, got sizes of shape {sizes.shape}: give the longest of a "
            "sample's fields, to which PaddedCollate(shapes=...) pads them all"
        )
    if sizes.dtype.kind == "f" and (broken := np.flatnonzero(sizes != np.floor(sizes))).size:
        raise ValueError(
            f"shapes={shown(asked)} needs whole sizes, the lengths of samples, got {shown(sizes[broken[0]].item())} at "
            f"index {broken[0]}"
        )
