"""Cut the range of sizes into intervals that hold enough elements and are not too wide."""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.size_aware_batching.vectors import Vector, number_vector, size_vector

_MAX_BUCKETS = 1_000_000  # more than that is a mistake in the unit, not a wish


class Buckets(NamedTuple):
    """Intervals that are closed on the left and open on the right, and how many elements each holds.

    Attributes:
        bucket_boundaries: Shape ``[n + 1]``, int64, strictly increasing.
        bucket_sizes: Shape ``[n]``, int64; the number of elements in ``[boundary[i], boundary[i + 1])``.
    """

    bucket_boundaries: torch.Tensor
    bucket_sizes: torch.Tensor


def create_buckets(
    sizes: torch.Tensor | NDArray[np.integer] | list[int], max_width: int, min_bucket_count: int
) -> Buckets:
    """Cut the range of ``sizes`` greedily, from the smallest size up.

    A bucket closes as soon as it holds ``min_bucket_count`` elements, or when the next size would make it
    wider than ``max_width``. A stretch without sizes becomes empty buckets of ``max_width``. The last bucket
    ends at the largest size + 1 and may hold fewer elements.

    Args:
        sizes: Shape ``[n]``, n > 0: integers from 0 on, in any order.
        max_width: The widest a bucket may be, at least 1, in the unit of the sizes.
        min_bucket_count: Number of elements at which a bucket closes, at least 1.

    Raises:
        TypeError: If an argument is not made of integers.
        ValueError: If ``sizes`` is empty, not 1-D or holds a negative one, a number is below 1, or the gaps
            in the sizes would make more than a million buckets.

    >>> buckets = create_buckets(torch.tensor([1, 1, 2, 3, 3, 3, 12]), max_width=5, min_bucket_count=6)
    >>> buckets.bucket_boundaries.tolist(), buckets.bucket_sizes.tolist()
    ([1, 6, 11, 13], [6, 0, 1])
    """
    width = _positive("max_width", max_width)
    enough = _positive("min_bucket_count", min_bucket_count)
    vector = size_vector(sizes, "sizes")
    if not vector.size:
        raise ValueError("sizes is empty; there must be at least one size to make a bucket of")
    if vector.dtype != np.int64:
        raise TypeError(f"sizes must be integers, got {vector.dtype}; round them up, as sizes.ceil().long()")
    values, counts = np.unique(vector, return_counts=True)
    if values[-1] == np.iinfo(np.int64).max:
        raise ValueError(f"sizes holds {values[-1]}: the last boundary would leave the 64-bit integers")
    boundaries, numbers = _cut(values.tolist(), [0, *np.cumsum(counts).tolist()], width, enough)
    return Buckets(torch.tensor(boundaries), torch.tensor(numbers))


def bucket_of(sizes: Vector, boundaries: Vector) -> NDArray[np.int64]:
    """Find the bucket of each size: i where ``boundaries[i] <= size < boundaries[i + 1]``, -1 where none.

    >>> bucket_of(np.array([0, 1, 5, 6, 9]), np.array([1, 6, 9]))
    array([-1,  0,  0,  1, -1])
    """
    found = np.searchsorted(boundaries, sizes, side="right").astype(np.int64) - 1
    found[found == len(boundaries) - 1] = -1
    return found


def checked_boundaries(bucket_boundaries: object) -> Vector:
    """Check the cut points between buckets and sort them.

    Raises:
        TypeError: If they are not numbers in a tensor, array or sequence.
        ValueError: If they are not 1-D, fewer than two, repeat or hold a NaN.
    """
    boundaries = number_vector(bucket_boundaries, "bucket_boundaries").copy()
    if len(boundaries) < 2:
        raise ValueError(f"bucket_boundaries must be at least 2 for one bucket, got {len(boundaries)}")
    boundaries.sort()
    if (repeated := boundaries[1:][boundaries[1:] == boundaries[:-1]]).size:
        raise ValueError(f"bucket_boundaries must differ from one another, repeated: {repeated.tolist()}")
    return boundaries


def _cut(values: list[int], below: list[int], width: int, enough: int) -> tuple[list[int], list[int]]:
    # below[i] is the number of elements smaller than values[i]; plain ints, so that no sum can overflow
    boundaries: list[int] = [values[0]]
    numbers: list[int] = []
    first = 0
    while first < len(values):
        start = boundaries[-1]
        if gap := (values[first] - start) // width:
            if len(numbers) + gap > _MAX_BUCKETS:
                raise ValueError(
                    f"max_width={width} makes {gap} empty buckets between {start} and {values[first]}, more "
                    f"than {_MAX_BUCKETS} in all; use a greater max_width or leave such sizes out"
                )
            boundaries.extend(range(start + width, start + gap * width + 1, width))
            numbers.extend([0] * gap)
            continue
        end = min(bisect_left(below, below[first] + enough), bisect_left(values, start + width))
        after = values[end] if end < len(values) else values[-1] + 1
        boundaries.append(min(after, start + width))
        numbers.append(below[end] - below[first])
        first = end
    return boundaries, numbers


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)
