"""States to resume from: what they hold, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CURES = {
    "version": "it was saved by another version of headrace; resume with that one, or begin anew",
    "seed": "make the data module with that seed, or begin anew",
    "fingerprint": "it was saved with other samples, sizes, weights, batch size or budget; make the data module with "
    "those it was saved with, or begin anew",
}


def check_sampler_state(state: Any, mine: Mapping[str, Any]) -> None:
    """Refuse a state of something else.

    Args:
        state: What was loaded.
        mine: The version, the seed and the fingerprint that it must have.

    Raises:
        TypeError: It is no mapping.
        ValueError: Something is missing, no number or differs; the error names it, and the cure.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what state_dict() returned, got {type(state).__name__}")
    missing = {*mine, "epoch", "position"} - set(state)
    if missing:
        raise ValueError(f"state lacks {sorted(missing)}: pass what state_dict() returned")
    for name in ("epoch", "position"):
        if type(state[name]) is not int:
            raise ValueError(f"state[{name!r}] must be an int, got {state[name]!r}: pass what state_dict() returned")
    for name, value in mine.items():
        if state[name] != value:
            raise ValueError(f"state[{name!r}] is {state[name]!r}, here it is {value!r}: {_CURES[name]}")
