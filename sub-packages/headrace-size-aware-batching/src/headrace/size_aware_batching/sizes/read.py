"""Sizes in any form, read into one array and validated once.

Three entry points share one set of checks: `read_sizes` (all sizes of a dataset, shape ``[n]`` or ``[n, k]``),
`size_vector` (shape ``[n]``) and `size_lookup` with `checked_size` (one size at a time, for streams).
"""

import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset
from tqdm import tqdm

from headrace.size_aware_batching._shared.checks import shown
from headrace.size_aware_batching._shared.columns import array_of_column
from headrace.size_aware_batching._validation import UNLIMITED, Number, real_number

Vector: TypeAlias = NDArray[np.int64] | NDArray[np.float64]
SizeOf: TypeAlias = Callable[[Any], Any] | Mapping[Any, Any] | Sequence[Any] | NDArray[Any] | torch.Tensor


# All sizes of a dataset.


def read_sizes(sizes: Any) -> NDArray[Any]:
    """Return the sizes of a dataset, in any form that samplers accept, as integers or float64, without a copy.

    >>> read_sizes([[3, 4], [5, 6]]).shape, read_sizes({0: 7, 1: 8}).tolist()
    ((2, 2), [7, 8])
    """
    sizes = array_of_column(sizes)
    if not isinstance(sizes, np.ndarray | torch.Tensor):
        if hasattr(sizes, "num_tokens"):
            return _by_call(sizes.num_tokens, len(sizes))
        if hasattr(sizes, "sizes"):
            return _sizes_of_dataset(sizes)
        if isinstance(sizes, ConcatDataset):
            return np.concatenate([_sizes_of_part(dataset) for dataset in sizes.datasets])
        if isinstance(sizes, Subset):
            return read_sizes(sizes.dataset)[np.asarray(sizes.indices, np.int64)]
        if isinstance(sizes, Dataset):
            raise TypeError(
                f"sizes must be numbers, or a dataset with sizes or num_tokens(index), got {type(sizes).__name__} "
                "without either: add one of them, or give the sizes as an array, such as [len(x) for x in dataset]"
            )
        if isinstance(sizes, Mapping):
            return _of_mapping(sizes)
    return _checked_table(sizes)


def _sizes_of_part(dataset: Any) -> NDArray[Any]:
    try:
        return read_sizes(dataset)
    except TypeError as error:
        if not hasattr(dataset, "column_names"):
            raise
        cure = "np.concatenate([part[...][:] for part in dataset.datasets])"
        raise TypeError(f"{error} of each, as {cure}") from None


