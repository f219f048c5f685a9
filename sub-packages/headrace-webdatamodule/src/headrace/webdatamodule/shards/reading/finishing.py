"""What happens to a sample's bytes: each member decoded, then the whole sample transformed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from headrace.webdatamodule.shards.decoding.allowed import Allowed, AllowedClass, AllowedClassError
from headrace.webdatamodule.shards.decoding.decode import decode_member
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DecodeError, ShardError
from headrace.webdatamodule.shards.reading.rows import Sample
from headrace.webdatamodule.shards.reading.shard_reader import OpenShard

Decoder: TypeAlias = Callable[[bytes], Any]
Decode: TypeAlias = Callable[[str, bytes], Any] | Mapping[str, Decoder | None] | None
Transform: TypeAlias = Callable[[Sample], Any]


class Finishing:
    """Decodes and transforms samples, and says where it was when one of both fails.

    Args:
        members: The member keys that occur, in lower case.
        decode: As for `IndexedShards`.
        transform: The same.
        allowed_classes: The same.
        max_bytes: The same.

    Raises:
        ValueError: One of them is not allowed.
    """

    def __init__(
        self,
        members: Iterable[str],
        decode: Decode,
        transform: Transform | None,
        allowed_classes: Collection[AllowedClass],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if transform is not None and not callable(transform):
            raise ValueError(f"transform must be a function of a sample or None, got {transform!r}")
        self._transform = transform
        self._decoders = decoders(tuple(members), decode, allowed_classes, max_bytes)
        self.idle = transform is None and not self._decoders

    def __call__(self, sample: Sample, shard: OpenShard, number: int) -> Any:
        """Finish one sample.

        Args:
            sample: Its bytes; changed.
            shard: Where it comes from.
            number: Its number there.

        Returns:
            The sample, or what `transform` made of it.

        Raises:
            DecodeError: A member cannot be decoded; it names the place.
        """
        # A sample may have few of many members.
        few = len(sample) < len(self._decoders)
        for member in [*sample] if few else self._decoders:
            if member in sample and member in self._decoders:
                sample[member] = _decoded(self._decoders[member], sample[member], shard, number, member)
        return sample if self._transform is None else _transformed(self._transform, sample, shard)


def decoders(
    members: Collection[str],
    decode: Decode,
    allowed_classes: Collection[AllowedClass],
    max_bytes: int = MAX_BYTES,
) -> dict[str, Decoder]:
    """What decodes each member; nothing for those that stay bytes.

    Args:
        members: The member keys that occur.
        decode: As for `IndexedShards`.
        allowed_classes: The same.
        max_bytes: The same.

    Raises:
        ValueError: `decode` names other members, or is something else; `allowed_classes` would not be used, or
            holds something else.
    """
    usual = decode is decode_member or isinstance(decode, Mapping)
    if allowed_classes and not usual:
        raise ValueError(
            f"allowed_classes is for the default decoding, which decode={decode!r} replaces: leave one out"
        )
    Allowed(allowed_classes)
    by_default: dict[str, Decoder] = {
        member: partial(decode_member, member, allowed_classes=tuple(allowed_classes), max_bytes=max_bytes)
        for member in members
    }
    if decode is None or decode is decode_member:
        return by_default if usual else {}
    if isinstance(decode, Mapping):
        own = {folded(member): decoder for member, decoder in decode.items()}
        strange = [member for member in own if member not in members]
        if strange:
            raise ValueError(f"decode names {strange}, but the members are {sorted(members)}")
        for member, decoder in own.items():
            if decoder is not None and not callable(decoder):
                raise ValueError(f"decode[{member!r}] must be a function of bytes or None, got {decoder!r}")
        return {member: decoder for member, decoder in {**by_default, **own}.items() if decoder is not None}
    if not callable(decode):
        raise ValueError(f"decode must be a function of key and bytes, a mapping of such or None, got {decode!r}")
    return {member: partial(decode, member) for member in members}


def folded(member: object) -> Any:
    """A member's key in lower case; what is no text stays as it is, and is no member's key.

    >>> folded("JPG"), folded(3)
    ('jpg', 3)
    """
    return member.lower() if isinstance(member, str) else member


def _decoded(decoder: Decoder, data: bytes, shard: OpenShard, number: int, member: str) -> Any:
    try:
        return decoder(data)
    except AllowedClassError:
        raise
    except ShardError as error:
        vars(error).update(shard.place(number, member))
        raise
    except Exception as error:
        message = f"the decoder of {member!r} failed with {type(error).__name__}: {error}"
        raise DecodeError(message, **shard.place(number, member)) from error


def _transformed(transform: Transform, sample: Sample, shard: OpenShard) -> Any:
    key = sample["__key__"]
    try:
        return transform(sample)
    except Exception as error:
        error.add_note(f"in transform, with sample {key!r} of shard {shard.index.shard!r}")
        if isinstance(error, ShardError) and error.sample is None:
            error.shard, error.sample = shard.index.shard, key
        raise
