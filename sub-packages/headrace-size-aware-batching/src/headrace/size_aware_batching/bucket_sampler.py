"""Each batch from one bucket of sizes, formed by a batch sampler of the caller's choice."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from headrace.size_aware_batching.bucket_options import check_options, kwargs_by_bucket
from headrace.size_aware_batching.buckets import bucket_of, checked_boundaries
from headrace.size_aware_batching.messages import shortlist, warn
from headrace.size_aware_batching.vectors import size_vector

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
