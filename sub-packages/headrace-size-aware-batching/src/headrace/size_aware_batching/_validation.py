"""Checks of arguments at the public door, and the messages that users see."""

import logging
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.size_aware_batching._shared.checks import checked_int, shown

Number: TypeAlias = int | float
Logger: TypeAlias = Callable[[str], None]

UNLIMITED = 2**62  # sizes and finite budgets stay below, so that sums of two fit into int64
_LOGGER = logging.getLogger("headrace.size_aware_batching")


def real_number(value: object, name: str) -> Number:
    """Turn a real number of any library, or an array or tensor of one element, into an exact int or a float.

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
        raise TypeError(f"{name} must be a real number, got {shown(value)} of type {type(value).__name__}")
    if isinstance(plain, Integral):
        return int(plain)
    if math.isnan(number := float(plain)):
        raise ValueError(f"{name} must be a real number, got NaN: remove or replace it")
    return number


def whole_number(name: str, value: Any, low: int = 1, high: int | None = None) -> int | None:
    """Return an integer from ``low`` to ``high`` as an int; None stays None."""
    return None if value is None else min(checked_int(name, value, low, high), UNLIMITED)


def checked_seed(seed: Any) -> int:
    """Return the seed as an int of 64 bits."""
    return checked_int("seed", seed, high=2**64 - 1)


def checked_epoch(epoch: Any) -> int:
    """Return the epoch as an int."""
    return checked_int("epoch", epoch)


def checked_flag(name: str, value: Any) -> bool:
    """Return True or False as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not among those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def logger_or(default: Logger, logger: Logger | None, name: str) -> Logger:
    """Return ``logger``, or the default where it is None."""
    if logger is None:
        return default
    if not callable(logger):
        raise TypeError(
            f"{name} must be a function of one string, or None for the default, got {type(logger).__name__}"
        )
    return logger


def log_info(message: str) -> None:
    """Log at INFO level under the name ``headrace.size_aware_batching``."""
    _LOGGER.info(message)


def shortlist(names: Sequence[object], total: int) -> str:
    """Join the first names and say how many more there are.

    >>> shortlist([3, 7], 2), shortlist([3, 7], 12)
    ('3, 7', '3, 7 and 10 more')
    """
    joined = ", ".join(str(name) for name in names)
    return joined if total <= len(names) else f"{joined} and {total - len(names)} more"
