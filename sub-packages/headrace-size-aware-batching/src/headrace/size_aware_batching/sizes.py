"""Sizes in whatever form they come, checked where they enter."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from headrace.size_aware_batching.vectors import Number, Vector, real_number, size_vector

SizeOf: TypeAlias = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any] | NDArray[Any] | torch.Tensor

_ALLOWED = "a callable, a mapping, a sequence, a numpy array or a torch tensor"


def checked_size(value: object, noun: str, key: object) -> Number:
    """Check what ``sizeof`` gave for one element; infinity is a size that fits no budget.

    Args:
        value: The size as it came.
        noun: What kind of thing ``key`` is, for the error: ``"index"``, ``"the element at position"``.
        key: Names the element.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is NaN or negative.
    """
    if (type(value) is int or type(value) is float) and value >= 0:  # the common case needs no name
        return value
    number = real_number(value, name := f"the size of {noun} {key}")
    if number < 0:
        raise ValueError(f"{name} is {number}; a size must be a number from 0 on")
    return number


def checked_budget(max_total_size: object) -> Number:
    """Check a budget; infinity means that everything fits.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is NaN, zero or negative.

    >>> checked_budget(4096)
    4096
    """
    number = real_number(max_total_size, "max_total_size")
    if number <= 0:
        raise ValueError(f"max_total_size must be greater than 0, got {number}: nothing would fit")
    return number


def size_lookup(sizeof: SizeOf) -> Callable[[Any], Any]:
    """Turn ``sizeof`` into a function from an index, key or element to its size as it came.

    Arrays and tensors are checked here as a whole; everything else is to be checked value by value.

    Raises:
        TypeError: If ``sizeof`` is none of the forms allowed.
        ValueError: If it is an array or tensor that is not 1-D, or that holds NaN or negative sizes.

    >>> size_lookup({"a": 3})("a"), size_lookup([5, 7])(1), size_lookup(len)("four")
    (3, 7, 4)
    """
    if isinstance(sizeof, np.ndarray | torch.Tensor):
        return partial(_by_position, size_vector(sizeof, "sizeof"))
    if isinstance(sizeof, Mapping):
        return partial(_by_key, sizeof)
    if isinstance(sizeof, Sequence) and not isinstance(sizeof, str | bytes | bytearray):
        return partial(_by_index, sizeof)
    if callable(sizeof):
        return sizeof
    raise TypeError(f"sizeof must be {_ALLOWED}, got {type(sizeof).__name__}")


def size_array(sizeof: SizeOf, n: int, name: str = "sizeof") -> Vector:
    """Evaluate ``sizeof`` once for each of the indices 0 .. n - 1.

    A progress bar appears when a callable takes longer than a second.

    Args:
        sizeof: Any of the forms that the samplers take.
        n: How many.
        name: What to call it in an error.

    Returns:
        Shape ``[n]``, int64 when all sizes are integers, else float64.

    Raises:
        TypeError: If ``sizeof`` or one of the sizes is of the wrong type.
        ValueError: If there are not ``n`` sizes or one of them is NaN or negative.

    >>> size_array(lambda index: index * 10, 3)
    array([ 0, 10, 20])
    """
    lookup = size_lookup(sizeof)
    if isinstance(sizeof, np.ndarray | torch.Tensor | Sequence):
        if len(sizeof) != n:
            raise ValueError(f"{name} has {len(sizeof)} sizes for {n} elements; give one size for each")
        return size_vector(sizeof, name)
    bar = tqdm(range(n), desc="sizes", delay=1, leave=False)
    return size_vector([checked_size(lookup(index), "index", index) for index in bar], name)


def plain_index(key: Any) -> Any:
    """Turn an integer of any library into an int; leave every other key as it is."""
    return operator.index(key) if hasattr(key, "__index__") and getattr(key, "ndim", 0) == 0 else key


def _by_position(values: Vector, key: Any) -> Number:
    return values.item(_position(key, len(values)))  # faster than making a numpy scalar


def _by_index(values: Sequence[Any], key: Any) -> Any:
    return values[_position(key, len(values))]


def _position(key: Any, length: int) -> int:
    index = operator.index(key)
    if not 0 <= index < length:  # a negative one would count from the end, in silence
        raise IndexError(
            f"sizeof holds {length} sizes and was asked for index {index}; "
            "give one size for each index that the sampler or dataset yields"
        )
    return index


def _by_key(values: Mapping[Any, Any], key: Any) -> Any:
    try:
        return values[plain_index(key)]
    except KeyError:
        raise KeyError(f"sizeof has no size for {key!r}; add it to the mapping") from None
