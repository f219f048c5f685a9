"""Checks of single arguments, and how messages show values."""

import operator
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80


def shown(value: object) -> str:
    """Return a short ``repr`` for an error: a value may be a whole dataset.

    >>> shown("a word"), shown(list(range(10_000)))
    ("'a word'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    return _SHORT.repr(value)


def checked_int(name: str, value: Any, low: int = 0, high: int | None = None, cure: str = "") -> int:
    """Return an integer of any library from ``low`` to ``high`` as an int; bools are none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"an int >= {low}" if high is None else f"an int from {low} to {high}"
        end = f": {cure}" if cure else ""
        if number is None:
            raise TypeError(f"{name} must be {allowed}, got {shown(value)} of type {type(value).__name__}{end}")
        raise ValueError(f"{name} must be {allowed}, got {number}{end}")
    return number
