"""Checks of integer arguments, in one voice."""

import operator

import numpy as np

WORD = 2**64  # seeds, epochs and keys are 64-bit words


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as a Python int between ``low`` and ``high``, both included.

    Args:
        name: The argument's name, for the message.
        value: A Python or numpy integer; a bool is not one.
        low: The least value allowed.
        high: The greatest value allowed; None for no bound.

    Raises:
        TypeError: If ``value`` is not an integer.
        ValueError: If it lies outside the bounds.

    >>> integer("rank", 3, 0, 7)
    3
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    try:
        number = operator.index(value)
    except TypeError as error:  # numpy arrays and tensors have __index__ but not always an index
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})") from error
    if number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number
