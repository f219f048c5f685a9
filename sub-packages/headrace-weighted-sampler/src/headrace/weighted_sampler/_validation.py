"""What the sampler and the stream dataset have in common: checks of arguments and states."""

import hashlib
import operator
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

SEED_BOUND = 2**64  # seeds are below it; keys are 64-bit words too
DIGEST_DIGITS = 16
MAX_POSITION = 2**62  # positions are 64-bit integers, with room for sums of two
_MAX_NAMES = 10  # names in a message

Weight: TypeAlias = int | float | Fraction | Decimal | np.integer[Any] | np.floating[Any]

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 80


def shown(value: object) -> str:
    """Write a value into a message: its ``repr``, shortened, and its type."""
    return f"{_short.repr(value)} ({type(value).__name__})"


def listed(names: Sequence[Any]) -> str:
    """Write names into a message, the first ten of them."""
    text = ", ".join(map(_short.repr, names[:_MAX_NAMES])) or "none"
    return text if len(names) <= _MAX_NAMES else f"{text} and {len(names) - _MAX_NAMES} more"


# -- Arguments -----------------------------------------------------------------------------------------------------


def as_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return a Python or numpy integer from ``low`` to ``high`` as an int."""
    allowed = f"an int >= {low}" if high is None else f"an int from {low} to {high}"
    try:
        number = operator.index(None if isinstance(value, (bool, np.bool_)) else value)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} must be {allowed}, got {shown(value)}") from error
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def as_bool(name: str, value: object) -> bool:
    """Return a flag as a Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def as_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {_short.repr(value)}")
    return value


def as_fraction(name: str, value: Weight) -> Fraction:
    """Return a weight as an exact fraction; a float stands for the shortest decimal that reads back as itself.

    >>> as_fraction("weight", 1.1), as_fraction("weight", np.float32(0.25))
    (Fraction(11, 10), Fraction(1, 4))
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction, Decimal, np.integer, np.floating)):
        raise TypeError(f"{name} must be an int, float, Fraction or Decimal, got {shown(value)}")
    if isinstance(value, (int, Fraction)):
        exact = Fraction(value)
    elif value.is_finite() if isinstance(value, Decimal) else np.isfinite(value):
        exact = Fraction(str(value))
    else:
        raise ValueError(f"{name} must be finite, got {value}")
    if exact < 0:
        raise ValueError(f"{name} must not be negative, got {value}; 0 leaves a source out")
    return exact


# -- Fingerprints and states ---------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """Hash the ``repr`` of some plain values to ``DIGEST_DIGITS`` hex digits."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_DIGITS]


def data_identity(dataset: object) -> object:
    """Return what a dataset says about its content: its ``fingerprint``, those of its parts, or None."""
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, (str, int)):
        return str(own)
    parts = getattr(dataset, "datasets", None)  # of a ConcatDataset
    return [data_identity(part) for part in parts] if isinstance(parts, (list, tuple)) else None


def check_state(
    owner: str, state: Mapping[str, Any], keys: Collection[str], version: int, seed: int, widths: Mapping[str, int]
) -> None:
    """Refuse what is not a state of this class, version and seed; ``widths`` are those of its fingerprint's parts."""
    check_keys("state", state, keys, owner)
    fingerprint, digits = state["fingerprint"], sum(widths.values())
    if not isinstance(fingerprint, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", fingerprint):
        raise ValueError(
            f"state['fingerprint'] must be {digits} hex digits, got {_short.repr(fingerprint)}: this is no state "
            f"of {owner}; load it into an object of the class whose state_dict() returned it"
        )
    if type(state["version"]) is not int or state["version"] != version:
        raise ValueError(
            f"state has version {_short.repr(state['version'])}, this release reads version {version}; "
            "load it with the release that wrote it"
        )
    if as_int("state['seed']", state["seed"], 0, SEED_BOUND - 1) != seed:
        raise ValueError(
            f"state was saved with seed={state['seed']}, this one has seed={seed}: their orders differ; "
            f"build it with seed={state['seed']}"
        )


def check_fingerprint(saved: str, own: str, widths: Mapping[str, int], faults: Mapping[str, str]) -> None:
    """Refuse a state of another fingerprint; ``faults`` say what it was saved with, by the part that differs."""
    end = 0
    for part, width in widths.items():
        begin, end = end, end + width
        if saved[begin:end] != own[begin:end]:
            raise ValueError(
                f"state was saved with {faults[part]} (fingerprint {saved}, this one's is {own}); "
                "resume with what it was saved with"
            )


def check_keys(name: str, state: object, keys: Collection[str], owner: str) -> None:
    """Refuse a state, or a part of one, that is not a mapping with these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a mapping returned by {owner}.state_dict(), got {type(state).__name__}")
    if missing := sorted(set(keys) - set(state)):
        raise ValueError(
            f"{name} lacks {missing}, got the keys {listed(list(state))}; pass what {owner}.state_dict() returned"
        )
