"""Checks of arguments and states, shared by the sampler and the stream dataset."""

import hashlib
import operator
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

SEED_BOUND = 2**64  # seeds are below it; keys are 64-bit words too
DIGEST_DIGITS = 16
MAX_POSITION = 2**62  # positions are 64-bit integers, with room for sums of two

Weight: TypeAlias = int | float | Fraction | Decimal | np.integer[Any] | np.floating[Any]


def as_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return a Python or numpy integer from ``low`` to ``high`` as an int; TypeError or ValueError otherwise.

    >>> as_int("rank", np.int64(3), 0, 7)
    3
    """
    allowed = f"an int >= {low}" if high is None else f"an int from {low} to {high}"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__})")
    try:
        number = operator.index(value)
    except TypeError as error:  # numpy arrays and tensors have __index__ but not always an index
        raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__})") from error
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def as_bool(name: str, value: object) -> bool:
    """Return a flag as a Python bool; TypeError for anything but a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def as_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of the choices; ValueError otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def as_fraction(name: str, value: Weight) -> Fraction:
    """Return a weight as an exact fraction.

    A float stands for the shortest decimal that reads back as the same float: 1.1 is 11/10, not the binary number
    just above it.

    >>> as_fraction("weight", 1.1), as_fraction("weight", np.float32(0.25))
    (Fraction(11, 10), Fraction(1, 4))
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction, Decimal, np.integer, np.floating)):
        raise TypeError(f"{name} must be an int, float, Fraction or Decimal, got {value!r} ({type(value).__name__})")
    if isinstance(value, (float, np.floating)):
        weight = Fraction(str(value)) if np.isfinite(value) else None
    elif isinstance(value, np.integer):
        weight = Fraction(int(value))
    else:
        weight = Fraction(value) if not isinstance(value, Decimal) or value.is_finite() else None
    if weight is None:
        raise ValueError(f"{name} must be finite, got {value}")
    if weight < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 leaves a source out")
    return weight


def digest(*parts: object) -> str:
    """Hash the ``repr`` of some plain values to ``DIGEST_DIGITS`` hex digits."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]


def split_fingerprint(fingerprint: object, widths: Mapping[str, int]) -> dict[str, str]:
    """Cut the fingerprint of a state into its named parts of so many hex digits; ValueError if it is none.

    >>> split_fingerprint("0a1b", {"data": 2, "options": 2})
    {'data': '0a', 'options': '1b'}
    """
    digits = sum(widths.values())
    if not isinstance(fingerprint, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", fingerprint):
        raise ValueError(f"state['fingerprint'] must be {digits} hex digits, got {fingerprint!r}")
    ends = accumulate(widths.values())
    return {name: fingerprint[end - width : end] for (name, width), end in zip(widths.items(), ends, strict=True)}


def data_identity(dataset: object) -> object:
    """Return what a dataset says about its content: its ``fingerprint``, those of its parts, or None."""
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, (str, int)):
        return str(own)
    parts = getattr(dataset, "datasets", None)  # of a ConcatDataset
    return [data_identity(part) for part in parts] if isinstance(parts, (list, tuple)) else None


def check_state(state: Mapping[str, Any], keys: Collection[str], version: int, seed: int) -> None:
    """Refuse what is not a state of this version and seed."""
    check_keys("state", state, keys)
    if type(state["version"]) is not int or state["version"] != version:
        raise ValueError(
            f"state has version {state['version']!r}, this release reads version {version}; "
            "load it with the release that wrote it"
        )
    if as_int("state['seed']", state["seed"], 0, SEED_BOUND - 1) != seed:
        raise ValueError(
            f"state was saved with seed={state['seed']}, this one has seed={seed}: their orders differ; "
            f"build it with seed={state['seed']}"
        )


def check_keys(name: str, state: object, keys: Collection[str]) -> None:
    """Refuse a part of a state that is not a mapping with these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a mapping returned by state_dict(), got {type(state).__name__}")
    if missing := sorted(set(keys) - set(state)):
        raise ValueError(f"{name} lacks {missing}, got the keys {sorted(state)}; pass what state_dict() returned")
