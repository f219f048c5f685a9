"""How samples are read from indexed shards: options that are checked once, and passed on together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from headrace.webdatamodule._shared.checks import checked_int
from headrace.webdatamodule.shards.decoding.allowed import AllowedClass, AllowedClasses
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.decoding.sample_decoder import Decode, Transform

Verify: TypeAlias = Literal["read", "open", "none"]


@dataclass(frozen=True)
class Reading:
    """How samples are read: the arguments of `IndexedShards`."""

    keys: Sequence[str] | None = None
    decode: Decode = decode_member
    transform: Transform | None = None
    verify: Verify = "read"
    allowed_classes: Collection[AllowedClass] = ()
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        keys, decode, transform = self.keys, self.decode, self.transform
        if keys is not None and (isinstance(keys, str) or not isinstance(keys, Iterable)):
            raise ValueError(f"keys must be a list of member keys, got {keys!r}: write [{keys!r}]")
        if not (decode is None or callable(decode) or isinstance(decode, Mapping)):
            raise ValueError(f"decode must be a function of key and bytes, a mapping of such or None, got {decode!r}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a sample or None, got {transform!r}")
        if self.verify not in get_args(Verify):
            raise ValueError(f"verify must be one of {', '.join(map(repr, get_args(Verify)))}, got {self.verify!r}")
        AllowedClasses(self.allowed_classes)
        object.__setattr__(self, "allowed_classes", tuple(self.allowed_classes))
        if self.allowed_classes and not (decode is decode_member or isinstance(decode, Mapping)):
            raise ValueError(
                f"allowed_classes is for the default decoding, which decode={decode!r} replaces: leave one out"
            )
        max_bytes = checked_int("max_bytes", self.max_bytes, 1, cure="say how large a member may become")
        object.__setattr__(self, "max_bytes", max_bytes)

    def arguments(self) -> dict[str, Any]:
        """The same as keyword arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
