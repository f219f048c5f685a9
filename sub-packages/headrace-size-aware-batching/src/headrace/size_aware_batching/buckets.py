"""Buckets of sizes, and batches that each come from one bucket."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching._shared.as_sampler import refuse_as_sampler
from headrace.size_aware_batching._shared.checks import checked_int, shown
from headrace.size_aware_batching._shared.display import counted, never_raises
from headrace.size_aware_batching._shared.ranks import refuse_sharding_again
from headrace.size_aware_batching._shared.warnings import warn
from headrace.size_aware_batching._validation import checked_flag, shortlist
from headrace.size_aware_batching.sizes.read import Vector, number_vector, size_vector

_MAX_BUCKETS = 1_000_000  # a larger number suggests a wrong unit
_CHUNK = 65536  # indices converted to Python ints at a time
_NAMED = 10  # samples outside all buckets that the warning names


class Buckets(NamedTuple):
    """Intervals, closed on the left and open on the right, and the number of samples in each.

    Attributes:
        bucket_boundaries: Shape ``[n + 1]``, int64, strictly increasing.
        bucket_sizes: Shape ``[n]``, int64; the number of samples in ``[boundary[i], boundary[i + 1])``.
    """

    bucket_boundaries: torch.Tensor
    bucket_sizes: torch.Tensor

    @never_raises
    def __repr__(self) -> str:
        low, high = self.bucket_boundaries[0], self.bucket_boundaries[-1]
        samples = counted(int(self.bucket_sizes.sum()), "sample")
        return f"{type(self).__name__}({len(self.bucket_sizes):,} from {low:,} to {high - 1:,}, {samples})"


def create_buckets(
    sizes: "torch.Tensor | NDArray[np.integer] | list[int]", max_width: int, min_bucket_count: int
) -> Buckets:
    """Cut the range of ``sizes`` into buckets, greedily from the smallest size up.

    A bucket is closed when it has ``min_bucket_count`` samples, or when the next size would make it wider than
    ``max_width``. A gap in the sizes becomes empty buckets of width ``max_width``. The last bucket ends at the largest
    size + 1 and may have fewer samples.

    Args:
        sizes: Shape ``[n]``, n > 0: integers >= 0, in any order.
        max_width: Largest width of a bucket, at least 1, in the unit of the sizes.
        min_bucket_count: Number of samples at which a bucket closes, at least 1.

    Raises:
        TypeError: If an argument has values that are not integers.
        ValueError: If ``sizes`` is empty, not 1-D or has a negative size, another argument is below 1, or the gaps in
            the sizes need more than a million buckets.

    >>> buckets = create_buckets(torch.tensor([1, 1, 2, 3, 3, 3, 12]), max_width=5, min_bucket_count=6)
    >>> buckets.bucket_boundaries.tolist(), buckets.bucket_sizes.tolist()
    ([1, 6, 11, 13], [6, 0, 1])
    """
    width, enough = checked_int("max_width", max_width, 1), checked_int("min_bucket_count", min_bucket_count, 1)
    vector = size_vector(sizes, "sizes")
    if not vector.size:
        raise ValueError("sizes must hold at least one size, got none")
    if vector.dtype != np.int64:
        raise TypeError(f"sizes must be integers, got {vector.dtype}: round them up, as sizes.ceil().long()")
    values, counts = np.unique(vector, return_counts=True)
    if values[-1] == np.iinfo(np.int64).max:
        raise ValueError(
            f"sizes must be less than {values[-1]}, got {values[-1]}: the last boundary would exceed 64 bits"
        )
    boundaries, numbers = _cut(values.tolist(), [0, *np.cumsum(counts).tolist()], width, enough)
    return Buckets(torch.tensor(boundaries), torch.tensor(numbers))


class BucketBatchSampler(Sampler[list[int]]):
    """Sort samples into buckets by size and batch each bucket separately.

    Bucket ``i`` has the samples with ``bucket_boundaries[i] <= size < bucket_boundaries[i + 1]``. For each non-empty
    bucket, ``base_batch_sampler_class(sampler, **kwargs)`` creates a batch sampler, where ``sampler`` yields the
    indices in the bucket.

    With ``shuffle=True`` the order within a bucket is random, and the bucket of the next batch is drawn in proportion
    to its remaining samples. With ``shuffle=False`` samples keep their order and batches come bucket by bucket. Every
    iteration starts from the beginning, also after a ``break``, and draws new random numbers from the generator.

    Samples outside all buckets are left out, with a warning that counts and names them. The sampler does not distribute
    batches to ranks; `DistributedSizeAwareBatchSampler` with ``cost="padded"`` does.

    ``len()`` is the sum over the buckets; it raises a ``TypeError`` if a base batch sampler has no ``len()``.

    Args:
        sizes: Size of each sample, shape ``[n]``: a tensor, array or sequence.
        bucket_boundaries: Shape ``[b + 1]``, at least 2: the boundaries, all different, in any order; infinite values
            are allowed.
        base_batch_sampler_class: A ``Sampler`` of batches that takes a sampler of indices as its first
            argument, such as ``torch.utils.data.BatchSampler`` or ``SizeAwareBatchSampler``.
        base_batch_sampler_shared_kwargs: Additional arguments, the same for each bucket.
        base_batch_sampler_individual_kwargs: Additional arguments by name, each a sequence of ``b`` values, one per
            bucket from the smallest sizes to the largest, including empty buckets.
        shuffle: Whether the order within buckets and of the buckets is random.
        generator: Source of all random numbers; by default torch's global generator.

    Attributes:
        num_buckets: Number of buckets, ``b``.
        num_samples: Number of samples in the buckets.
        bucket_boundaries: Shape ``[b + 1]``: the boundaries, sorted.
        bucket_sizes: Shape ``[b]``, int64: the number of samples in each bucket.
        outside: Indices of the samples outside all buckets, int64.
        base_batch_samplers: The batch samplers of the non-empty buckets.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``sizes`` or ``bucket_boundaries`` is not 1-D or has a NaN, a size is negative, a boundary
            repeats, an individual argument does not have one value per bucket, or an argument is both shared and
            individual.
        RuntimeError: If no sample is in any bucket.

    >>> sampler = BucketBatchSampler(
    ...     sizes=torch.arange(7),
    ...     bucket_boundaries=torch.tensor([0, 3, 7]),
    ...     base_batch_sampler_class=torch.utils.data.BatchSampler,
    ...     base_batch_sampler_shared_kwargs={"drop_last": False},
    ...     base_batch_sampler_individual_kwargs={"batch_size": [2, 3]},
    ...     shuffle=False,
    ... )
    >>> list(sampler), len(sampler), sampler.bucket_element_indices
    ([[0, 1], [2], [3, 4, 5], [6]], 4, [[0, 1, 2], [3, 4, 5, 6]])
    """

    def __init__(
        self,
        sizes: "torch.Tensor | NDArray[Any] | Sequence[float]",  # quoted for the signature that help() shows
        bucket_boundaries: "torch.Tensor | NDArray[Any] | Sequence[float]",
        base_batch_sampler_class: Callable[..., Sampler[list[int]]],
        base_batch_sampler_shared_kwargs: Mapping[str, Any] | None = None,
        base_batch_sampler_individual_kwargs: Mapping[str, Sequence[Any]] | None = None,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        boundaries = _checked_boundaries(bucket_boundaries)
        buckets = bucket_of(size_vector(sizes, "sizes"), boundaries)
        _check_options(base_batch_sampler_class, generator)
        kwargs = _kwargs_by_bucket(
            base_batch_sampler_shared_kwargs, base_batch_sampler_individual_kwargs, len(boundaries) - 1
        )
        self.shuffle, self.generator = checked_flag("shuffle", shuffle), generator
        self.num_buckets = len(kwargs)
        self.bucket_boundaries = torch.from_numpy(boundaries)
        self.bucket_sizes = torch.from_numpy(np.bincount(buckets[buckets >= 0], minlength=len(kwargs)))
        self.num_samples = int(self.bucket_sizes.sum())
        self.outside = torch.from_numpy(np.flatnonzero(buckets < 0))
        _report_outside(self.outside, self.num_samples, boundaries.tolist())
        inside = np.argsort(buckets, kind="stable")[len(self.outside) :]
        self._members = np.split(inside, self.bucket_sizes.cumsum(0)[:-1].tolist())
        self.base_batch_samplers = [
            base_batch_sampler_class(_BucketIndices(torch.from_numpy(indices), shuffle, generator), **options)
            for indices, options in zip(self._members, kwargs, strict=True)
            if len(indices)
        ]

    @property
    def bucket_element_indices(self) -> list[list[int]]:
        """The indices of the samples in each bucket, ascending; an empty list for an empty bucket."""
        return [indices.tolist() for indices in self._members]

    @never_raises
    def __repr__(self) -> str:
        figures = [f"{counted(self.num_samples, 'sample')} in {counted(self.num_buckets, 'bucket')}"]
        if len(self.outside):
            figures.append(f"{len(self.outside):,} outside")
        figures += [type(self.base_batch_samplers[0]).__name__, "shuffled" if self.shuffle else "in order"]
        return f"{type(self).__name__}({', '.join(figures)})"

    def __len__(self) -> int:
        total = 0
        for base in self.base_batch_samplers:
            if not isinstance(base, Sized):
                raise TypeError(f"the number of batches is not known: {type(base).__name__} has no len()")
            total += len(base)
        return total

    def __iter__(self) -> Iterator[list[int]]:
        refuse_as_sampler(self)
        refuse_sharding_again(None, uneven=True)
        if not self.shuffle:
            for base in self.base_batch_samplers:
                yield from base
            return
        batches = [iter(base) for base in self.base_batch_samplers]
        left = [int(size) for size in self.bucket_sizes if size]
        while any(left):
            bucket = _draw(left, self.generator)
            batch = next(batches[bucket], None)
            # A base may yield more or fewer samples than it received: a bucket ends when its base ends.
            left[bucket] = 0 if batch is None else max(left[bucket] - len(batch), 1)
            if batch is not None:
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the base batch samplers that have it."""
        for base in self.base_batch_samplers:
            if callable(set_epoch := getattr(base, "set_epoch", None)):
                set_epoch(epoch)


