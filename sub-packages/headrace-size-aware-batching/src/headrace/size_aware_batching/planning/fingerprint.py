"""The fingerprint of sizes and options, and in what two fingerprints differ."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from headrace.size_aware_batching._shared.digest import array_digest, text_digest

WHOLE, PART = 32, 4  # hex digits
# The last parts, which a fingerprint has where one of them is given.
OPTIONAL = ("extra_per_sample", "by", "label_per", "group_by")


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return 32 hex digits that stand for all parts together, and then 4 for each, so that a difference has a name.

    Equal parts give equal fingerprints, whatever integer or real type they come in.
    """
    digests = [digest(value) for value in _without_optional(parts).values()]
    return text_digest("".join(digests)) + "".join(each[:PART] for each in digests)


def digest(value: Any) -> str:
    """Return 32 hex digits for a part."""
    return text_digest(repr(canonical(value)))


def has_parts(parts: Mapping[str, Any], other: Any) -> bool:
    """Return whether a fingerprint may be one of these parts, with other values."""
    lengths = {WHOLE + PART * len(parts), WHOLE + PART * len(parts.keys() - {*OPTIONAL})}
    return isinstance(other, str) and len(other) in lengths


def differing(parts: Mapping[str, Any], own: str, other: str) -> list[str]:
    """Return the names of the parts in which two fingerprints differ.

    >>> parts = {"budget": 5, "seed": 0}
    >>> differing(parts, fingerprint(parts), fingerprint({"budget": 6, "seed": 0}))
    ['budget']
    """
    stop = WHOLE + PART * len(parts)
    own, other = (each + digest(None)[:PART] * ((stop - len(each)) // PART) for each in (own, other))
    digits = [slice(start, start + PART) for start in range(WHOLE, stop, PART)]
    return [name for name, each in zip(parts, digits, strict=True) if own[each] != other[each]]


def _without_optional(parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts, without those that are optional where none of these is given."""
    if any(parts.get(name) is not None for name in OPTIONAL):
        return parts
    return {name: value for name, value in parts.items() if name not in OPTIONAL}


def canonical(value: Any) -> Any:
    """Return a value in one form for all types that are equal: 50 for 50.0, True for ``np.True_``."""
    if isinstance(value, np.ndarray):
        return array_digest(value)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return int(float(value)) if float(value).is_integer() else float(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(canonical(element) for element in value)
    return value
