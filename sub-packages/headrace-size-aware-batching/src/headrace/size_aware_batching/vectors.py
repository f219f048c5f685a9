"""Real numbers of any library as Python's, and vectors of them as numpy's. Pure."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Number: TypeAlias = int | float
Vector: TypeAlias = NDArray[np.int64] | NDArray[np.float64]


def real_number(value: object, name: str) -> Number:
    """Turn a real number of any library into an int, exactly, or a float.

    Args:
        value: A number, or an array or tensor of one element.
        name: What to call it in an error.

    Raises:
        TypeError: If it is not a real number; a bool is none.
        ValueError: If it is NaN.

    >>> real_number(torch.tensor(3), "size"), real_number(np.float32(0.5), "size")
    (3, 0.5)
    """
    plain = value
    if (
        (isinstance(plain, torch.Tensor) and plain.numel() == 1)
        or isinstance(plain, np.generic)
        or (isinstance(plain, np.ndarray) and plain.size == 1)
    ):
        plain = plain.item()
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    if isinstance(plain, Integral):
        return int(plain)
    if math.isnan(number := float(plain)):
        raise ValueError(f"{name} is NaN, not a number; remove or replace it")
    return number


def size_vector(values: object, name: str) -> Vector:
    """Turn a 1-D array, tensor or sequence of sizes into an array; see ``number_vector``.

    Raises:
        ValueError: Also if a size is negative.
    """
    vector = number_vector(values, name)
    if (wrong := np.flatnonzero(vector < 0)).size:
        raise ValueError(
            f"{name} holds {wrong.size} negative sizes, the first is {vector[wrong[0]]} at index {wrong[0]}; "
            "a size must be a number from 0 on"
        )
    return vector


def number_vector(values: object, name: str) -> Vector:
    """Turn a 1-D array, tensor or sequence of real numbers into an int64 or float64 array.

    Raises:
        TypeError: If it is none of these, or its elements are not real numbers.
        ValueError: If it is not 1-D, holds a NaN or an integer beyond int64.

    >>> number_vector(torch.tensor([1, 2], dtype=torch.uint8), "sizes").dtype
    dtype('int64')
    """
    if isinstance(values, torch.Tensor):
        return _checked_vector(_tensor_to_array(values), name)
    if isinstance(values, np.ndarray):
        return _checked_vector(values, name)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return _checked_vector(_sequence_to_array(values, name), name)
    raise TypeError(f"{name} must be a 1-D tensor, array or sequence, got {type(values).__name__}")


def _sequence_to_array(values: Sequence[Any], name: str) -> NDArray[Any]:
    numbers = [real_number(value, f"{name}[{index}]") for index, value in enumerate(values)]
    whole = all(isinstance(number, int) for number in numbers)
    try:
        return np.array(numbers, dtype=np.int64 if whole else np.float64)
    except OverflowError:
        raise ValueError(f"{name} holds {max(numbers)}, beyond the 64-bit integers; use a larger unit") from None


def _tensor_to_array(tensor: torch.Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.double() if plain.is_floating_point() else plain).numpy()  # numpy has no bf16
    return array


def _checked_vector(array: NDArray[Any], name: str) -> Vector:
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}; flatten it to one number an element")
    if array.dtype.kind in "iu":
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{name} holds {array.max()}, beyond the 64-bit integers; use a larger unit")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must hold integers or floats, got dtype {array.dtype}")
    if (wrong := np.flatnonzero(np.isnan(array))).size:
        raise ValueError(f"{name} holds {wrong.size} NaN, the first at index {wrong[0]}; remove or replace them")
    return array.astype(np.float64, copy=False)
