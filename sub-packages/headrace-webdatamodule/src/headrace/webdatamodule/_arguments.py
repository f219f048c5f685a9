"""Checks of single arguments. Importing this loads nothing heavy: shards and loaders use it."""

import operator
import reprlib
from typing import Any, SupportsFloat


def checked_int(name: str, value: Any, low: int, cure: str = "") -> int:
    """An argument as an int >= `low`; numpy's integers are allowed, bools are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        kind = TypeError if number is None else ValueError
        raise kind(f"{name} must be an int >= {low}, got {reprlib.repr(value)}{f': {cure}' if cure else ''}")
    return number


def check_seconds(name: str, value: object, *, above: bool = False) -> None:
    """Refuse what is no number of seconds, 0 or more, or `above` 0."""
    seconds = float(value) if isinstance(value, SupportsFloat) else -1.0
    if not (seconds > 0 if above else seconds >= 0):
        raise ValueError(f"{name} must be seconds {'>' if above else '>='} 0, got {value!r}")
