"""Arguments of collate functions, checked, and the padding of each field."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from headrace.size_aware_batching._validation import whole_number
from headrace.size_aware_batching.collate.fields import Name, Path, place

_PADDING = {"labels": -100, "attention_mask": 0}  # of fields that a mapping does not name: never counted or attended to


def check_multiple(name: str, value: Any) -> None:
    """Refuse what is not an int of at least 1; None is not."""
    if whole_number(name, value) is None:
        raise TypeError(f"{name} must be an int >= 1, got None: leave it out, or give 1")


def check_limits(max_length: Any, max_total_size: Any) -> None:
    """Refuse limits that are not integers of at least 1."""
    whole_number("max_length", max_length)
    whole_number("max_total_size", max_total_size)


def check_numbers(name: str, value: Any) -> None:
    """Raise a TypeError for what is neither a number nor a mapping to numbers."""
    for number in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, or a mapping from field to number, got {number!r}")


def padding_for(path: Path, pad_value: float | Mapping[Name, float], separator: float | None = None) -> float:
    """Return the padding of a field: as named, else its separator, else its own, else the one for all fields."""
    named, others = (pad_value, 0) if isinstance(pad_value, Mapping) else ({}, pad_value)
    own: float = value_for(path, _PADDING, others) if separator is None else separator
    value: float = value_for(path, named, own)
    return value


def value_for(path: Path, values: Mapping[Any, float], default: Any) -> Any:
    """Return the value of a field's name."""
    return values.get(path[-1], default) if path else default


def refuse_value(name: str, value: float, dtype: torch.dtype, path: Path) -> None:
    """Raise a ValueError where a dtype cannot hold a value: torch would truncate it silently."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        raise ValueError(
            f"{name} must be a whole number from {low} to {high} for {place(path)} of {dtype}, got {value!r}: "
            "convert the field in the dataset, or give each field its own value by a mapping"
        )
