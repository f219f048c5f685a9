"""Fingerprints of data and options, and checks of loaded states."""

import re
from collections.abc import Collection, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any

from headrace.weighted_sampler._arguments import SEED_BOUND, listed, short
from headrace.weighted_sampler._shared.checks import checked_int
from headrace.weighted_sampler._shared.digest import text_digest
from headrace.weighted_sampler._shared.state_mismatch import StateMismatchError

DIGEST_DIGITS = 16
STATE_VERSION = 1  # raised when a key changes, or the same state stands for another order


def digest(*parts: object) -> str:
    """Hash the ``repr`` of some plain values to ``DIGEST_DIGITS`` hex digits."""
    return text_digest(repr(parts))[:DIGEST_DIGITS]


def data_identity(dataset: object) -> object:
    """Return a dataset's ``fingerprint``, or those of its parts, or None."""
    own = getattr(dataset, "fingerprint", None)
    if isinstance(own, (str, int)):
        return str(own)
    parts = getattr(dataset, "datasets", None)  # of a ConcatDataset
    return [data_identity(part) for part in parts] if isinstance(parts, (list, tuple)) else None


def prefix_identity(dataset: Sized, length: int, ends: Sequence[int] | None = None) -> object:
    """Return the ``data_identity`` that a dataset had before it grew; None where it cannot say it.

    Args:
        dataset: With its present samples.
        length: Number of samples that it had.
        ends: Ends of the parts that a concatenation had, where they are known; by default the parts up to ``length``,
            without empty ones at the end of data that grew.
    """
    own, parts = getattr(dataset, "fingerprint", None), getattr(dataset, "datasets", None)
    if length == len(dataset) and (ends is None or isinstance(own, (str, int))):
        return data_identity(dataset)
    if isinstance(own, (str, int)):
        of = getattr(dataset, "prefix_fingerprint", None)
        return of(length) if callable(of) else None
    if not isinstance(parts, (list, tuple)):
        return None
    if ends is None:
        now = accumulate(map(len, parts))
        ends = [min(end, length) for part, end in zip(parts, now, strict=True) if end - len(part) < length]
    return [prefix_identity(part, end - begin) for part, begin, end in zip(parts, [0, *ends], ends, strict=False)]


def check_state(
    owner: str, state: Mapping[str, Any], keys: Collection[str], seed: int, widths: Mapping[str, int]
) -> None:
    """Refuse any state of another class, version or seed; ``widths`` are the lengths of the fingerprint's parts."""
    check_keys("state", state, keys, owner)
    fingerprint, digits = state["fingerprint"], sum(widths.values())
    if not isinstance(fingerprint, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", fingerprint):
        raise ValueError(
            f"state['fingerprint'] must be {digits} hex digits, got {short.repr(fingerprint)}: this is not a state "
            f"of {owner}; load it into an object of the class whose state_dict() returned it"
        )
    if type(state["version"]) is not int or state["version"] != STATE_VERSION:
        raise StateMismatchError(
            f"state has version {short.repr(state['version'])}, this release reads version {STATE_VERSION}",
            "load it with the release that wrote it",
            ["version"],
        )
    if checked_int("state['seed']", state["seed"], 0, SEED_BOUND - 1) != seed:
        raise StateMismatchError(
            f"state was saved with seed={state['seed']}, this {owner} has seed={seed}",
            f"their orders differ; construct it with seed={state['seed']}",
            ["seed"],
        )


def check_fingerprint(saved: str, own: str, widths: Mapping[str, int], faults: Mapping[str, str]) -> None:
    """Refuse a state of another fingerprint; ``faults`` describes the difference, by the part that differs."""
    end = 0
    for part, width in widths.items():
        begin, end = end, end + width
        if saved[begin:end] != own[begin:end]:
            raise StateMismatchError(
                f"state was saved with {faults[part]} (fingerprint {saved}, here {own})",
                "resume with the data and options of the saved run",
                [part],
            )


def check_keys(name: str, state: object, keys: Collection[str], owner: str) -> None:
    """Refuse a state, or a part of one, that is not a mapping with these keys."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a mapping returned by {owner}.state_dict(), got {type(state).__name__}")
    if missing := sorted(set(keys) - set(state)):
        raise ValueError(
            f"{name} lacks {missing}, got the keys {listed(list(state))}; pass what {owner}.state_dict() returned"
        )
