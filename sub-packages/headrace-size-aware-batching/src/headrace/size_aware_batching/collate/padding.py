"""The fill value of each field of a padded batch."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.size_aware_batching.collate.fields import Name, Path, place

_PADDING = {"labels": -100, "attention_mask": 0}  # defaults for unnamed fields: ignored by losses and attention


def padding_for(path: Path, pad_value: float | Mapping[Name, float], separator: float | None = None) -> float:
    """Return the padding of a field: the value for its name, else its separator, its default, or the common value."""
    named, others = (pad_value, 0) if isinstance(pad_value, Mapping) else ({}, pad_value)
    own: float = value_for(path, _PADDING, others) if separator is None else separator
    value: float = value_for(path, named, own)
    return value


def value_for(path: Path, values: Mapping[Any, float], default: Any) -> Any:
    """Return the value of a field's name."""
    return values.get(path[-1], default) if path else default


def refuse_value(name: str, value: float, dtype: torch.dtype, path: Path) -> None:
    """Raise a ValueError if a dtype cannot represent a value: torch would truncate it silently."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        raise ValueError(
            f"{name} must be a whole number from {low} to {high} for {place(path)} of {dtype}, got {value!r}: "
            "convert the field in the dataset, or give each field its own value by a mapping"
        )
