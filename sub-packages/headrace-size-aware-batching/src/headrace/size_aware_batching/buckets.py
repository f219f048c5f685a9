"""Batches of samples from one bucket of sizes, and bucket boundaries."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching._sizes import Vector, number_vector, size_vector
from headrace.size_aware_batching._validation import shortlist, warn


def kwargs_by_bucket(
    shared: Mapping[str, Any] | None, individual: Mapping[str, Sequence[Any]] | None, count: int
) -> list[dict[str, Any]]:
    """Put together the keyword arguments of each bucket.

    Raises:
        TypeError: If one of them is not a mapping, or an individual argument not a sequence.
        ValueError: If a sequence has not ``count`` values, or a name is in both.

    >>> kwargs_by_bucket({"a": 1}, {"b": [2, 3]}, 2)
    [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}]
    """
    both = _mapping(shared, "base_batch_sampler_shared_kwargs")
    each = _mapping(individual, "base_batch_sampler_individual_kwargs")
    if twice := sorted(both.keys() & each.keys()):
        raise ValueError(f"{twice} are both shared and individual arguments; give each of them once")
    for name, values in each.items():
        if not isinstance(values, Sequence | np.ndarray | torch.Tensor) or isinstance(values, str):
            raise TypeError(
                f"base_batch_sampler_individual_kwargs[{name!r}] must be a sequence with a value for each "
                f"bucket, got {type(values).__name__}"
            )
        if len(values) != count:
            raise ValueError(
                f"base_batch_sampler_individual_kwargs[{name!r}] has {len(values)} values for {count} "
                "buckets; give one for each, the empty ones included"
            )
    return [dict(both) | {name: values[bucket] for name, values in each.items()} for bucket in range(count)]


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a mapping from argument names to values, or None, got {value!r}")
    if "sampler" in value:
        raise ValueError(f"{name} must not hold 'sampler': each bucket has its own")
    return value


def check_options(base: object, shuffle: object, generator: object) -> None:
    """Refuse a base, ``shuffle`` or ``generator`` of the wrong type with a ``TypeError``."""
    if not isinstance(base, type) or not issubclass(base, Sampler):
        raise TypeError(f"base_batch_sampler_class must be a class derived from Sampler, got {base!r}")
    if not isinstance(shuffle, bool):
        raise TypeError(f"shuffle must be True or False, got {shuffle!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")


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


_CHUNK = 65536  # indices turned into Python ints at a time
_NAMED = 10  # elements outside all buckets that the warning names


class BucketBatchSampler(Sampler[list[int]]):
    """Sort elements into buckets by size and batch each bucket by itself.

    Bucket ``i`` holds the elements with ``bucket_boundaries[i] <= size < bucket_boundaries[i + 1]``. For each
    bucket that is not empty, one batch sampler is made as ``base_batch_sampler_class(sampler, **kwargs)``,
    where ``sampler`` yields the indices in the bucket.

    With ``shuffle=True`` the order inside a bucket is random, and the bucket of the next batch is drawn in
    proportion to the elements that it has left. With ``shuffle=False`` elements keep their order and batches
    come bucket by bucket.

    Elements outside all buckets are left out, with a warning that counts and names them.

    ``len()`` is the sum over the buckets; it raises a ``TypeError`` where the base has no ``len()``.

    Args:
        sizes: Shape ``[n]``: the size of element 0 .. n - 1, as a tensor, array or sequence.
        bucket_boundaries: Shape ``[b + 1]``, at least 2: the cut points, each once. They are sorted here;
            infinite ones are allowed.
        base_batch_sampler_class: A ``Sampler`` of batches that takes a sampler of indices as its first
            argument, such as ``torch.utils.data.BatchSampler`` or ``SizeAwareBatchSampler``.
        base_batch_sampler_shared_kwargs: Further arguments, the same for each bucket.
        base_batch_sampler_individual_kwargs: Further arguments by name, each a sequence of ``b`` values, one
            a bucket from the smallest sizes to the largest, empty buckets included.
        shuffle: Random order inside the buckets and between them.
        generator: Source of all randomness here; torch's global one by default.

    Attributes:
        num_samples: Elements inside the buckets.
        bucket_sizes: Shape ``[b]``, int64: elements in each bucket.
        outside: Indices of the elements outside all buckets, int64.
        base_batch_samplers: The batch samplers of the buckets that are not empty.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If ``sizes`` or ``bucket_boundaries`` is not 1-D or holds a NaN, a size is negative, a
            boundary repeats, an individual argument has not one value a bucket, or an argument is both shared
            and individual.
        RuntimeError: If no element is in any bucket.

    >>> sampler = BucketBatchSampler(
    ...     sizes=torch.arange(7),
    ...     bucket_boundaries=torch.tensor([0, 3, 7]),
    ...     base_batch_sampler_class=torch.utils.data.BatchSampler,
    ...     base_batch_sampler_shared_kwargs={"drop_last": False},
    ...     base_batch_sampler_individual_kwargs={"batch_size": [2, 3]},
    ...     shuffle=False,
    ... )
    >>> list(sampler), len(sampler)
    ([[0, 1], [2], [3, 4, 5], [6]], 4)
    """

    def __init__(
        self,
        sizes: torch.Tensor | NDArray[Any] | Sequence[float],
        bucket_boundaries: torch.Tensor | NDArray[Any] | Sequence[float],
        base_batch_sampler_class: Callable[..., Sampler[list[int]]],
        base_batch_sampler_shared_kwargs: Mapping[str, Any] | None = None,
        base_batch_sampler_individual_kwargs: Mapping[str, Sequence[Any]] | None = None,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        boundaries = checked_boundaries(bucket_boundaries)
        buckets = bucket_of(size_vector(sizes, "sizes"), boundaries)
        check_options(base_batch_sampler_class, shuffle, generator)
        kwargs = kwargs_by_bucket(
            base_batch_sampler_shared_kwargs, base_batch_sampler_individual_kwargs, len(boundaries) - 1
        )
        self.shuffle, self.generator = shuffle, generator
        self.bucket_boundaries = torch.from_numpy(boundaries)
        self.bucket_sizes = torch.from_numpy(np.bincount(buckets[buckets >= 0], minlength=len(kwargs)))
        self.num_samples = int(self.bucket_sizes.sum())
        self.outside = torch.from_numpy(np.flatnonzero(buckets < 0))
        _report_outside(self.outside, self.num_samples, boundaries.tolist())
        members = np.split(np.argsort(buckets, kind="stable")[len(self.outside) :], self._ends())
        self.base_batch_samplers = [
            base_batch_sampler_class(_BucketIndices(torch.from_numpy(indices), shuffle, generator), **options)
            for indices, options in zip(members, kwargs, strict=True)
            if len(indices)
        ]

    def __len__(self) -> int:
        total = 0
        for base in self.base_batch_samplers:
            if not isinstance(base, Sized):
                name = type(base).__name__
                raise TypeError(f"the number of batches is not known beforehand: {name} has no len()")
            total += len(base)
        return total

    def __iter__(self) -> Iterator[list[int]]:
        if self.shuffle:
            yield from self._drawn()
        else:
            for base in self.base_batch_samplers:
                yield from base

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the base batch samplers that have a ``set_epoch``."""
        for base in self.base_batch_samplers:
            if callable(set_epoch := getattr(base, "set_epoch", None)):
                set_epoch(epoch)

    def _ends(self) -> list[int]:
        return [int(end) for end in self.bucket_sizes.cumsum(0)[:-1]]

    def _drawn(self) -> Iterator[list[int]]:
        batches = [iter(base) for base in self.base_batch_samplers]
        left = [int(size) for size in self.bucket_sizes if size]
        while any(left):
            bucket = draw(left, self.generator)
            batch = next(batches[bucket], None)
            # a base may give more or fewer elements than it got: only its own end is the end
            left[bucket] = 0 if batch is None else max(left[bucket] - len(batch), 1)
            if batch is not None:
                yield batch


