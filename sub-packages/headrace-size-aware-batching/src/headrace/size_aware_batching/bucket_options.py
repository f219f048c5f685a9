"""The options of ``BucketBatchSampler``, checked."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


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
