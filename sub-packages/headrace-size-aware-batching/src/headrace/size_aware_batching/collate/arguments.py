"""Validation of the arguments of collate functions."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from headrace.size_aware_batching._validation import whole_number


def check_multiple(name: str, value: Any) -> None:
    """Refuse values other than ints of at least 1, including None."""
    if whole_number(name, value) is None:
        raise TypeError(f"{name} must be an int >= 1, got None: leave it out, or give 1")


def check_limits(max_length: Any, max_total_size: Any) -> None:
    """Refuse limits that are not integers of at least 1."""
    whole_number("max_length", max_length)
    whole_number("max_total_size", max_total_size)


def check_numbers(name: str, value: Any) -> None:
    """Raise a TypeError for values that are neither a number nor a mapping to numbers."""
    for number in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, or a mapping from field to number, got {number!r}")
