"""Arguments that may differ from split to split."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.webdatamodule.splits import Split, by_split

# Names of splits that are meant as such when they come as texts.
_MEANT = {
    **dict.fromkeys(("train", "training", "fit"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "validate", "dev", "eval"), "val"),
    **dict.fromkeys(("test", "testing", "predict"), "test"),
}
_NESTED = "shards are {Split.train: directory}, or {Split.train: {'name': directory, ...}} for several sources"


@dataclass(frozen=True)
class PerSplit:
    """What was given for an argument: one value for all splits, or a mapping from `Split`.

    Args:
        name: The argument's.
        given: What was given.
        default: For splits that a mapping leaves out.
    """

    name: str
    given: Any
    default: Any = None

    def __post_init__(self) -> None:
        if self.mapped:
            by_split(self.name, self.given)

    @property
    def mapped(self) -> bool:
        """Whether it is a mapping from splits, and not a mapping that is meant as a value."""
        return isinstance(self.given, Mapping) and any(isinstance(key, Split) for key in self.given)

    def __contains__(self, split: Split) -> bool:
        return split in self.given if self.mapped else self.given is not None

    def __getitem__(self, split: Split) -> Any:
        return self.given.get(split, self.default) if self.mapped else self.given


def named_sources(name: str, given: Any, default: str) -> dict[str, Any]:
    """The sources of a split, each with a name.

    Args:
        name: The argument's.
        given: A place of indexed shards, or {name: place}.
        default: Name of an only source.

    Raises:
        TypeError: Names that are no texts.
        ValueError: There is no source.
    """
    if not isinstance(given, Mapping):
        return {default: given}
    if not given:
        raise ValueError(f"{name} has no source: name at least one, such as {{'proteins': directory}}")
    for key in given:
        if not isinstance(key, str):
            raise TypeError(f"{name}: names of sources must be texts, got {key!r}; {_NESTED}")
    for key, place in given.items():
        if key.lower() in _MEANT:
            raise TypeError(f"{name}: keys must be members of Split, got {key!r}; use Split.{_MEANT[key.lower()]}")
        if isinstance(place, Split | Mapping):
            raise TypeError(f"{name}: {key!r} must be a place of shards, got {place!r}; {_NESTED}")
    return dict(given)


def seed_int(seed: Any) -> int:
    """Check a seed.

    Args:
        seed: What was given; numpy's integers will do.

    Raises:
        TypeError: Not an integer.
        ValueError: Below 0, or 2**64 and more.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int, got {seed!r}") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"seed must be 0 to 2**64 - 1, got {seed!r}")
    return number
