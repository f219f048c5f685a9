"""What goes wrong with shards, with the place where it went wrong; and how wrong integers are refused."""

import operator
import pickle
from typing import SupportsFloat, SupportsIndex, cast


class ShardError(Exception):
    """Something is wrong with a shard or with what it holds.

    Args:
        message: What is wrong and what to do about it.
        shard: Path or URL of the tar file.
        sample: Key of the sample.
        member: Name of the member inside the tar file, or its key inside the sample.
        offset: Byte offset of the member's header in the tar file.

    >>> print(ShardError("the header is damaged", shard="a-000000.tar", offset=512))
    the header is damaged (shard 'a-000000.tar', offset 512)
    """

    def __init__(
        self,
        message: str,
        *,
        shard: str | None = None,
        sample: str | None = None,
        member: str | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)  # and nothing else: what pickles errors calls this again, and sets the attributes
        self.message = message
        self.shard = shard
        self.sample = sample
        self.member = member
        self.offset = offset

    def __str__(self) -> str:
        places = {"shard": self.shard, "sample": self.sample, "member": self.member, "offset": self.offset}
        named = ", ".join(f"{name} {value!r}" for name, value in places.items() if value is not None)
        return f"{self.message} ({named})" if named else self.message


class DecodeError(ShardError):
    """A member's bytes are not what its name says."""


class UnsafePickleError(DecodeError, pickle.UnpicklingError):
    """A pickle asks for something that the restricted unpickler does not allow."""


class DamagedShardError(ShardError):
    """A shard is cut or changed, or it is no tar file at all."""


class RefusedMemberError(ShardError):
    """A shard holds a link, a device, a sparse file or the like, which cannot be a part of a sample."""


class GroupingError(ShardError):
    """The members of a shard do not form samples."""


class DamagedIndexError(ShardError):
    """An index is cut or changed, or it is no index at all."""


class IndexVersionError(ShardError):
    """An index has the format of another release."""


class StaleIndexError(ShardError):
    """An index belongs to other bytes than the shard's."""


class ManifestError(ShardError):
    """A directory's manifest is missing or damaged, or says what is impossible."""


def as_int(name: str, value: object, least: int, cure: str = "") -> int:
    """An argument as an int; numpy's integers are allowed, bools are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(cast(SupportsIndex, value))
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}{f': {cure}' if cure else ''}")
    return number


def check_seconds(name: str, value: object, *, above: bool = False) -> None:
    """Refuse what is no number of seconds, 0 or more, or `above` 0."""
    seconds = float(value) if isinstance(value, SupportsFloat) else -1.0
    if not (seconds > 0 if above else seconds >= 0):
        raise ValueError(f"{name} must be seconds {'>' if above else '>='} 0, got {value!r}")