def _checked_table(sizes: Any) -> NDArray[Any]:
    if isinstance(sizes, torch.Tensor):
        sizes = _array_of_tensor(sizes)
    try:
        array = np.asarray(sizes)
    except ValueError as error:
        raise ValueError(
            "sizes must be numbers of shape [n] or [n, k], got rows that differ in length: give a number for each, "
            f"such as [len(item) for item in column] ({error})"
        ) from None
    if array.size == 0:
        array = array.astype(np.int64)
    if isinstance(sizes, str | os.PathLike):
        raise TypeError(
            f"sizes must be numbers, got {shown(str(sizes))}: give the file with its column, (path, 'length')"
        )
    if array.ndim == 0 and isinstance(sizes, Iterable) and sizes is not array:
        raise TypeError(f"sizes must be an array or a sequence, got {type(sizes).__name__}: give list(sizes)")
    if array.dtype.kind not in "iuf":
        kind = "an array" if isinstance(sizes, np.ndarray) else type(sizes).__name__
        raise TypeError(
            f"sizes must be numbers, or a dataset with sizes or num_tokens(index), got {kind} of {_content(array)}"
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
    if array.ndim not in (1, 2):
        raise ValueError(f"sizes must have shape [n] or [n, k], got {array.shape}")
    if not _always_sizes(array.dtype) and array.size and not (array.min() >= 0 and array.max() < UNLIMITED):
        bad = np.flatnonzero(any_column(~((array >= 0) & (array < UNLIMITED))))
        raise ValueError(
            f"sizes must be numbers from 0 to 2**62, got {array[bad[0]]} at index {bad[0]} ({len(bad)} of {len(array)} "
            "are negative, null or NaN, or too large)"
        )
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _always_sizes(dtype: np.dtype[Any]) -> bool:
    """Return whether all numbers of a type are sizes, so that none has to be looked at."""
    return dtype.kind == "u" and np.iinfo(dtype).max < UNLIMITED


def _content(array: NDArray[Any]) -> str:
    """Describe the contents of an array without numbers, and the cure."""
    if array.dtype.kind not in "OUS" or not array.size:
        return str(array.dtype)
    values = ((index, array.item(index)) for index in range(array.size))
    others = ((index, item) for index, item in values if isinstance(item, bool) or not isinstance(item, numbers.Number))
    index, item = next(others, (None, array.item(0)))
    if index is None:
        return f"{array.dtype}, numbers of type {type(item).__name__}: give np.array(column).astype('int64')"
    cure = f"[{'item[...]' if isinstance(item, Mapping) else 'len(item)'} for item in column]"
    cure = "each sample a number" if item is None else f"a number for each, such as {cure}"
    return f"{array.dtype}, {shown(item)} of type {type(item).__name__} at index {index}: give {cure}"


def _sizes_of_dataset(dataset: Any) -> NDArray[Any]:
    sizes = read_sizes(dataset.sizes)
    if hasattr(dataset, "__len__") and len(dataset) != len(sizes):
        raise ValueError(
            f"sizes must hold one size for each sample, got {len(sizes)} sizes for the {len(dataset)} samples of "
            f"{type(dataset).__name__}"
        )
    return sizes


def _of_mapping(sizes: Mapping[Any, Any]) -> NDArray[Any]:
    missing = next((index for index in range(len(sizes)) if index not in sizes), None)
    if missing is not None:
        raise ValueError(
            f"sizes must be a mapping with the keys 0 to {len(sizes) - 1}, got one without {missing}: give the sizes "
            "in the order of the dataset, such as [sizes[name] for name in names]"
        )
    return _checked_table([sizes[index] for index in range(len(sizes))])


def _by_call(num_tokens: Callable[[int], Any], n_samples: int) -> NDArray[Any]:
    bar = tqdm(range(n_samples), desc="sizes", delay=1, leave=False)
    return _checked_table([checked_size(num_tokens(index), "index", index) for index in bar])


def any_column(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return for each row whether any flag is true, shape ``[n]``; flags of shape ``[n]`` are returned unchanged."""
    return flags if flags.ndim == 1 else np.asarray(flags.any(axis=1))


def column_limits(max_length: Any, columns: int) -> tuple[Number | None, ...]:
    """Return the largest size that counts in each column; None for a column without a limit.

    >>> column_limits(None, 2), column_limits(9, 1), column_limits((9, None), 2)
    ((None, None), (9,), (9, None))
    """
    if max_length is None:
        return (None,) * columns
    several = isinstance(max_length, Sequence) and not isinstance(max_length, str)
    values = tuple(max_length) if several else (max_length,)
    if len(values) != columns and columns == 1:
        raise ValueError(f"max_length must be a single number for sizes of one column, got {shown(max_length)}")
    if len(values) != columns:
        raise ValueError(
            f"max_length must have one entry for each of the {columns} columns of sizes, got {shown(max_length)}: give "
            "None for a column without a limit, such as max_length=(10, None)"
        )
    limits = [None if limit is None else real_number(limit, "max_length") for limit in values]
    for limit in limits:
        if limit is not None and limit <= 0:
            raise ValueError(f"max_length must be greater than 0, got {limit}")
    return tuple(None if limit is None or limit >= UNLIMITED else limit for limit in limits)


def plain_extra(extra_per_sample: Any) -> Number | list[Number] | None:
    """Return what samples have beside their sizes as a plain number, or one for each column; None for nothing.

    >>> plain_extra(np.int64(2)), plain_extra((2, 0)), plain_extra(0)
    (2, [2, 0], None)
    """
    values: Any = 0 if extra_per_sample is None else extra_per_sample
    if isinstance(values, np.ndarray | torch.Tensor):
        values = values.tolist()
    several = isinstance(values, Sequence) and not isinstance(values, str)
    numbers = [real_number(value, "extra_per_sample") for value in (values if several else [values])]
    for number in numbers:
        if not 0 <= number < UNLIMITED:
            raise ValueError(f"extra_per_sample must be a number >= 0 and below 2**62, got {number}")
    return (numbers if len(numbers) > 1 else numbers[0]) if any(numbers) else None


def column_extras(extra_per_sample: Number | list[Number] | None, columns: int) -> tuple[Number, ...]:
    """Return what samples have beside their sizes in each column.

    >>> column_extras(None, 2), column_extras(2, 1), column_extras([2, 0], 2)
    ((0, 0), (2,), (2, 0))
    """
    if extra_per_sample is None:
        return (0,) * columns
    values = tuple(extra_per_sample) if isinstance(extra_per_sample, list) else (extra_per_sample,)
    if len(values) != columns and columns == 1:
        raise ValueError(f"extra_per_sample must be a single number for sizes of one column, got {shown(values)}")
    if len(values) != columns:
        raise ValueError(
            f"extra_per_sample must have one number for each of the {columns} columns of sizes, got "
            f"{shown(extra_per_sample)}: give 0 for a column without, such as extra_per_sample=(2, 0)"
        )
    return values


def effective_sizes(sizes: NDArray[Any], extras: tuple[Number, ...], limits: tuple[Number | None, ...]) -> NDArray[Any]:
    """Return the sizes as budgets count them: each column with its extra, at most its limit; the array itself if equal.

    >>> effective_sizes(np.array([5, 9]), (2,), (10,)).tolist()
    [7, 10]
    """
    return capped_sizes(_larger_sizes(sizes, extras) if any(extras) else sizes, limits)


def _larger_sizes(sizes: NDArray[Any], extras: tuple[Number, ...]) -> NDArray[Any]:
    largest, extra = sizes.max(initial=0).item(), max(extras)
    if largest + extra >= UNLIMITED:
        raise ValueError(f"extra_per_sample must leave sizes below 2**62, got {extra} beside a size of {largest}")
    if sizes.dtype.kind == "f" or not all(float(number).is_integer() for number in extras):
        return np.asarray(sizes + np.array(extras, np.float64))
    kind = sizes.dtype if largest + extra <= np.iinfo(sizes.dtype).max else np.dtype(np.int64)
    return np.asarray(np.add(sizes, np.array([int(number) for number in extras], kind), dtype=kind))


def capped_sizes(sizes: NDArray[Any], limits: tuple[Number | None, ...]) -> NDArray[Any]:
    """Return the sizes with each column clipped to its limit; without limits, the array itself.

    >>> capped_sizes(np.array([[5, 50], [20, 60]]), (10, None)).tolist()
    [[5, 50], [10, 60]]
    """
    if all(limit is None for limit in limits):
        return sizes
    whole = sizes.dtype.kind in "iu" and all(limit is None or float(limit).is_integer() for limit in limits)
    largest = int(sizes.max(initial=0))
    table = sizes.copy() if whole else sizes.astype(np.float64)
    columns = table if table.ndim == 2 else table[:, None]
    for column, limit in zip(columns.T, limits, strict=True):
        if limit is not None:
            np.minimum(column, np.asarray(min(int(limit), largest) if whole else limit, table.dtype), out=column)
    return table


# One column of sizes or other numbers.


def size_vector(values: object, name: str) -> Vector:
    """Return numbers as by `number_vector`; refuse negative ones."""
    vector = number_vector(values, name)
    if (wrong := np.flatnonzero(vector < 0)).size:
        raise ValueError(
            f"{name} must hold numbers >= 0, got {vector[wrong[0]]} at index {wrong[0]} ({wrong.size} are negative)"
        )
    return vector


def work_vector(work: Any, n_samples: int, name: str = "work") -> NDArray[np.float64]:
    """Return a copy of the work of each sample, which must be finite."""
    vector = size_vector(work, name).astype(np.float64)
    if len(vector) != n_samples:
        raise ValueError(f"{name} must hold one number for each of {n_samples} samples, got {len(vector)} numbers")
    if (wrong := np.flatnonzero(~np.isfinite(vector))).size:
        raise ValueError(f"{name} must hold finite numbers, got {vector[wrong[0]]} at index {wrong[0]}")
    if (largest := float(vector.max(initial=0))) > sys.float_info.max / max(1, n_samples):
        raise ValueError(f"{name} must add up to a finite number, got up to {largest}: count it in a larger unit")
    return vector


def number_vector(values: object, name: str) -> Vector:
    """Convert a 1-D array, tensor or sequence of real numbers without NaN to an int64 or float64 array.

    >>> number_vector(torch.tensor([1, 2], dtype=torch.uint8), "sizes").dtype
    dtype('int64')
    """
    values = array_of_column(values, name)
    if isinstance(values, torch.Tensor):
        array = _array_of_tensor(values)
    elif isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        array = _array_of_sequence(values, name)
    else:
        raise TypeError(f"{name} must be a 1-D tensor, array or sequence, got {type(values).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}: give one number for each element")
    if array.dtype.kind in "iu":
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{name} must hold integers of 64 bits, got {array.max()}: use a larger unit")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must hold integers or floats, got dtype {_content(array)}")
    if (wrong := np.flatnonzero(np.isnan(array))).size:
        raise ValueError(f"{name} must hold numbers, got NaN at index {wrong[0]} ({wrong.size} are null or NaN)")
    return array.astype(np.float64, copy=False)


def _array_of_sequence(values: Sequence[Any], name: str) -> NDArray[Any]:
    numbers = [real_number(value, f"{name}[{index}]") for index, value in enumerate(values)]
    whole = all(isinstance(number, int) for number in numbers)
    try:
        return np.array(numbers, dtype=np.int64 if whole else np.float64)
    except OverflowError:
        raise ValueError(f"{name} must hold integers of 64 bits, got {max(numbers)}: use a larger unit") from None


def _array_of_tensor(tensor: torch.Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.double() if plain.is_floating_point() else plain).numpy()  # numpy has no bfloat16
    return array


# One size at a time.


def size_lookup(sizeof: SizeOf) -> Callable[[Any], Any]:
    """Convert ``sizeof`` to a function from an index, key or sample to its size.

    Arrays and tensors are validated here at once; sizes of all other forms need `checked_size`.

    >>> size_lookup({"a": 3})("a"), size_lookup([5, 7])(1), size_lookup(len)("four")
    (3, 7, 4)
    """
    sizeof = array_of_column(sizeof, "sizeof")
    if isinstance(sizeof, np.ndarray | torch.Tensor):
        return partial(_by_position, size_vector(sizeof, "sizeof"))
    if isinstance(sizeof, Mapping):
        return partial(_by_key, sizeof)
    if isinstance(sizeof, Sequence) and not isinstance(sizeof, str | bytes | bytearray):
        return partial(_by_index, sizeof)
    if callable(sizeof):
        return sizeof
    raise TypeError(
        "sizeof must be a callable, a mapping, a sequence, a numpy array or a torch tensor, got "
        f"{type(sizeof).__name__}"
    )


def checked_size(value: object, noun: str, key: object) -> Number:
    """Return the validated size of one sample, named by ``noun`` and ``key`` in errors; infinity fits no budget."""
    if (type(value) is int or type(value) is float) and value >= 0:  # the common case needs no name
        return value
    number = real_number(value, name := f"the size of {noun} {key}")
    if number < 0:
        raise ValueError(f"{name} must be a number >= 0, got {number}")
    return number


def plain_index(key: Any) -> Any:
    """Convert an integer of any library to an int; return every other key unchanged."""
    return operator.index(key) if hasattr(key, "__index__") and getattr(key, "ndim", 0) == 0 else key


def _by_position(values: Vector, key: Any) -> Number:
    return values.item(_position(key, len(values)))  # faster than making a numpy scalar


def _by_index(values: Sequence[Any], key: Any) -> Any:
    return values[_position(key, len(values))]


def _position(key: Any, length: int) -> int:
    index = operator.index(key)
    if not 0 <= index < length:  # Python would count a negative index from the end
        raise IndexError(
            f"sizeof must hold a size for each index, got index {index} and {length} sizes: give one size for each "
            "index that the sampler or dataset yields"
        )
    return index


def _by_key(values: Mapping[Any, Any], key: Any) -> Any:
    try:
        return values[plain_index(key)]
    except KeyError:
        raise KeyError(
            f"sizeof must hold a size for each key, got none for {shown(key)}: add it to the mapping"
        ) from None
