"""Checks of arguments, and where messages go when the caller names no logger."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

Logger = Callable[[str], None]

_LARGEST_MULTIPLE = 2**31
_LOGGER = logging.getLogger("headrace.size_aware_batching")
_NOT_THE_CALLER = (str(Path(__file__).parent), str(Path(torch.utils.data.__file__).parent))


def log_info(message: str) -> None:
    """Log at INFO level under the name ``headrace.size_aware_batching``."""
    _LOGGER.info(message)


def warn(message: str) -> None:
    """Issue a ``UserWarning`` that points at the line of the user's code, not at this package or torch's."""
    warnings.warn(message, UserWarning, stacklevel=_level_of_the_caller())


def logger_or(default: Logger, logger: Logger | None, name: str) -> Logger:
    """Return ``logger``, or the default where it is None.

    Raises:
        TypeError: If it is neither None nor callable.
    """
    if logger is None:
        return default
    if not callable(logger):
        raise TypeError(
            f"{name} must be a function of one string, or None for the default, got {type(logger).__name__}"
        )
    return logger


def shortlist(names: Sequence[object], total: int) -> str:
    """Join the names and say how many there are besides.

    >>> shortlist([3, 7], 2), shortlist([3, 7], 12)
    ('3, 7', '3, 7 and 10 more')
    """
    joined = ", ".join(str(name) for name in names)
    return joined if total <= len(names) else f"{joined} and {total - len(names)} more"


def _level_of_the_caller() -> int:
    # Counted from warn(), whose own frame is level 1; generators make the distance vary.
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        level, frame = level + 1, frame.f_back
    return level


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is none of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")


def whole_number(name: str, value: Any) -> int | None:
    """Return an integer of at least 1 as a plain one; None is left alone."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"{name}: got {value!r}, expected an integer")
    if int(value) < 1:
        raise ValueError(f"{name}: got {value!r}, expected 1 or more")
    if name.endswith("multiple") and int(value) > _LARGEST_MULTIPLE:
        raise ValueError(f"{name}: got {value!r}, expected at most {_LARGEST_MULTIPLE}")
    return min(int(value), 2**62)
