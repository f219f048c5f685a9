"""Walks through the samples of a batch in step, field by field. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Path: TypeAlias = tuple[str | int, ...]
NUMBERS = bool | int | float | complex
Leaf: TypeAlias = Callable[[list[torch.Tensor], Path], Any]


def gather(values: Sequence[Any], leaf: Leaf, path: Path = ()) -> Any:
    """Join the same field of all samples, and the fields within it.

    Args:
        values: What each sample holds there, one entry a sample, at least one.
        leaf: Joins tensors that have a first dimension, given the path to them.
        path: Keys and positions that lead to the field.

    Returns:
        Dicts and tuples of the same form; numbers and 0-d tensors stacked, strings and bytes in a list.

    Raises:
        TypeError: If samples hold different kinds of things there, or something that cannot be joined.
        ValueError: If keys, lengths of tuples or dtypes differ.

    >>> gather([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}], leaf=lambda tensors, path: None)
    {'x': tensor([1, 2]), 'name': ['a', 'b']}
    """
    kind = same_kind(values, path)
    if kind == "a dict":
        return {key: gather([value[key] for value in values], leaf, (*path, key)) for key in same_keys(values, path)}
    if kind == "a tuple":
        joined = [gather([v[i] for v in values], leaf, (*path, i)) for i in range(same_count(values, path))]
        return like(values[0], joined)
    if kind == "text":
        return list(values)
    tensors = [as_tensor(value) for value in values]
    same_dtype(tensors, path)
    return leaf(tensors, path) if kind == "a tensor" else torch.stack(tensors)


def place(path: Path, sample: int | None = None) -> str:
    """Name a field of a sample for an error.

    >>> place(("a", 0), sample=3), place(())
    ("samples[3]['a'][0]", 'samples[i]')
    """
    return f"samples[{'i' if sample is None else sample}]" + "".join(f"[{key!r}]" for key in path)


def kind_of(value: Any) -> str | None:
    """Return how a value is joined, None where it cannot be.

    >>> kind_of([1, 2]), kind_of((1, 2)), kind_of(0.5), kind_of(object())
    ('a tensor', 'a tuple', 'a number', None)
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not isinstance(value, str | bytes):
        known = isinstance(value, torch.Tensor) or value.dtype.kind in "biufc"
        return ("a tensor" if value.ndim else "a number") if known else None
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, str | bytes):
        return "text"
    if isinstance(value, list) and all(isinstance(element, NUMBERS) for element in value):
        return "a tensor"  # token ids as a tokenizer gives them
    if isinstance(value, tuple | list):
        return "a tuple"
    return "a number" if isinstance(value, NUMBERS) else None


def same_kind(values: Sequence[Any], path: Path) -> str:
    """Return how the values are joined, or raise a TypeError that names the sample that does not go with them."""
    kinds = [known_kind(value, path, sample) for sample, value in enumerate(values)]
    for sample, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise TypeError(
                f"{place(path, sample)} is {kind}, {place(path, 0)} is {kinds[0]}: give all samples one form"
            )
    return kinds[0]


def known_kind(value: Any, path: Path, sample: int) -> str:
    """Return how a value is joined, or raise a TypeError that names it."""
    if (kind := kind_of(value)) is None:
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(
            f"{place(path, sample)}: got {what}, expected tensors, numpy arrays or lists of numbers, numbers, "
            "strings, or dicts and tuples of these: convert it in the dataset, or leave it out"
        )
    return kind


def same_keys(values: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Return the keys of the first dict, or raise a ValueError where another one has others."""
    first = values[0].keys()
    for sample, value in enumerate(values):
        if value.keys() != first:
            lacks, has = sorted(map(repr, first - value.keys())), sorted(map(repr, value.keys() - first))
            raise ValueError(
                f"{place(path, sample)} has other keys than {place(path, 0)}: it lacks [{', '.join(lacks)}] and has "
                f"[{', '.join(has)}] besides: give all samples the same keys"
            )
    return list(first)


def same_count(values: Sequence[Sequence[Any]], path: Path) -> int:
    """Return the number of elements of the first tuple, or raise a ValueError where another one has more or fewer."""
    first = len(values[0])
    for sample, value in enumerate(values):
        if len(value) != first:
            raise ValueError(f"{place(path, sample)} has {len(value)} elements, {place(path, 0)} has {first}")
    return first


def same_dtype(tensors: Sequence[torch.Tensor], path: Path) -> None:
    """Raise a ValueError where a tensor has another dtype than the first."""
    for sample, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"{place(path, sample)} is of {tensor.dtype}, {place(path, 0)} of {tensors[0].dtype}: "
                "convert them to one dtype in the dataset"
            )


def like(sample: Any, fields: list[Any]) -> Any:
    """Return fields as what the sample is: a named tuple, a tuple or a list."""
    if hasattr(sample, "_fields"):
        return type(sample)(*fields)
    return fields if isinstance(sample, list) else tuple(fields)


def as_tensor(value: Any) -> torch.Tensor:
    """Turn a tensor, array, list of numbers or number into a tensor, without a copy where that can be.

    Floats become float64, as in ``torch.utils.data.default_collate``.

    >>> as_tensor(0.5).dtype, as_tensor([]).dtype, as_tensor(np.arange(3)[::-1])
    (torch.float64, torch.int64, tensor([2, 1, 0]))
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(plain_array(np.asarray(value)))
    if value == []:
        return torch.zeros(0, dtype=torch.int64)
    real = any(isinstance(element, float) for element in (value if isinstance(value, list) else [value]))
    return torch.tensor(value, dtype=torch.float64 if real else None)


def plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as torch takes it: native byte order, contiguous, writeable; what is so is not copied."""
    native = array.dtype.newbyteorder("=")
    return np.require(array, dtype=native, requirements=["C", "W"])  # memory-mapped arrays are not writeable