class _BucketIndices(Sampler[int]):
    """The indices of one bucket, in order or with a new shuffle in each pass."""

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


def bucket_of(sizes: Vector, boundaries: Vector) -> NDArray[np.int64]:
    """Find the bucket of each size: i with ``boundaries[i] <= size < boundaries[i + 1]``, or -1.

    >>> bucket_of(np.array([0, 1, 5, 6, 9]), np.array([1, 6, 9]))
    array([-1,  0,  0,  1, -1])
    """
    found = np.searchsorted(boundaries, sizes, side="right").astype(np.int64) - 1
    found[found == len(boundaries) - 1] = -1
    return found


def _cut(values: list[int], below: list[int], width: int, enough: int) -> tuple[list[int], list[int]]:
    # below[i] is the number of samples smaller than values[i]; plain ints, so that no sum can overflow
    boundaries: list[int] = [values[0]]
    numbers: list[int] = []
    first = 0
    while first < len(values):
        start = boundaries[-1]
        if gap := (values[first] - start) // width:
            if len(numbers) + gap > _MAX_BUCKETS:
                raise ValueError(
                    f"max_width must give at most {_MAX_BUCKETS} buckets, got {width}, which makes {gap} empty buckets "
                    f"between {start} and {values[first]}: use a greater max_width or leave such sizes out"
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


def _draw(weights: Sequence[int], generator: torch.Generator | None) -> int:
    """Draw a position with a probability in proportion to its integer weight."""
    ends = list(accumulate(weights))
    return bisect_right(ends, int(torch.randint(ends[-1], (), generator=generator)))


def _checked_boundaries(bucket_boundaries: object) -> Vector:
    boundaries = number_vector(bucket_boundaries, "bucket_boundaries").copy()
    if len(boundaries) < 2:
        raise ValueError(f"bucket_boundaries must have at least 2 entries, for one bucket, got {len(boundaries)}")
    boundaries.sort()
    if (repeated := boundaries[1:][boundaries[1:] == boundaries[:-1]]).size:
        raise ValueError(f"bucket_boundaries must differ from one another, got repeatedly: {shown(repeated.tolist())}")
    return boundaries


def _check_options(base: object, generator: object) -> None:
    if not isinstance(base, type) or not issubclass(base, Sampler):
        raise TypeError(f"base_batch_sampler_class must be a class derived from Sampler, got {shown(base)}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")


def _kwargs_by_bucket(
    shared: Mapping[str, Any] | None, individual: Mapping[str, Sequence[Any]] | None, count: int
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each bucket."""
    both = _checked_kwargs(shared, "base_batch_sampler_shared_kwargs")
    each = _checked_kwargs(individual, "base_batch_sampler_individual_kwargs")
    if twice := sorted(both.keys() & each.keys()):
        raise ValueError(f"base_batch_sampler arguments must be shared or individual, got both for {twice}")
    for name, values in each.items():
        argument = f"base_batch_sampler_individual_kwargs[{name!r}]"
        if not isinstance(values, Sequence | np.ndarray | torch.Tensor) or isinstance(values, str):
            raise TypeError(f"{argument} must be a sequence with a value for each bucket, got {type(values).__name__}")
        if len(values) != count:
            raise ValueError(
                f"{argument} must have a value for each of the {count} buckets, empty ones included, got {len(values)}"
            )
    return [dict(both) | {name: values[bucket] for name, values in each.items()} for bucket in range(count)]


def _checked_kwargs(value: object, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a mapping from argument names to values, or None, got {shown(value)}")
    if "sampler" in value:
        raise ValueError(f"{name} must not contain 'sampler': each bucket has its own")
    return value


def _report_outside(outside: torch.Tensor, inside: int, boundaries: list[float]) -> None:
    interval = f"[{boundaries[0]}, {boundaries[-1]})"
    if not inside:
        raise RuntimeError(
            f"bucket_boundaries must enclose the sizes, got {interval} with none of the {len(outside)} sizes in it: "
            "there is nothing to batch"
        )
    if len(outside):
        warn(
            f"{len(outside)} of {len(outside) + inside} samples have sizes outside {interval} and are left out: "
            f"indices {shortlist(outside[:_NAMED].tolist(), len(outside))}"
        )
