"""Decodes the members of samples, and applies a user's transform."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.webdatamodule.shards.decoding.allowed import AllowedClass, AllowedClassError
from headrace.webdatamodule.shards.decoding.decode import MemberDecoder, decode_member, member_decoder
from headrace.webdatamodule.shards.decoding.limits import MAX_BYTES
from headrace.webdatamodule.shards.errors import DecodeError, ShardError

if TYPE_CHECKING:
    from headrace.webdatamodule.shards.reading.shard_reader import Sample, ShardReader

Decoder: TypeAlias = Callable[[bytes], Any]
Decode: TypeAlias = Callable[[str, bytes], Any] | Mapping[str, Decoder | None] | None
Transform: TypeAlias = Callable[[dict[str, Any]], Any]


class SampleDecoder:
    """Decodes and transforms samples, and names the place when one of both fails."""

    def __init__(
        self,
        members: Sequence[str],
        decode: Decode,
        transform: Transform | None,
        allowed_classes: Collection[AllowedClass],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._transform = transform
        self._decoders = _decoders(members, decode, allowed_classes, max_bytes)
        self._steps = [_step(member, decoder) for member, decoder in self._decoders.items()]
        self.is_noop = transform is None and not self._decoders
        self.runs_own_code = transform is not None or not (decode is None or decode is decode_member)

    def __call__(self, sample: Sample, reader: ShardReader, number: int) -> Any:
        """Finish one sample, in place; `reader` and `number` tell where it comes from."""
        steps = self._steps
        if len(sample) < len(steps):  # a sample may have few of many members
            steps = [_step(member, self._decoders[member]) for member in sample if member in self._decoders]
        member = ""
        try:
            for member, decoder, make, most in steps:
                if (data := sample.get(member)) is not None:
                    sample[member] = make(data) if len(data) <= most else decoder(data)
        except AllowedClassError:
            raise
        except ShardError as error:
            vars(error).update(reader.place(number, member))
            raise
        except Exception as error:
            failed = self._decoders[member]
            if isinstance(failed, MemberDecoder):  # of a small member
                explained = failed.explained(error)
            else:
                explained = DecodeError(f"the decoder of {member!r} failed with {type(error).__name__}: {error}")
            vars(explained).update(reader.place(number, member))
            raise explained from error
        if self._transform is None:
            return sample
        key, shard = sample["__key__"], reader.index.shard
        try:
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"in transform, with sample {key!r} of shard {shard!r}")
            if isinstance(error, ShardError) and error.sample is None:
                error.shard, error.sample = shard, key
            raise


def _step(member: str, decoder: Decoder) -> tuple[str, Decoder, Decoder, int]:
    """A member's key, its decoder, the one of small members, and the most bytes of these."""
    make, most = (decoder.make, decoder.most) if isinstance(decoder, MemberDecoder) else (decoder, -1)
    return member, decoder, make, most


def _decoders(
    members: Sequence[str], decode: Decode, allowed_classes: Collection[AllowedClass], max_bytes: int
) -> dict[str, Decoder]:
    """What decodes each member; nothing for those that stay bytes."""
    by_extension = decode is decode_member or isinstance(decode, Mapping)
    made = {member: member_decoder(member, tuple(allowed_classes), max_bytes) for member in members}
    default: dict[str, Decoder] = {member: decoder for member, decoder in made.items() if decoder is not None}
    if decode is None or decode is decode_member:
        return default if by_extension else {}
    if isinstance(decode, Mapping):
        own = {_folded(member): decoder for member, decoder in decode.items()}
        unknown = [member for member in own if member not in members]
        if unknown:
            raise ValueError(f"decode names {unknown}, but the members are {sorted(members)}")
        for member, decoder in own.items():
            if decoder is not None and not callable(decoder):
                raise ValueError(f"decode[{member!r}] must be a function of bytes or None, got {decoder!r}")
        return {member: decoder for member, decoder in {**default, **own}.items() if decoder is not None}
    return {member: partial(decode, member) for member in members}


def _folded(member: object) -> Any:
    """A member's key in lower case; what is no text stays as it is, and is no member's key."""
    return member.lower() if isinstance(member, str) else member


def chosen_members(keys: Sequence[str], members: Collection[str]) -> tuple[str, ...]:
    """The members to read, in lower case; refused unless there are such."""
    given = list(keys)
    chosen = tuple(map(_folded, given))
    if not chosen or not all(key in members for key in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"keys must be one or more of {sorted(members)}, each once, got {given}")
    return chosen
