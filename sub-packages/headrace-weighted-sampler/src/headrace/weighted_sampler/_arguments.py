"""Checks of single arguments, and how messages show values."""

import reprlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

SEED_BOUND = 2**64  # seeds are below it; keys are 64-bit words too
MAX_POSITION = 2**62  # positions are 64-bit integers, with room for sums of two
_MAX_NAMES = 10  # names in a message

short = reprlib.Repr()
short.maxother = short.maxstring = 80


def shown(value: object) -> str:
    """Write a value into a message: its ``repr``, shortened, and its type."""
    return f"{short.repr(value)} ({type(value).__name__})"


def listed(names: Sequence[Any]) -> str:
    """Write names into a message, the first ten of them."""
    text = ", ".join(map(short.repr, names[:_MAX_NAMES])) or "none"
    return text if len(names) <= _MAX_NAMES else f"{text} and {len(names) - _MAX_NAMES} more"


def as_bool(name: str, value: object) -> bool:
    """Return a flag as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def is_pair(value: object) -> bool:
    """Whether a value is a tuple or list of two, or of a class such as those of OmegaConf."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == 2


def as_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {short.repr(value)}")
    return value
