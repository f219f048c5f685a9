"""Validation of the arguments of collate functions."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from headrace.size_aware_batching._validation import checked_int, shown, whole_number


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


def checked_shapes(shapes: Any, length_multiple: int) -> tuple[tuple[int, int], ...]:
    """Return pairs of count and length, by length; refuse what are none."""
    if not isinstance(shapes, Sequence) or isinstance(shapes, str):
        raise TypeError(
            f"shapes must be a sequence of (count, length), such as the sampler's shapes, or None, got {shown(shapes)}"
        )
    pairs = []
    for shape in shapes:
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise TypeError(f"shapes must hold pairs (count, length), got {shown(shape)}")
        count, length = (checked_int("each number in shapes", number, 1) for number in shape)
        if length % length_multiple:
            raise ValueError(
                f"shapes must have lengths that are multiples of length_multiple={length_multiple}, got {length}: give "
                "the batch sampler the same length_multiple, or leave it out here"
            )
        pairs.append((count, length))
    return tuple(sorted(pairs, key=lambda shape: shape[::-1]))