class _BucketIndices(Sampler[int]):
    """The indices of one bucket, in order or shuffled anew in each pass."""

    def __init__(self, indices: torch.Tensor, shuffle: bool, generator: torch.Generator | None) -> None:
        super().__init__()
        self.indices, self.shuffle, self.generator = indices, shuffle, generator

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        order = self.indices
        if self.shuffle:
            order = order[torch.randperm(len(order), generator=self.generator)]
        for start in range(0, len(order), _CHUNK):
            yield from order[start : start + _CHUNK].tolist()


def draw(weights: Sequence[int], generator: torch.Generator | None) -> int:
    """Draw a position with a probability in proportion to its integer weight.

    >>> draw([0, 5, 0], generator=None)
    1
    """
    ends = list(accumulate(weights))
    return bisect_right(ends, int(torch.randint(ends[-1], (), generator=generator)))


def _report_outside(outside: torch.Tensor, inside: int, boundaries: list[float]) -> None:
    if not inside:
        raise RuntimeError(
            f"none of the {len(outside)} sizes is in [{boundaries[0]}, {boundaries[-1]}), so there is "
            "nothing to batch; bucket_boundaries must enclose the sizes"
        )
    if len(outside):
        warn(
            f"{len(outside)} of {len(outside) + inside} elements have sizes outside "
            f"[{boundaries[0]}, {boundaries[-1]}) and are left out: "
            f"indices {shortlist(outside[:_NAMED].tolist(), len(outside))}"
        )
